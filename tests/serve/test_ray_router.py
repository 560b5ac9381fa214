"""The routers as Ray Serve calls them, on a module in place of Ray's."""

import asyncio
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mie.frontend.routing import PrefixRouter
from mie.ray.front import Call

NAMES = ("r0", "r1", "r2")


class RequestRouter:
    """The part of Ray's class that subclasses use: the number of requests of each replica."""

    def __init__(self, loads: dict[str, int]) -> None:
        self.replica_queue_len_cache = SimpleNamespace(get=lambda id: loads.get(id.unique_id))


@pytest.fixture
def router_module(monkeypatch) -> Any:
    module = SimpleNamespace(RequestRouter=RequestRouter, PendingRequest=None, RunningReplica=None)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.serve.request_router", module)
    monkeypatch.delitem(sys.modules, "mie.ray.router", raising=False)
    yield importlib.import_module("mie.ray.router")
    del sys.modules["mie.ray.router"]
    vars(sys.modules["mie.ray"]).pop("router", None)  # other tests import the package anew


def call(prompt: str, tenant: str = "") -> Call:
    body = b'{"prompt": "%s"}' % prompt.encode()
    return Call.of({"type": "http"}, body, tenant)


def chosen(router: Any, what: Call) -> list[list[str]]:
    """The names of the replicas that the router ranks."""
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in NAMES]
    ranks = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[what])))
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


def test_ray_gets_the_choice_of_the_same_router_and_then_the_others(router_module):
    router = router_module.PrefixRequestRouter({})
    router.initialize_state(prefix_bytes=12)
    own = PrefixRouter(prefix_bytes=12)
    homes = set()
    for number in range(20):
        what = call(f"Story {number}")
        [home], others = chosen(router, what)
        assert home == own.choose(own.key(what.beginning, what.salt), dict.fromkeys(NAMES, 0))
        assert sorted([home, *others]) == list(NAMES)
        homes.add(home)
    assert homes == set(NAMES)


def test_what_ray_knows_of_loads_counts(router_module):
    loads: dict[str, int] = {}  # Ray has asked no replica yet
    router = router_module.PrefixRequestRouter(loads)
    router.initialize_state(slack=2)
    [home], _ = chosen(router, call("Story"))
    loads[home] = 9
    [other], _ = chosen(router, call("Story"))
    assert other != home
