"""The replicas of a deployment, as the front reaches them."""

from __future__ import annotations

from typing import cast

from ray.serve.handle import DeploymentHandle

from mie.front.app import Batches
from mie.front.call import Call, ReplicaAnswer

ANSWER_SECONDS = 10.0
"""Time that replicas get to answer a question to all of them."""


class RayReplicas:
    """The connection to the replicas of a deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def stream(self, call: Call) -> Batches:
        """Return the answer of the replica that the handle's router chooses."""
        streaming = self._handle.options(method_name="stream", stream=True)
        return cast(Batches, streaming.remote(call))

    async def ask_all(self, call: Call) -> list[ReplicaAnswer]:
        """Return the answers of those replicas that answer in time."""
        asked = self._handle.broadcast("answer", call)
        results = await asked.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        return [result for result in results if isinstance(result, ReplicaAnswer)]
