"""Deploy replicas for the checks, and collect results."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from serve_checks.server import KEY

from mie.cli.serve import with_server_defaults
from mie.ray.app import APP, RayReplicas, build_replicas
from mie.ray.config import ReplicaConfig
from mie.ray.front import Batches, Call, front_app
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from ray_checks.load import Site, client_of, eventually, under_load

CPUS = 0.5
"""CPUs of a replica: three run on a machine of two."""
OPTIONS = ("--num-blocks", "256", "--max-num-seqs", "32")
ENGINE = {"num_blocks": 256, "max_num_seqs": 32}


class Checks:
    """Problems and figures that were found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.figures: dict[str, Any] = {}

    def expect(self, is_so: bool, what: str, found: object = "") -> None:
        """Note a problem unless it is so."""
        print(f"{'ok' if is_so else 'WRONG'}: {what} {found}".rstrip(), flush=True)
        if not is_so:
            self.problems.append(f"{what} {found}")


class Deployment:
    """A deployment of this script, in place of the deployment of ``mie serve``."""

    def __init__(self) -> None:
        self._config = ReplicaConfig(
            engine=with_server_defaults({**ENGINE, "model": "bundled"}),
            server=ServeConfig(max_chunks_per_second=500.0, keys=Keys.of([KEY])),
            num_cpus=CPUS,
        )

    async def change(self, **changes: Any) -> Site:
        """Deploy another configuration, and return a front of this process."""
        self._config = replace(self._config, **changes)
        target = build_replicas(self._config)
        handle = await asyncio.to_thread(serve.run, target, name=APP, route_prefix=None)
        return Site(app=front_app(RayReplicas(handle), self._config.server))

    def at_random(self) -> Site:
        """Return a front of this process that sends each request to any replica."""
        return Site(app=front_app(_AtRandom(serve.get_app_handle(APP)), self._config.server))

    async def change_under_load(
        self, checks: Checks, site: Site, what: str, **changes: Any
    ) -> None:
        """Deploy another configuration while requests run. None may be lost."""
        async with under_load(site) as counts:
            await self.change(**changes)
            number = self._config.num_replicas
            is_so = await eventually(lambda: has_replicas(site, number))
        checks.expect(is_so, f"after {what}, {number} replicas serve")
        checks.expect(set(counts) == {"200"}, "no request is lost", dict(counts))


class _AtRandom(RayReplicas):
    """Replicas that requests reach at random, because the router takes each for another tenant's.

    Another router would need other replicas: Ray starts them again when their router changes.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        super().__init__(handle)
        self._tenants = map(str, itertools.count())

    def stream(self, call: Call) -> Batches:
        """Return the answer of some replica."""
        return super().stream(replace(call, salt=next(self._tenants)))


async def has_replicas(site: Site, number: int) -> bool:
    """Return whether as many replicas are healthy."""
    async with client_of(site) as client:
        said = (await client.get("/health")).json()
    return list(said.get("replicas", {}).values()) == ["ok"] * number
