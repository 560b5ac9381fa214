"""Test steps that are launched before the previous one is done."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from audit import check_scheduler
from engines import Tokens, run_to_end

from mie import EngineConfig, SamplingParams
from mie.engine.engine import Engine
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

SIZES = {"num_blocks": 40, "block_size": 3, "max_num_seqs": 4}


class Overlap:
    """Return an engine with overlap, and a count of its decoded rows."""

    def __init__(self, directory, **settings) -> None:
        config = EngineConfig(async_scheduling=True, **{**SIZES, **settings})
        self.engine = load_engine(directory, LoadSettings(engine=config))
        self.num_ahead = self.num_rows = self.num_discarded = 0
        runner = self.engine.runner.runner
        runner.launch_ahead = self._count(runner.launch_ahead)
        runner.discard = self._count_discarded(runner.discard)

    def _count(self, launch_ahead: Callable) -> Callable:
        def counting(rows, before):
            launched = launch_ahead(rows, before)
            if launched is not None:
                self.num_ahead += 1
                self.num_rows += len(rows)
            return launched

        return counting

    def _count_discarded(self, discard: Callable) -> Callable:
        def counting(launched):
            self.num_discarded += 1
            discard(launched)

        return counting


def run(engine: Engine) -> Tokens:
    tokens = run_to_end(engine, lambda: check_scheduler(engine.scheduler))
    assert engine.scheduler.manager.num_used == 0
    return tokens


def add_all(engine: Engine, requests) -> None:
    for prompt, params in requests:
        engine.add_request(prompt, params)


REQUESTS = [
    (
        [4 + i, 5, 6 + i],
        SamplingParams(max_tokens=5 + 4 * i, temperature=i % 2, seed=i, n=1 + i % 2),
    )
    for i in range(6)
]


def test_the_tokens_equal_those_without_overlap(tiny):
    directory = tiny["llama"].directory
    plain = load_engine(directory, LoadSettings(engine=EngineConfig(**SIZES)))
    add_all(plain, REQUESTS)
    overlap = Overlap(directory)
    add_all(overlap.engine, REQUESTS)
    assert run(overlap.engine) == run(plain)
    assert overlap.num_ahead > 10


def test_ending_by_token_costs_one_row_and_by_length_none(tiny):
    overlap = Overlap(tiny["llama"].directory)
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)
    overlap.engine.add_request([5, 6, 7], params)
    tokens = run(overlap.engine)["auto-0", 0]
    # The prompt's step gives the first token, and the next step is planned as usual.
    assert (overlap.num_ahead, overlap.num_rows) == (7, 7)

    stop = next(token for token in tokens[4:] if token not in tokens[: tokens.index(token)])
    overlap = Overlap(tiny["llama"].directory)
    params = SamplingParams(max_tokens=20, stop_token_ids=[stop], ignore_eos=True, temperature=0)
    overlap.engine.add_request([5, 6, 7], params)
    got = run(overlap.engine)["auto-0", 0]
    assert got == tokens[: tokens.index(stop) + 1]
    assert overlap.num_rows == len(got) - 2 + 1


@pytest.mark.parametrize("stays", [False, True])
def test_an_abort_keeps_the_launched_step_for_other_requests(tiny, stays):
    overlap = Overlap(tiny["llama"].directory)
    engine = overlap.engine
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
    engine.add_request([5, 6], params, "gone")
    if stays:
        engine.add_request([7, 8], params, "stays")
    for _ in range(4):
        engine.step()
    assert engine.runner.is_ahead
    engine.abort("gone")
    engine.add_request([9, 9], params, "new")
    tokens = run(engine)
    assert overlap.num_discarded == (0 if stays else 1)
    alone = load_engine(tiny["llama"].directory, LoadSettings(engine=EngineConfig(**SIZES)))
    alone.add_request([9, 9], params, "new")
    assert tokens["new", 0] == run(alone)["new", 0]


def test_a_failed_step_discards_the_launched_one(tiny):
    directory = tiny["llama"].directory
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
    overlap, plain = (
        Overlap(directory),
        load_engine(directory, LoadSettings(engine=EngineConfig(**SIZES))),
    )
    engine = overlap.engine
    plain.add_request([5, 6], params)
    engine.add_request([5, 6], params)
    for _ in range(4):
        engine.step()
    runner = engine.runner.runner
    collect = runner.collect

    def broken(plan, launched):
        raise KeyboardInterrupt

    runner.collect = broken
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    runner.collect = collect
    assert run(engine) == run(plain)


def test_a_new_request_waits_for_one_launched_step_at_most(tiny):
    engine = Overlap(tiny["llama"].directory).engine
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    engine.add_request([5, 6], params, "first")
    for _ in range(5):
        engine.step()
    engine.add_request([7, 8], params, "second")
    steps = [{*engine.step().request_ids} for _ in range(2)]
    assert steps == [{"first"}, {"first", "second"}]


READERS = {
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "bad_words_token_ids": {},  # the answer's own pairs of tokens
    "logprobs": {"logprobs": 2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [*range(20)]},
    "logit_bias": {"logit_bias": {7: 3.0}},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 3},
}
"""Parameters. Most of them read tokens that a step launched ahead does not have yet."""


@pytest.mark.parametrize("name", READERS)
def test_no_parameter_reads_tokens_before_they_are_known(tiny, name):
    directory = tiny["llama"].directory
    params = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.0}

    def tokens(is_async: bool, **more) -> list[int]:
        config = EngineConfig(async_scheduling=is_async, **SIZES)
        engine = load_engine(directory, LoadSettings(engine=config, backend="numpy"))
        engine.add_request([4, 5, 6], SamplingParams(**{**params, **more}))
        [found] = run(engine).values()
        return found

    plain = tokens(False)
    more = READERS[name]
    if name == "bad_words_token_ids":
        more = {name: [[a, b] for a, b in pairwise(plain)]}
    wanted = tokens(False, **more)
    assert tokens(True, **more) == wanted
    assert (wanted == plain) == (name == "logprobs"), "the parameter has an effect"
