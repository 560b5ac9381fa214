"""Protection from web pages of other sites. Browsers send requests of such pages to the server."""

from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from mie.errors import shown_text
from mie.serve.asgi import answer, facts_of, header, route_of
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, dialect_of

JSON = "application/json"
CONTENT_TYPES = {"/mie/trace": "application/x-ndjson"}
"""The content types of the routes with a POST that is not JSON."""


class CrossSite:
    """Middleware that refuses requests that a page of another site can cause.

    A server without keys on a person's own machine has no other protection from the pages that
    they visit. Three headers identify the sender of a request:

    * ``Host`` has the name in the page's address. The name of a site can resolve to this machine
      (DNS rebinding), but a site can own no IP address, and no name that ends in localhost.
    * ``Origin`` names the page's site. Where browsers send none, ``Sec-Fetch-Site`` shows whether
      it is another site.
    * ``Content-Type`` is JSON. No form has it, and a script needs the server's consent to send it.
      Ollama's routes take a body without a type, too, if no header shows that a page sends it.

    With keys, only the content type is checked, because a page of another site has no key.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._is_keyless = config.keys is None
        self._checks_host = self._is_keyless or config.allowed_hosts is not None
        self._hosts = {each.lower() for each in (config.host, *(config.allowed_hosts or ()))}
        self._endings = tuple(each[1:] for each in self._hosts if each.startswith("*."))
        self._origins = frozenset(config.allowed_origins or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        refusal = (
            self._of_host(scope)
            or _of_number_of_hosts(scope)
            or self._of_origin(scope)
            or _of_content_type(scope)
            or _of_encoding(scope)
        )
        if refusal is not None:
            return await answer(refusal, scope, receive, send)
        return await self._app(scope, receive, send)

    def _of_host(self, scope: Scope) -> ApiError | None:
        if not self._checks_host or "*" in self._hosts:
            return None
        for key, value in scope["headers"]:
            if key == b"host" and not self._is_known(name := name_in(value.decode("latin-1"))):
                name = shown_text(name)
                return self._forbidden(
                    scope, f"to the name {name}", f"--allowed-hosts {name}", "host"
                )
        return None

    def _is_known(self, name: str) -> bool:
        is_allowed = name in self._hosts or name.endswith(self._endings)
        return is_allowed or is_localhost(name) or address_in(name) is not None

    def _of_origin(self, scope: Scope) -> ApiError | None:
        origin = header(scope, b"origin")
        if not self._is_keyless or "*" in self._origins or origin in self._origins:
            return None
        if not is_own(scope):
            site = shown_text(origin)
            return self._forbidden(
                scope, f"a page of {site}", f"--allowed-origins {site}", "origin"
            )
        # A link to this server is fine: its answer is shown to the person and not to the page.
        is_link = header(scope, b"sec-fetch-dest") == "document"
        if header(scope, b"sec-fetch-site") in ("cross-site", "same-site") and not is_link:
            option = "--allowed-origins and the page's origin"
            return self._forbidden(scope, "a page of another site", option, "origin")
        return None

    def _forbidden(self, scope: Scope, what: str, option: str, of: str) -> ApiError:
        facts_of(scope)["refused"] = what
        remedy = f"start it with {option}" + (", or with --api-key" if self._is_keyless else "")
        return ApiError(
            403,
            f"this server does not answer {what} ({remedy})",
            code=f"{of}_not_allowed",
            headers=_CLOSE,
        )


def name_in(host: str) -> str:
    """Return the name in a header ``Host``, in lower case and without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdecimal() or not port) else host).lower().removesuffix(".")


def is_localhost(name: str) -> bool:
    """Return whether a name is this machine's on every network."""
    address = address_in(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


def is_own(scope: Scope) -> bool:
    """Return whether a request comes from this server's page, or from no page.

    The schemes are not compared, because a proxy may use TLS for the server.
    """
    origin = header(scope, b"origin")
    return origin is None or origin.partition("://")[2] == header(scope, b"host")


def address_in(name: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a name is, or None."""
    try:
        return ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _of_number_of_hosts(scope: Scope) -> ApiError | None:
    """Refuse a request without one clear name of the server, as RFC 9112 demands."""
    count = sum(key == b"host" for key, _ in scope["headers"])
    if count == 1 or (count == 0 and scope.get("http_version") == "1.0"):
        return None
    message = f"a request needs one header 'Host'; got {count or 'none'}"
    return ApiError(400, message, code="invalid_host", headers=_CLOSE)


def _of_encoding(scope: Scope) -> ApiError | None:
    given = header(scope, b"content-encoding")
    if given is None or given.strip().lower() in ("", "identity"):
        return None
    return ApiError(
        415,
        f"the body must not be compressed; got content-encoding {shown_text(given)} (send the body "
        "as it is)",
        code="unsupported_media_type",
        headers=_CLOSE,
    )


def _of_content_type(scope: Scope) -> ApiError | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    wanted = CONTENT_TYPES.get(route_of(scope), JSON)
    given = header(scope, b"content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    length = header(scope, b"transfer-encoding") or header(scope, b"content-length") or "0"
    if kind == wanted or (given is None and (length == "0" or _is_of_ollama(scope))):
        return None
    got = "none" if given is None else shown_text(given)
    return ApiError(
        415,
        f"the content type must be {wanted}; got {got} (send the header 'Content-Type: {wanted}')",
        code="unsupported_media_type",
        headers=_CLOSE,
    )


def _is_of_ollama(scope: Scope) -> bool:
    """Return whether a request without a content type is a program's to Ollama's routes.

    Ollama reads any body as JSON, so its clients may name no type. Browsers always name the page
    that sends a POST.
    """
    names = {name for name, _ in scope["headers"]}
    is_of_page = b"origin" in names or any(name.startswith(b"sec-fetch-") for name in names)
    return dialect_of(route_of(scope)) == "ollama" and not is_of_page


_CLOSE = {"connection": "close"}  # the body is not read
