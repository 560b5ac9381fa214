"""Slow down clients that try one wrong key after another."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_network

from starlette.types import Scope

from mie.serve.cross_site import address_in
from mie.serve.errors import ApiError

NUM_FREE = 10
"""Wrong keys of a client that are answered at once."""
SECONDS = 1.0
"""Time that each further wrong key takes, one after another."""
MAX_SECONDS = 3.0
"""Longest wait of an answer. It ends before the server does, which lets connections flush."""
MAX_WAITING = 256
"""Answers that wait at once."""
MAX_CLIENTS = 4096
"""Clients that are remembered. The one that was seen first is forgotten for the next."""


class WrongKeys:
    """Delays the answers to wrong keys, for each client's address.

    A right key never waits and is never refused, so that an attacker at the same address, such as
    that of a proxy, keeps no client out.
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
        seconds = self._wait_of(_client(scope))
        if seconds is None or self._num_waiting >= MAX_WAITING:
            return ApiError(
                429,
                f"too many wrong keys (try again in {MAX_SECONDS:g} s, with the right one)",
                type="rate_limit_error",
                code="too_many_wrong_keys",
                headers={"retry-after": f"{MAX_SECONDS:g}"},
            )
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


def _client(scope: Scope) -> str:
    """Return the address of a client. IPv6 gives each client a network of 2**64 addresses."""
    host = (scope.get("client") or ("",))[0]
    address = address_in(host)
    if isinstance(address, IPv6Address):
        return str(ip_network((int(address), 64), strict=False))
    return str(host)
