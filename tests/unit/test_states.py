"""Test the slots of states: what a conversation computes, and which snapshots are kept."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_runner import scripted_engine

from mie import EngineConfig, SamplingParams
from mie.engine.engine import Engine
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
    names = {engine.add_request(prompt, params): list(prompt) for prompt in prompts}
    while engine.has_work:
        for output in engine.step().outputs:
            names[output.request_id] += output.token_ids
    return list(names.values())


def computed_by(engine: Engine, *prompts: list[int]) -> int:
    """Return how many tokens serving the prompts computes, the answers' included."""
    before = engine._runner.num_computed
    answer(engine, *prompts)
    return engine._runner.num_computed - before


def kept(engine: Engine) -> set[tuple[str | None, tuple[int, ...]]]:
    """Return the tokens that each snapshot has seen."""

    def spelled(node: Node) -> tuple[int, ...]:
        return () if node.parent is None else (*spelled(node.parent), *node.tokens)

    return {(node.salt, spelled(node)) for node in engine.scheduler.manager.states.snapshots}


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
        before = engine._runner.num_computed
        [history] = answer(engine, prompts[-1])
        num_computed = engine._runner.num_computed - before
        assert num_computed == len(history) - 1 - num_stored // B * B
        answer(engine, words(50 + turn, 71), words(80 + turn))
    num_blocks = engine.scheduler.manager.num_cached
    assert engine.scheduler.manager.states.num_slots <= num_blocks / 2
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
        engine = engine_of(num_states=40, **own)
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
