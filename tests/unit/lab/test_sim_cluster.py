"""Simulated clusters: the router's own code, exact times, and the page's table."""

import json
from typing import Any

import pytest

from mie.cli import main
from mie.cli.sim import cluster_table
from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.frontend.routing import PrefixRouter, RandomRouter
from mie.lab.loads import chats, from_lengths, skewed_prefixes
from mie.lab.sim.cluster import run_cluster
from mie.lab.sim.costs import Costs
from mie.lab.sim.driver import Bench, run_load
from mie.lab.sim.simulated import simulated

COSTS = Costs(step_ps=10**9, token_ps=10**7)


def bench(**settings: Any) -> Bench:
    return simulated(COSTS, EngineConfig(num_blocks=2000, **settings))


def benches(count: int) -> dict[str, Bench]:
    return {f"replica {number}": bench() for number in range(count)}


def test_one_replica_is_the_simulated_engine():
    load = skewed_prefixes(num_requests=60, num_prefixes=7, prefix_len=64, request_rate=40.0)
    alone = run_load(bench(), load)
    cluster = run_cluster(benches(1), PrefixRouter(), load)
    assert [vars(record) for record in cluster.records] == [
        {**vars(record), "first_step_ns": None} for record in alone.records
    ]


def test_the_router_sees_what_has_not_ended_when_a_request_arrives():
    seen: list[dict[str, int]] = []

    class Watching(RandomRouter):
        def choose(self, key: Any, loads: Any) -> str:
            seen.append(dict(loads))
            return "replica 0"

    # A step takes 1 ms and 0.4 ms for the prompt, and the second token another 1.01 ms.
    load = from_lengths([(40, 2)] * 4, [0, 1_000_000, 2_409_999, 10_000_000])
    run_cluster(benches(1), Watching(), load)
    assert [loads["replica 0"] for loads in seen] == [0, 1, 2, 0]


def test_prefix_routing_keeps_more_of_each_prefix():
    load = skewed_prefixes(num_requests=200, num_prefixes=40, prefix_len=64, exponent=0.5)
    prefix = run_cluster(benches(4), PrefixRouter(), load)
    random = run_cluster(benches(4), RandomRouter(), load)
    assert prefix.hit_rate > 1.2 * random.hit_rate


def test_requests_that_depend_on_others_are_refused():
    with pytest.raises(ConfigError, match="independent requests"):
        run_cluster(benches(1), PrefixRouter(), chats(num_chats=2))


def test_the_command_prints_a_table_or_json(capsys, tmp_path):
    options = ("sim", "cluster", "--requests-per-replica", "4", "--replicas", "1,2")
    assert main((*options, "--output-json", str(tmp_path / "out.json"))) == 0
    table = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "out.json").read_text())["clusters"]
    assert list(cluster_table(rows)) == table
    assert len(table) == 6
    assert main((*options, "--request-router", "prefix", "--json")) == 0
    sizes = [json.loads(line)["num_replicas"] for line in capsys.readouterr().out.splitlines()]
    assert sizes == [1, 2]
