"""Authentication: every route but a few needs a key, and each key has a prefix cache of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from mie.serve.asgi import answer, header, is_open, route_of
from mie.serve.errors import ApiError
from mie.serve.keys import Keys
from mie.serve.page.sessions import Sessions


class Authentication:
    """Middleware that lets only known keys in, and notes whose request it is."""

    def __init__(
        self, app: ASGIApp, keys: Keys, sessions: Sessions, *, share_prefix_cache: bool
    ) -> None:
        """``sessions`` are those of the web page, which has a cookie for a key."""
        self._app = app
        self._sessions = sessions
        self._keys = keys
        self._share_prefix_cache = share_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        key = _key_of(scope)
        name = self._sessions.client(scope) if key is None else self._keys.find(key)
        if name is not None:
            scope["mie.client"] = name
            if not self._share_prefix_cache:
                scope["mie.cache_salt"] = self._keys.salt(name)
        elif scope["type"] != "http" or not is_open(route_of(scope)):
            return await answer(_refusal(key), scope, receive, send)
        return await self._app(scope, receive, send)


def _key_of(scope: Scope) -> str | None:
    """The key that a client sends, as OpenAI's clients do or as Anthropic's."""
    authorization = header(scope, b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
    return header(scope, b"x-api-key")


def _refusal(key: str | None) -> ApiError:
    message = (
        "this server needs a key (send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY')"
        if key is None
        else "the key is not one of this server's"
    )
    return ApiError(
        401,
        message,
        type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
