"""The page on the simulator shows the figures that its script measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "bench_sim.py"))
RESULTS = json.loads((ROOT / "docs" / "simulator.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_results() -> None:
    assert SCRIPT["rewritten"](PAGE, RESULTS) == PAGE, "run scripts/bench_sim.py --page"


def test_the_results_cover_every_load_of_the_script() -> None:
    expected = [(model, load) for model, loads in SCRIPT["LOADS"].items() for load in loads]
    assert [(row["model"], row["load"]) for row in RESULTS["rows"]] == expected


def test_a_changed_figure_is_noticed() -> None:
    [pair, *_] = RESULTS["rows"][0]["rounds"]
    changed = [{**RESULTS["rows"][0], "rounds": [[pair[0] * 2, pair[1]]]}, *RESULTS["rows"][1:]]
    assert SCRIPT["rewritten"](PAGE, {**RESULTS, "rows": changed}) != PAGE
