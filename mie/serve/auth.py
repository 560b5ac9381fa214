"""Authentication: every route but a few needs a key, and each key has its own prefix cache.

With an admin key, the routes that control the server, or show all its clients, need that key.
Clients that try one wrong key after another are slowed down.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_network

from starlette.types import ASGIApp, Receive, Scope, Send

from mie.serve.asgi import answer, header, is_open, route_of
from mie.serve.cross_site import address_in
from mie.serve.errors import ApiError, too_many
from mie.serve.keys import Keys
from mie.serve.page.access import Sessions

CLIENT_ROUTES = frozenset(
    {*("/tokenize", "/detokenize", "/tokenizer_info", "/apply-template", "/load"), "/openapi.json"}
)
"""Routes that every key may use although there is an admin key.

So are the open ones, ``/v1/…`` and ``/api/…``.

Every other route, and each that is added, is the admin's.
"""

ADAPTER_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes under ``/v1`` that are the admin's, because they change the server for all clients."""

NUM_FREE = 10
"""Wrong keys of a client that are answered at once."""
SECONDS = 1.0
"""Time that each further wrong key takes, one after another."""
MAX_SECONDS = 3
"""Longest wait of an answer in seconds. It ends before the server, so that connections flush."""
MAX_WAITING = 256
"""Answers that wait at once."""
MAX_CLIENTS = 4096
"""Number of clients that are remembered. The next client replaces the first."""


class Authentication:
    """Middleware that accepts only known keys, and notes the owner of each request."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys | None,
        sessions: Sessions,
        wrong_keys: WrongKeys,
        *,
        admin_keys: Keys | None = None,
        share_prefix_cache: bool,
    ) -> None:
        """Without ``keys``, clients need none. Without ``admin_keys``, every key may do all.

        ``sessions`` are the logins of the web page. The page sends a cookie in place of a key.
        """
        self._app = app
        self._sessions = sessions
        self._wrong_keys = wrong_keys
        self._keys = keys
        self._admin_keys = admin_keys
        self._share_prefix_cache = share_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        key = _key_of(scope)
        if self._is_of(self._admin_keys, key, scope):
            return await self._app(scope, receive, send)
        is_known = self._is_of(self._keys, key, scope)
        refusal = self._refusal(scope, key, is_known)
        if refusal is None:
            return await self._app(scope, receive, send)
        if key is not None and not is_known:
            refusal = await self._wrong_keys.answer_to(scope, refusal)
        return await answer(refusal, scope, receive, send)

    def _is_of(self, keys: Keys | None, key: str | None, scope: Scope) -> bool:
        """Return whether a request has one of these keys, and note its name and its salt.

        A cookie replaces a key.
        """
        if keys is None:
            return False
        name = self._sessions.client(scope) if key is None else keys.find(key)
        if name is None or name not in keys.names:
            return False
        scope["mie.client"] = name
        if not self._share_prefix_cache:
            scope["mie.cache_salt"] = keys.salt(name)
        return True

    def _refusal(self, scope: Scope, key: str | None, is_known: bool) -> ApiError | None:
        """Return why a request without an admin key is refused, or None."""
        route = route_of(scope)
        if is_open(route) and scope["type"] == "http":
            return None
        is_for_clients = self._admin_keys is None or is_of_clients(route)
        if is_for_clients:
            return None if is_known or self._keys is None else _unknown(key)
        return _not_admin() if is_known else _unknown(key)


def is_of_clients(route: str) -> bool:
    """Return whether every key may use a route although there is an admin key."""
    if route in ADAPTER_ROUTES:
        return False
    return route.startswith(("/v1/", "/api/")) or route in CLIENT_ROUTES


def _key_of(scope: Scope) -> str | None:
    """The key that a client sends, as OpenAI's clients do or as Anthropic's."""
    authorization = header(scope, b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
    return header(scope, b"x-api-key")


def _not_admin() -> ApiError:
    return ApiError(
        403, "this route needs the admin key (--admin-api-key)", code="admin_key_required"
    )


def _unknown(key: str | None) -> ApiError:
    message = (
        "this server needs a key (send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY')"
        if key is None
        else "the key is not one of this server's"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class WrongKeys:
    """Delays the answers to wrong keys, for each client's address.

    A right key never waits and is never refused, so that an attacker at the same address, such as a
    proxy's, keeps no client out.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._free_at: OrderedDict[str, float] = OrderedDict()
        self._num_waiting = 0

    async def answer_to(self, scope: Scope, refusal: ApiError) -> ApiError:
        """Return the answer to a wrong key when it is time: ``refusal``, or a 429 at once."""
        seconds = self._wait_of(_network_of(scope))
        if seconds is None or self._num_waiting >= MAX_WAITING:
            message = f"too many wrong keys (try again in {MAX_SECONDS} s, with the right one)"
            return too_many(message, "too_many_wrong_keys", MAX_SECONDS)
        if seconds:
            self._num_waiting += 1
            try:
                await self._sleep(seconds)
            finally:
                self._num_waiting -= 1
        return refusal

    def _wait_of(self, client: str) -> float | None:
        """Return how long the answer to a client's wrong key waits; None is too long."""
        now = self._clock()
        free_at = max(self._free_at.pop(client, now), now)
        wait = free_at + SECONDS - now - NUM_FREE * SECONDS
        is_too_long = wait > MAX_SECONDS
        self._free_at[client] = free_at if is_too_long else free_at + SECONDS
        if len(self._free_at) > MAX_CLIENTS:
            self._free_at.popitem(last=False)
        return None if is_too_long else max(0.0, wait)


def _network_of(scope: Scope) -> str:
    """Return the address of a client. IPv6 gives each client a network of 2**64 addresses."""
    host = (scope.get("client") or ("",))[0]
    address = address_in(host)
    if isinstance(address, IPv6Address):
        return str(ip_network((int(address), 64), strict=False))
    return str(host)
