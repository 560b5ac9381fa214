"""The page on the simulator shows the figures that its script measured."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_sim


def test_the_page_has_the_table_of_the_results():
    results = json.loads(bench_sim.RESULTS.read_text(encoding="utf-8"))
    page = bench_sim.PAGE.read_text(encoding="utf-8")
    assert bench_sim.rewritten(page, results) == page, "run scripts/bench_sim.py --page"
    expected = [(model, load) for model, loads in bench_sim.LOADS.items() for load in loads]
    assert [(row["model"], row["load"]) for row in results["rows"]] == expected
    results["rows"][0]["rounds"][0][0] *= 2
    assert bench_sim.rewritten(page, results) != page
