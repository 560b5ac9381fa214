"""A page that moves to any step of a random run shows the replay's own state at that step.

The runs are those of tests/property/test_replay.py.
"""

import json
from collections import Counter
from dataclasses import replace

import pytest
from browser import Shown, cells, chromium, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import check_until_seen
from test_replay import configs, new_run, runs

from mie.events import read_log
from mie.events.replay import at
from mie.page.assets import page_html
from mie.page.cells import NodeText, key_record
from mie.page.recording import Recording

TEXT = NodeText(shows_tokens=False)
STATES = """([text, steps]) => {
    const run = mie.read(text);
    return steps.map(step => [run.isExact(step), run.at(step).plain()]);
}"""

SWAPS = {"preemption_mode": "swap", "watermark": 0.0, "max_num_seqs": 5, "batching": "continuous"}
"""Settings under which many random runs swap sequences out."""

seen: Counter[str] = Counter()


@pytest.mark.slow
def test_every_state_of_a_random_run(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(page_html([]))
    with chromium() as browser, opened(browser, page.as_uri()) as shown:
        shown.until("window.mie?.read")
        wanted = {"merged": 6, "swapped": 3, "states": 51}
        check_until_seen(
            lambda check: check(), check_of_runs(shown, tmp_path / "run.jsonl"), seen, wanted
        )


def check_of_runs(shown: Shown, path):
    """Return the property."""
    drawn = runs(12, 4) | {"config": configs().map(lambda config: replace(config, **SWAPS))}

    @given(
        **drawn, steps_per_record=st.sampled_from([3, 1]), random=st.randoms(use_true_random=False)
    )
    @settings(max_examples=40)
    def check(
        config, arrivals, spare, num_host_blocks, window, steps_per_record, random, **accidents
    ):
        with path.open("w") as file:
            run = new_run(file, config, arrivals, spare + 1, num_host_blocks, window)
            for _ in run.drive(arrivals, **accidents):
                pass
            run.log.close()
        segments = list(read_log(path))
        recording = Recording(segments, TEXT, steps_per_record=steps_per_record)
        lines = list(recording.lines("a run"))
        records = list(map(json.loads, lines))
        # A page has the state at the end of each record, and asks the server for the others.
        steps = [each["steps"][-1]["row"][0] for each in records if each["record"] == "steps"]
        random.shuffle(steps)
        for step, (is_exact, state) in zip(
            steps, shown.js(STATES, ["\n".join(lines), steps]), strict=True
        ):
            key = json.loads(json.dumps(key_record(at(segments, step), TEXT)))
            assert is_exact
            assert cells(state) == cells(key), f"at step {step}"
            seen["states"] += 1
            seen["swapped"] += any(each["state"] == "swapped" for each in key["seqs"].values())
        seen["merged"] += steps_per_record > 1

    return check
