"""Who may see the page, and who may read the text of prompts on it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

from mie.serve.asgi import header
from mie.serve.config import ServeConfig
from mie.serve.cross_site import is_localhost, is_own, name_in
from mie.serve.errors import ApiError

FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
"""Headers of proxies, which bring requests from other machines."""


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
    """Return the name of a key with which one logs in, or None."""
    for keys in (config.admin_keys, config.keys):
        name = None if keys is None else keys.find(key)
        if name is not None:
            return name
    return None


def has_keys(config: ServeConfig) -> bool:
    """Return whether the page needs a login."""
    return config.keys is not None or config.admin_keys is not None


def may_read_text(config: ServeConfig, scope: Scope) -> bool:
    """Return whether a request that may see the page may also read prompts and answers.

    Without keys, only this machine may. A name in the header ``Host`` that is not this machine's
    tells that a proxy asks.
    """
    if has_keys(config) or config.uds is not None:
        return True
    client = scope.get("client") or ("", 0)
    is_from_here = is_localhost(client[0]) and is_localhost(name_in(header(scope, b"host") or ""))
    is_forwarded = any(header(scope, each) is not None for each in FORWARDED)
    return is_from_here and is_own(scope) and not is_forwarded
