"""Check that a page that only assigns cells shows the replay's own state after every step.

The runs are those of test_replay.py. Merged steps, keys in the middle and the order of eviction are
checked in the same runs.
"""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from page_cells import Page, cells_of
from test_replay import EOS, Run, configs, requests

from mie.events import FIELDS, read_log
from mie.page import recording as stream_of_log
from mie.page.cells import NodeText
from mie.page.heat import Heat
from mie.page.recording import Recording
from mie.replay import State, walk

seen: Counter[str] = Counter()


def logged_run(path, config, arrivals, pools, tokens, aborted, broken, beams, releases):
    """Write the log of a random run, with a record after its last step."""
    with path.open("w") as file:
        run = Run(config, *pools, file)
        waiting, number, drawn = list(arrivals), 0, 0

        def draw_token():
            nonlocal drawn
            drawn += 1
            return tokens[drawn % len(tokens)]

        while waiting or run.scheduler.running or run.scheduler.waiting:
            for arrival in [each for each in waiting if each[0] <= number]:
                waiting.remove(arrival)
                prompt, max_tokens, n, *labels = arrival[1:]
                run.add(prompt, max_tokens, n, *labels)
            run.add_beams(beams.get(number, 0))
            if number in releases:
                run.release()
            victim = aborted.get(number)
            if victim is not None and victim < len(run.requests):
                swapped = [seq.request for seq in run.scheduler.waiting if seq.host]
                run.scheduler.abort([*swapped, run.requests[victim]][0])
            number += 1
            run.step(number, draw_token, number in broken)
        run.add([0], 1, 1, 0, None)
        run.log.close()


def check_eviction_order(path):
    """The evicted block must be the first of the idle leaves in the order of their cells."""
    heat = state = None
    last = None
    for _, record, now in walk(read_log(path)):
        if heat is None:
            heat, state = Heat(now), now
        else:
            heat.after(last, state)
        if record[0] == "evict":
            tree = now.blocks.tree
            inner = {node.parent for node in tree.values()}
            cells = {int(block): cell for block, cell in heat.cells().items()}
            idle = [(cells[b][1], b) for b in tree if cells[b][1] is not None and b not in inner]
            assert record[1] == min(idle)[1]
            seen["evicted"] += 1
        heat.before(record, now)
        last = record


@given(
    config=configs(),
    arrivals=requests(),
    spare=st.integers(0, 5),
    num_host_blocks=st.integers(1, 9),
    tokens=st.lists(st.sampled_from([0, 2, 2, 2, EOS]), min_size=1, max_size=7),
    aborted=st.dictionaries(st.integers(0, 12), st.integers(0, 5), max_size=4),
    broken=st.sets(st.integers(3, 30), max_size=1),
    beams=st.dictionaries(st.integers(0, 15), st.integers(1, 3), max_size=6),
    releases=st.sets(st.integers(3, 30), max_size=4),
    steps_per_record=st.sampled_from([1, 1, 2, 5]),
)
@settings(max_examples=max(300, settings().max_examples))
def check_run(
    path, config, arrivals, spare, num_host_blocks, tokens, aborted, broken, beams, releases,
    steps_per_record,
):  # fmt: skip
    longest = max(len(prompt) for _, prompt, *_ in arrivals)
    pools = -(-longest // config.block_size) + spare, num_host_blocks
    logged_run(path, config, arrivals, pools, tokens, aborted, broken, beams, releases)
    check_eviction_order(path)
    text = NodeText(lambda ids: "".join(map(str, ids)))
    [segment] = read_log(path)
    state, steps, page = State.from_snapshot(segment.snapshot), iter(segment.steps), Page()
    recording = Recording([segment], text, steps_per_record=steps_per_record)
    for record in map(json.loads, recording.lines("a run")):
        page.take(record)
        seen[record["record"]] += 1
        for _ in record.get("steps", ()):
            state.apply_step(next(steps))
        if record["record"] == "now":
            state.apply_step(segment.rest)
        if record["record"] != "head":
            assert page.step == state.step
            assert page.cells() == cells_of(state, text)
            assert page.heat.keys() == page.tree.keys()
    assert page.step == segment.last
    for records in segment.steps:
        seen.update(kind for kind, *_ in records)


def test_a_page_that_assigns_cells_shows_the_state_of_the_replay(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_of_log, "STEPS_PER_KEY", 5)
    seen.clear()
    check_run(tmp_path / "trace.jsonl")
    for kind in ("key", "steps", "now", "evicted"):
        assert seen[kind] >= 20, (kind, seen)
    for kind in FIELDS:
        assert seen[kind] >= 1, (kind, seen)
