"""Test the slots of states: what a conversation computes, and which snapshots are kept."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from engines import run_to_end
from event_stories import EMPTY_STATES, STATES, write_story
from scripted_runner import scripted_engine

from mie import EngineConfig, SamplingParams
from mie.engine.engine import Engine
from mie.engine.watch.metrics import snapshot_of
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.events import read_log
from mie.events.replay import State
from mie.lab.trace_blocks import render_blocks
from mie.lab.trace_perfetto import SLOTS, write_timeline
from mie.memory.layers.states import States
from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Node

B = 4
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def engine_of(num_states: int = 99, num_blocks: int = 999, **settings: Any) -> Engine:
    given = {"block_size": B, "max_num_seqs": 4, "max_forced_run": 0, "async_scheduling": False}
    return scripted_engine(
        EngineConfig(**{**given, **settings}), num_blocks, 900, num_states=(num_states, 0)
    )


def answer(engine: Engine, *prompts: list[int], params: SamplingParams = PARAMS) -> list[list[int]]:
    """Return each prompt and its answer, all served at once."""
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    run_to_end(engine)
    return [request.sequences[0].token_ids for request in requests]


def computed_by(engine: Engine, *prompts: list[int]) -> int:
    """Return how many tokens serving the prompts computes, the answers' included."""
    before = engine.runner.num_computed
    answer(engine, *prompts)
    return engine.runner.num_computed - before


def kept(engine: Engine) -> set[tuple[str | None, tuple[int, ...]]]:
    """Return the tokens that each snapshot has seen."""

    def spelled(node: Node) -> tuple[int, ...]:
        return () if node.parent is None else (*spelled(node.parent), *node.tokens)

    states = engine.scheduler.manager.part(States)
    assert states is not None
    return {(node.salt, spelled(node)) for node in states.snapshots}


def words(*numbers: int) -> list[int]:
    """Return seven tokens for each number, which differ from those of other numbers."""
    return [4 + (number * (7 + i) + i * i) % 40 for number in numbers for i in range(7)]


def test_a_conversation_of_20_turns_computes_each_token_once():
    """Only the tokens behind the last full block are computed again, with others in between."""
    engine = engine_of(num_states=120)
    history: list[int] = []
    prompts = []
    for turn in range(20):
        prompts.append([*history, *words(turn)])
        num_stored = max(0, len(history) - 1)  # the last token of an answer is never stored
        before = engine.runner.num_computed
        [history] = answer(engine, prompts[-1])
        num_computed = engine.runner.num_computed - before
        assert num_computed == len(history) - 1 - num_stored // B * B
        answer(engine, words(50 + turn, 71), words(80 + turn))
    num_blocks = engine.scheduler.manager.num_cached
    states = engine.scheduler.manager.part(States)
    assert states is not None
    assert states.num_states <= num_blocks / 2
    # Turn 12 again, with the same words and with others.
    again = computed_by(engine, prompts[12])
    assert again == (len(prompts[12]) - 1) % B + 1 + PARAMS.max_tokens - 1
    edited, num_same = [*prompts[12][:-7], *words(99)], len(prompts[12]) - 7 - 1
    num_computed = computed_by(engine, edited)
    assert num_computed == len(edited) + PARAMS.max_tokens - 1 - num_same // B * B


def test_the_request_that_reveals_a_branch_leaves_a_snapshot_there():
    engine = engine_of()
    system = words(1, 2, 3)  # 21 tokens
    assert computed_by(engine, [*system, *words(4)]) == 28 + 9
    assert computed_by(engine, [*system, *words(5)]) == 28 + 9
    assert (None, tuple(system[:20])) in kept(engine)
    assert computed_by(engine, [*system, *words(6)]) == 8 + 9


def test_prompts_that_are_computed_together_reveal_their_branch():
    engine = engine_of()
    system = words(1, 2, 3)
    answer(engine, *([*system, *words(number)] for number in (4, 5, 6)))
    assert (None, tuple(system[:20])) in kept(engine)
    assert computed_by(engine, [*system, *words(7)]) == 8 + 9


STORIES = [
    [*words(1, 2), *words(3)],
    [*words(1, 2), *words(4, 5)],
    words(1),
    [*words(1, 2), *words(4, 6)],
    words(8, 8, 8, 8),
]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5},
        {"max_prefill_chunk": 1},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "batching": "static"},
        {"num_blocks": 14},
        {"num_blocks": 14, "max_prefill_chunk": 3, "admit_after_preemption": True},
    ],
)
def test_what_is_kept_depends_on_tokens_only(settings: dict[str, Any]) -> None:
    """Not on chunks, on batches, or on preemptions."""
    results = []
    for own in ({}, settings):
        engine = engine_of(num_states=60, state_snapshot_distance=1, **own)
        params = SamplingParams(max_tokens=15, ignore_eos=True, n=2)
        answer(engine, *STORIES, params=params)
        results.append(kept(engine))
    if "num_blocks" in settings:
        assert engine.stats.num_preemptions
        assert results[1] <= results[0], "blocks were evicted, with their snapshots"
    else:
        assert results[1] == results[0]


def test_a_snapshot_is_evicted_by_the_tokens_that_it_saves_and_by_its_age():
    engine = engine_of(num_states=4, max_num_seqs=1)
    short, long = words(1), words(2, 3, 4, 5)
    one = SamplingParams(max_tokens=1)
    answer(engine, long, params=one)
    answer(engine, short, params=one)
    answer(engine, words(6, 7), params=one)
    assert {len(tokens) for _, tokens in kept(engine)} == {4, 12, 24}
    answer(engine, words(8, 9), params=one)  # the short one goes, although the long one is older
    assert {len(tokens) for _, tokens in kept(engine)} == {12, 24}
    for number in range(10, 40, 2):
        answer(engine, words(number, 47), params=one)
    assert {len(tokens) for _, tokens in kept(engine)} == {12}, "the long one is too old"


@pytest.mark.parametrize(("num_ways", "evicted"), [(1, 12), (2, 8)])
def test_a_snapshot_that_went_on_in_one_way_is_worth_half(num_ways: int, evicted: int):
    """It saves 12 tokens, and the older one 8. So does each of the last ones."""
    engine, one = engine_of(num_states=3 + num_ways, max_num_seqs=1), SamplingParams(max_tokens=1)
    first = words(3, 4)[:12]
    ways = [[*first, *words(5 + number)[:7], 4, 4] for number in range(num_ways)]
    for prompt in (words(1, 2)[:9], [*first, 4], *ways, words(8, 9, 10)[:17]):
        answer(engine, prompt, params=one)
    assert {len(tokens) for _, tokens in kept(engine)} == {8, 12, 16, 20} - {evicted}


def test_a_long_new_prompt_leaves_snapshots_at_growing_distances():
    engine, prompt = engine_of(state_snapshot_distance=2), words(*range(20))[:139]
    answer(engine, prompt, params=SamplingParams(max_tokens=1))
    ends = {34 * B, 32 * B, 26 * B, 2 * B}
    assert {len(tokens) for _, tokens in kept(engine)} == ends
    # Another prompt has 120 tokens in common with it, and begins with the snapshot after 104. In
    # its new part, of 14 tokens, it leaves one after 124.
    num_computed = computed_by(engine, [*prompt[:120], *words(30, 31)])
    assert num_computed == 120 - 104 + 14 + PARAMS.max_tokens - 1
    lengths = {len(tokens) for _, tokens in kept(engine)}
    assert lengths == {*ends, 120, 124, 132, 140}


def test_without_a_spare_slot_no_snapshot_is_taken():
    engine = engine_of(num_states=1, max_num_seqs=1)
    [history] = answer(engine, words(1, 2))
    assert not kept(engine)
    assert computed_by(engine, history) == len(history) + 9


def test_a_fork_has_a_state_of_its_own():
    engine = engine_of()
    answer(engine, words(1), words(2), params=SamplingParams(n=3, max_tokens=20, ignore_eos=True))
    positions = sorted(len(tokens) for _, tokens in kept(engine))
    assert positions == [4, 4, *[24] * 6], "the ends of two prompts and of six answers"


@pytest.mark.parametrize("num_more", range(4))
@pytest.mark.parametrize("is_first", [False, True])
def test_an_answer_ends_with_a_snapshot_although_another_goes_on(num_more, is_first) -> None:
    """Two answers are equal until one of them ends. Either may be a token ahead."""
    for num_ahead in range(3):
        engine, prompt = engine_of(), words(1, 2)
        ends = SamplingParams(max_tokens=10 + num_more, ignore_eos=True)
        goes_on = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add_request(prompt, ends if is_first else goes_on)
        for _ in range(num_ahead):
            engine.step()
        engine.add_request(prompt, goes_on if is_first else ends)
        while engine.has_work:
            engine.step()
        num_full = (len(prompt) + 10 + num_more - 1) // B * B
        assert {len(tokens) for _, tokens in kept(engine)} == {12, num_full, 40}


def test_a_fork_that_is_swapped_out_at_once_saves_the_state_of_its_parent() -> None:
    states, notes = States(3, num_host_states=2), dict[str, list[int]]()
    manager = KVCacheManager(9, B, [states], num_host_blocks=9)
    room = manager.find_allocation(words(1))
    assert room is not None
    table = manager.open_table(room, (0, 0), 0, notes)
    manager.take_moves()
    manager.commit(table, 4)
    manager.commit(table, 7)
    twin = manager.fork(table, (0, 1), 1, words(1))
    host = manager.swap_out(twin)
    assert host is not None
    manager.close_table(twin)
    moves = manager.take_moves().parts["states"]
    assert moves.exports == [(states.states[table].slot, 0)]
    again = manager.find_allocation([*words(1), 9], host=host)
    assert again is not None
    assert again.num_computed == 7
    twin = manager.open_table(again, (0, 1), 1, notes)
    moves = manager.take_moves().parts["states"]
    assert moves.imports == [(0, states.states[twin].slot)]


def test_the_metrics_count_slots_and_snapshots() -> None:
    engine = engine_of(num_states=4, max_num_seqs=2)
    answer(engine, words(1), words(2))
    engine.add_request(words(3), PARAMS)
    engine.step()
    slots = {}
    for metric in snapshot_of(engine).read("model"):
        if metric.name == "mie:state_slots":
            slots[metric.labels["state"]] = metric.value
    assert slots == {"running": 1, "snapshot": 3, "free": 0}
    taken = [m.value for m in snapshot_of(engine).read("m") if m.name == "mie:snapshots_taken"]
    assert taken == [engine.scheduler.manager.stats.num_snapshots]


def test_the_block_map_names_the_blocks_with_snapshots() -> None:
    engine = engine_of(num_states=5, max_num_seqs=2)
    answer(engine, words(1), words(2))
    engine.add_request(words(3), PARAMS)
    engine.step()
    snapshot = scheduler_snapshot(engine.scheduler)
    text = render_blocks(State.from_snapshot(snapshot)).splitlines()
    assert text[-2] == "5 slots of states: 1 running, 4 snapshots, 0 free"
    cells = {slot: f"▒{block}" for block, slot in snapshot["states"]["saved"].items()}
    [running] = snapshot["states"]["running"].values()
    cells[running] = "A"
    row = text[-4].split()
    assert row[1::2] == [cells[slot] for slot in range(5)]
    lengths = {len(prompt) // 4 * 4 for prompt in (words(1), words(2), words(3))}
    assert {int(number) for number in row[2::2]} >= lengths


def test_a_timeline_has_a_track_for_each_slot(tmp_path: Path) -> None:
    path = write_story(tmp_path / "states.jsonl", [STATES[:7], STATES[7:]], EMPTY_STATES)
    file = io.StringIO()
    write_timeline(read_log(path), file)
    events = [each for each in json.loads(file.getvalue())["traceEvents"] if each["pid"] == SLOTS]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {1: "slot 0", 2: "slot 1", 3: "slot 2"}
    spans = {(names[each["tid"]], each["name"], each["dur"]) for each in events if "dur" in each}
    assert spans == {
        *(("slot 2", "a", 10_000), ("slot 0", "a", 5_000)),
        ("slot 1", "snapshot, 4 tokens", 10_000),
    }


def test_a_preempted_sequence_goes_on_from_its_latest_snapshot() -> None:
    engine, prompt = engine_of(), words(1, 2, 3)
    engine.add_request(prompt, SamplingParams(max_tokens=40, n=2, ignore_eos=True))
    for num_steps in (20, 7, 1):
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.preempt_all()
    while engine.has_work:
        engine.step()
    # Each of two choices computes the tokens behind a full block again, three times.
    num_again = engine.runner.num_computed - (len(prompt) + 2 * 39)
    assert 0 < num_again <= 2 * 3 * (B - 1)
    assert len(kept(engine)) == 3, "no preemption leaves a snapshot behind"


@pytest.mark.parametrize("ends", [0, 1])
@pytest.mark.parametrize("num_steps", [2, 3, 4])
def test_a_choice_that_ends_leaves_the_snapshot_that_its_fork_had(num_steps: int, ends: int):
    """The prompt fills its last block, so both choices begin from a snapshot after all of it."""
    engine = engine_of(max_num_seqs=4)
    prompt = words(1, 2, 3, 4)  # 28 tokens
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    request = engine.add_request(prompt, params)
    for _ in range(num_steps):
        engine.step()
    sequences = request.sequences
    assert all(0 < seq.num_generated < B for seq in sequences)
    engine.finish(request.request_id, ends, "stop", None)
    said = list(sequences[ends].token_ids)
    while engine.has_work:
        engine.step()
    assert (None, tuple(prompt)) in kept(engine)
    # The answer that ended goes on from the end of the prompt.
    assert computed_by(engine, [*said, *words(9)]) == len(said) - 28 + 7 + PARAMS.max_tokens - 1


def test_a_snapshot_is_as_young_as_its_latest_use():
    """Four slots: the running sequence has one, and three are for snapshots of equal worth."""
    engine = engine_of(num_states=4, max_num_seqs=1)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = {name: words(number)[:5] for number, name in enumerate("ABCDEF", 10)}
    for name in "ABCD":
        answer(engine, prompts[name], params=once)
    assert {tokens[:4] for _, tokens in kept(engine)} == {tuple(prompts[n][:4]) for n in "BCD"}
    answer(engine, prompts["C"], params=once)
    for name in "EF":
        answer(engine, prompts[name], params=once)
    assert {tokens[:4] for _, tokens in kept(engine)} == {tuple(prompts[n][:4]) for n in "CEF"}
