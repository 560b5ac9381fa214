"""The pages on the simulator and on clusters show the figures that were measured and simulated."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import sim as bench_sim

from mie.cli.sim_cluster import cluster_table
from mie.sim.cluster import ROUTERS, ClusterLoad, simulate_cluster

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_the_table_of_the_results():
    results = json.loads(bench_sim.RESULTS.read_text(encoding="utf-8"))
    page = bench_sim.PAGE.read_text(encoding="utf-8")
    assert bench_sim.rewritten(page, results) == page, "run scripts/benchmark.py sim --page"
    expected = [(model, load) for model, loads in bench_sim.LOADS.items() for load in loads]
    assert [(row["model"], row["load"]) for row in results["rows"]] == expected
    results["rows"][0]["rounds"][0][0] *= 2
    assert bench_sim.rewritten(page, results) != page


def test_the_page_on_clusters_has_the_table_of_the_results():
    rows = json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))["clusters"]
    table = "\n".join(cluster_table(rows))
    assert table in (DOCS / "scale.md").read_text(encoding="utf-8")
    found = [(row["num_replicas"], row["router"]) for row in rows]
    assert found == [(size, name) for size in (1, 3, 10, 30, 100, 300, 1000) for name in ROUTERS]
    for row in rows[:4]:  # those that take a second
        assert simulate_cluster(ClusterLoad(), row["num_replicas"], row["router"]) == row
