"""The routers of `mie.frontend.routing` as request routers of Ray Serve.

Ray runs a router in each process that sends requests. It caches how many requests each replica
serves, and queries the replica if the number is not cached.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mie.frontend.routing import PrefixRouter, RandomRouter, Router
from mie.ray.front import Call


class _Adapter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    _router: Router

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the router's choice. The others come after it, in case it refuses the request."""
        assert pending_request is not None
        call: Call = pending_request.args[0]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in replicas.items()
        }
        chosen = replicas.pop(
            self._router.choose(self._router.key(call.beginning, call.salt), loads)
        )
        return [[chosen], list(replicas.values())]


class PrefixRequestRouter(_Adapter):
    """Sends requests with the same beginning to the same replica, as `PrefixRouter` does."""

    def initialize_state(self, **settings: Any) -> None:
        """Take the arguments of `PrefixRouter`."""
        self._router = PrefixRouter(**settings)


class RandomRequestRouter(_Adapter):
    """Spreads requests at random, as `RandomRouter` does."""

    def initialize_state(self) -> None:
        """Take no arguments."""
        self._router = RandomRouter()
