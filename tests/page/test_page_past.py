"""The part of a live run that a page keeps is bounded, and is never the state of another moment."""

import json
from typing import Any

import pytest
from browser import Shown, chromium, opened

from mie.page.assets import page_html
from mie.page.cells import COLUMNS, PAGE_VERSION, SHOWN

pytestmark = pytest.mark.slow  # one browser opens in `make test`: test_page_in_browser.py

NUM_BLOCKS = 4


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    page = tmp_path_factory.mktemp("page") / "page.html"
    page.write_text(page_html([]))
    with chromium() as browser, opened(browser, page.as_uri()) as shown:
        shown.until("window.mie?.read")
        yield shown


def live(*records: dict[str, Any], num_blocks: int = NUM_BLOCKS) -> str:
    """The lines of a live run."""
    sizes = {"block_size": 8, "num_blocks": num_blocks, "num_host_blocks": 0, "first": 0}
    shape = {"columns": COLUMNS, "fields": dict(SHOWN), "version": PAGE_VERSION}
    head = {"record": "head", "source": "live", "name": "test", **sizes, **shape}
    return "\n".join(map(json.dumps, (head, *records)))


def key(step: int, *blocks: list[int], is_now: bool = False) -> dict[str, Any]:
    empty = {"seqs": {}, "tables": {}, "host": {}, "tree": {}, "heat": {}, "totals": {}}
    return {"record": "key", "step": step, "blocks": list(blocks), "is_now": is_now, **empty}


def steps(step: int, *events: list[Any], **changed: Any) -> dict[str, Any]:
    row = [step, *[0] * (len(COLUMNS) - 1)]
    return {"record": "steps", "steps": [{"row": row, "events": events}], "set": changed}


def test_a_long_run_keeps_a_bounded_past(shown: Shown) -> None:
    records = [key(0)]
    for step in range(1, 20_001):
        records.append(steps(step, ["evict", step % NUM_BLOCKS]))
        if step % 250 == 0:
            records.append(key(step))
    kept = shown.js(
        """text => {
            const run = mie.read(text);
            const newest = [0, 1, 2, 3].map(block => run.identity(run.newest, block));
            const gone = [...run.evictions.values()];
            return [run.first, run.last, run.steps.length, run.records.length, gone, newest];
        }""",
        live(*records),
    )
    first, last, num_steps, num_records, gone, newest = kept
    assert last == 20_000
    assert 10_000 <= num_steps <= 12_001
    assert num_records <= num_steps + num_steps // 250 + 1
    # Of the evictions before the first step, one of each block tells old contents from new ones.
    assert all(sum(step < first for step in each) <= 1 for each in gone)
    assert sum(map(len, gone)) <= num_steps + 2 * NUM_BLOCKS
    assert newest == [f"{block} tree {19_996 + (block or 4)}" for block in range(NUM_BLOCKS)]


def test_a_key_with_later_events_is_not_the_state_at_its_step(shown: Shown) -> None:
    at = """text => {
        const run = mie.read(text);
        const asked = [];
        run.fetchExact = async step => { asked.push(step); throw new Error('none'); };
        return [run.isExact(1), run.at(1).plain().blocks, asked];
    }"""
    before, after = [2, 1, 1, 5], [2, 2, 1, 8]
    past = (key(0), steps(1, blocks=[before]))
    assert shown.js(at, live(*past, key(1, after, is_now=True))) == [True, [before], []]
    assert shown.js(at, live(*past, key(1, before))) == [True, [before], []]
    # Without the past it has to ask, and knows nothing meanwhile.
    assert shown.js(at, live(key(1, after, is_now=True))) == [False, [], [1]]


def test_an_unknown_state_is_never_drawn_as_another_one(shown: Shown) -> None:
    """Every step inside a merged record is unknown until the server tells it, or for ever."""
    merged = steps(3, blocks=[[0, 2, 1, 8]])
    merged["steps"] = [each for step in (1, 2, 3) for each in steps(step)["steps"]]
    show = """async ([text, step, status]) => {
        const run = mie.read(text);
        const told = {record: "key", step, blocks: [[1, 1, 1, 2]]};
        run.fetchExact = async () => {
            if (status) throw Object.assign(new Error("no"), {status});
            return told;
        };
        Object.assign(mie.store, {run, step, follows: false});
        mie.select(null);
        await new Promise(requestAnimationFrame);
        const text_of = id => document.getElementById(id).textContent;
        const texts = () => ["map-note", "stats"].map(text_of);
        const before = texts();
        await run.exactly(step);
        mie.select(null);
        await new Promise(requestAnimationFrame);
        return [before, texts(), run.at(step).plain().blocks];
    }"""
    text = live(key(0), merged)
    before, after, blocks = shown.js(show, [text, 2, None])
    assert before[0] == "The state after this step is on its way."
    assert "–KV use" in before[1]
    assert after[0].startswith("4 blocks of 8 tokens: 1 in use")
    assert blocks == [[1, 1, 1, 2]]
    _, lost, blocks = shown.js(show, [text, 2, 404])
    assert lost[0] == "No log has the state after this step any more."
    assert blocks == []
    known, _, blocks = shown.js(show, [text, 3, 404])
    assert known[0].startswith("4 blocks of 8 tokens: 0 in use, 1 only cached")
    assert blocks == [[0, 2, 1, 8]]


def test_play_waits_for_each_state(shown: Shown) -> None:
    merged = steps(9, blocks=[])
    merged["steps"] = [each for step in range(1, 10) for each in steps(step)["steps"]]
    steps_and_drawn = shown.js(
        """async text => {
            const run = mie.read(text);
            const told = new Set();
            run.fetchExact = async step => {
                await new Promise(resolve => setTimeout(resolve, 30));
                told.add(step);
                return {record: "key", step, blocks: []};
            };
            Object.assign(mie.store, {run, step: 0, follows: false, selected: null});
            const seen = [];
            document.getElementById("run").click();
            while (mie.store.plays && mie.store.step < 9) {
                if (!run.isExact(mie.store.step)) seen.push(mie.store.step);
                await new Promise(requestAnimationFrame);
            }
            return [mie.store.step, seen, told.size];
        }""",
        live(key(0), merged),
    )
    last, unknown, num_told = steps_and_drawn
    assert last == 9
    assert unknown == []
    assert num_told > 0


def test_lanes_that_run_are_drawn_before_those_that_wait(shown: Shown) -> None:
    def seq(number: int, state: str) -> dict[str, Any]:
        return {"request_id": str(number), "state": state, "n": 1, "num_prompt": 4, "rank": 0}

    names = {f"{number}.0": seq(number, "waiting") for number in range(300)}
    runs = [f"{number}.0" for number in range(8)]
    admitted = steps(1, *[["admit", name, i, 4, 0] for i, name in enumerate(runs)])
    decoded = steps(2, ["decode", runs])
    drawn = shown.js(
        """async text => {
            Object.assign(mie.store, {run: mie.read(text), step: 2, window: null});
            mie.select({kind: "seq", id: "250.0"});
            await new Promise(requestAnimationFrame);
            const {lanes} = mie.parts.timeline;
            mie.select(null);
            return lanes.map(lane => lane.name);
        }""",
        live({**key(0), "seqs": names}, admitted, decoded),
    )
    assert drawn == [*(f"{number}.0" for number in range(59)), "250.0"]


def test_the_search_leaves_the_lanes_that_it_names(shown: Shown) -> None:
    seq = {"state": "waiting", "n": 1, "num_prompt": 4, "rank": 0}
    names = {f"{number}.0": {**seq, "request_id": f"cmpl-{number}x"} for number in range(30)}
    found = shown.js(
        """async text => {
            Object.assign(mie.store, {run: mie.read(text), step: 0, window: null});
            const search = document.getElementById("search");
            const lanes = [];
            for (const value of ["-7x", "ab", "none", ""]) {
                search.value = value;
                search.dispatchEvent(new Event("input"));
                await new Promise(requestAnimationFrame);
                lanes.push(mie.parts.timeline.lanes.map(lane => lane.name));
            }
            return lanes;
        }""",
        live({**key(0), "seqs": names}),
    )
    assert found[:3] == [["7.0"], ["27.0"], []]
    assert len(found[3]) == 30


def test_a_large_tree_is_drawn_in_few_boxes(shown: Shown) -> None:
    """In a pool of 100,000 blocks, each chain of 300 cached blocks gets boxes that can be seen."""
    num_chains, length = 150, 300
    tree = {
        str(block): {"parent": block - 1 if block % length else None, "salt": 0}
        for block in range(num_chains * length)
    }
    heat = {block: [1, int(block)] for block in tree}
    blocks = [[int(block), 2, 1, 8] for block in tree]
    state = {**key(0), "blocks": blocks, "tree": tree, "heat": heat}
    found = shown.js(
        """async text => {
            Object.assign(mie.store, {run: mie.read(text), step: 0});
            mie.select(null);
            await new Promise(requestAnimationFrame);
            const {boxes} = mie.parts.tree;
            return [boxes.length, Math.min(...boxes.map(box => box.w)), mie.parts.map.lay.per];
        }""",
        live(state, num_blocks=100_000),
    )
    num_boxes, narrowest, per_tile = found
    assert 0 < num_boxes < 20_000
    assert narrowest >= 6
    assert per_tile > 1
    assert shown.errors == []


def test_what_happens_between_two_steps_belongs_to_the_later_one(shown: Shown) -> None:
    seq = {"request_id": "one", "state": "waiting", "num_prompt": 4, "n": 1, "rank": 0}
    add = ["add", "one", 0, 0, 4, 1, 8]
    now = {"record": "now", "events": [add], "set": {"seqs": {"0.0": seq}}}
    records = (key(0), now, steps(1, ["admit", "0.0", 0, 4, 0]))
    shown.js("text => { mie.store.run = mie.read(text); }", live(*records))
    assert [(each["request_id"], each["step"]) for each in shown.events("add")] == [("one", 1)]
    assert shown.js("mie.store.run.lanes.all.get('0.0').born") == 1


def test_the_tree_tells_hits_only_where_they_are_known(shown: Shown) -> None:
    """A state that the server was asked for has none (`mie/state?step=K`)."""
    note = """async text => {
        Object.assign(mie.store, {run: mie.read(text), step: 0});
        mie.select(null);
        await new Promise(requestAnimationFrame);
        return document.getElementById('tree-note').textContent;
    }"""
    state = {**key(0, [0, 2, 1, 8]), "tree": {"0": {"parent": None, "salt": 0}}}
    assert shown.js(note, live({**state, "heat": {"0": [2, 1]}})).endswith("of 1 idle leaf")
    assert shown.js(note, live({**state, "heat": {"0": [2, None]}})).endswith("no leaf is idle")
    assert shown.js(note, live(state)).endswith("hits are unknown at this step")
