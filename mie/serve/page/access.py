"""Access to the page and to the text of prompts, and the sessions of logins."""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Scope

from mie.serve.asgi import header
from mie.serve.config import ServeConfig
from mie.serve.cross_site import is_localhost, is_own, name_in
from mie.serve.errors import ApiError

FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
"""Headers of proxies. Proxies bring requests from other machines."""


def check_may_see(request: Request) -> None:
    """Raise the 403 of a client that may use the server, but not see the requests of others.

    The page shows the requests of all clients. So with several keys, it is for the administrator.
    """
    config: ServeConfig = request.app.state.edge.config
    if not may_see(config, request.scope.get("mie.client")):
        raise ApiError(
            403,
            "the page shows what all keys send, so it needs the admin key (start the server with "
            "--admin-api-key if it has none)",
            code="page_forbidden",
        )


def may_see(config: ServeConfig, client: str | None) -> bool:
    """Return whether the owner of a key may see the page."""
    if config.admin_keys is not None:
        return client in config.admin_keys.names
    return config.keys is None or (client is not None and len(config.keys) == 1)


def name_of(config: ServeConfig, key: str) -> str | None:
    """Return the name of a key that may log in, or None."""
    for keys in (config.admin_keys, config.keys):
        name = None if keys is None else keys.find(key)
        if name is not None:
            return name
    return None


def may_read_text(config: ServeConfig, scope: Scope) -> bool:
    """Return whether a request that may see the page may also read prompts and answers.

    Without keys, only this machine may. A proxy sent the request if the header ``Host`` has a name
    that is not this machine's.
    """
    if config.has_keys or config.uds is not None:
        return True
    client = scope.get("client") or ("", 0)
    is_from_here = is_localhost(client[0]) and is_localhost(name_in(header(scope, b"host") or ""))
    is_forwarded = any(header(scope, each) is not None for each in FORWARDED)
    return is_from_here and is_own(scope) and not is_forwarded


COOKIE = "mie_session"
MAX_COOKIE_CHARS = 64
"""Maximum length of the cookie's value. `Sessions.open` makes 43 characters."""
SESSION_SECONDS = 12 * 3600
"""Time after which a login ends."""
MAX_SESSIONS = 256
"""Sessions that exist at once. The oldest is dropped for the next."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
PAGE_HEADER = b"x-mie-page"
"""A header that a form or an image of another site cannot send."""


class Sessions:
    """The logins. Only digests of the cookies are kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def open(self, client: str) -> str:
        """Begin a session of a key's owner, and return its cookie's value."""
        value = secrets.token_urlsafe(32)
        self._sessions[_digest(value)] = (client, self._clock() + SESSION_SECONDS)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return value

    def close(self, scope: Scope) -> None:
        """End the session of a request, if it has one."""
        value = _cookie(scope)
        if value is not None:
            self._sessions.pop(_digest(value), None)

    def client(self, scope: Scope) -> str | None:
        """Return the name of the key of a request's cookie, or None.

        A request that may change something needs `PAGE_HEADER` too. Only the page itself can send
        it. Browsers send the cookie with no request that another site has caused, and the header is
        a second lock.
        """
        value = _cookie(scope)
        if value is None:
            return None
        if scope["method"] not in SAFE_METHODS and header(scope, PAGE_HEADER) is None:
            return None
        client, end = self._sessions.get(_digest(value), (None, 0.0))
        return client if self._clock() < end else None


def cookie_for(value: str, scope: Scope, path: str) -> str:
    """Return the header that sets the cookie, or deletes it if ``value`` is empty."""
    parts = [f"{COOKIE}={value}", f"Path={path or '/'}", "HttpOnly", "SameSite=Strict"]
    parts.append(f"Max-Age={SESSION_SECONDS if value else 0}")
    if scope["scheme"] == "https":
        parts.append("Secure")
    return "; ".join(parts)


def _cookie(scope: Scope) -> str | None:
    """Return the value of the session's cookie, or None.

    It never needs quotes or escapes, so a general parser of cookies has nothing to add. The
    standard library's parser takes quadratic time on backslashes before Python 3.12.6.
    """
    text = header(scope, b"cookie")
    if scope["type"] != "http" or text is None:
        return None
    for pair in text.split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE and len(value) <= MAX_COOKIE_CHARS:
            return value
    return None


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()
