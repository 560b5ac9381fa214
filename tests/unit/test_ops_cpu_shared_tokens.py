"""Test that large steps whose tokens processes share give the bits of steps without them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import KINDS, Injector
from linear_layouts import KERNEL, PACKED, layout_of, needs_kernel
from shared_steps import configs, crew_of, share_always
from tiny_models import random_weights, write_model

from mie import EngineConfig, SamplingParams
from mie.load.engine import load_engine
from mie.ops.backend import StepBatch
from mie.ops_cpu import crew as crew_module
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.crew import MAX_TOKENS, Crew
from mie.ops_cpu.linear.geometry import MAX_GROUP, MAX_ROWS
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.processes import helpers as helpers_module
from mie.ops_cpu.processes.balance import Balance
from mie.ops_cpu.processes.helpers import HelperProcesses
from mie.ops_cpu.shared_tokens import SharedTokens
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers

needs_helpers = pytest.mark.skipif(
    not helpers_module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
NEVER = 1 << 62
NEW_TRIALS = crew_module._new_trials
MODELS = configs(window=90)
LENGTHS = (300, 81, 7, 130, 66)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 39, length).tolist() for length in LENGTHS]


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Share any work. Count the large steps that are shared, by their number of tokens."""
    share_always(monkeypatch)
    steps: Counter[int] = Counter()
    begin = SharedTokens.begin

    def counted(tokens: SharedTokens, batch: StepBatch) -> StepBatch:
        steps[len(batch.token_ids)] += 1
        return begin(tokens, batch)

    monkeypatch.setattr(SharedTokens, "begin", counted)
    return steps


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    found = {}
    for name, config in MODELS.items():
        weights = random_weights(config)
        found[name] = write_model(base / name, config, weights)
        halves = {each: weight.astype(np.float16) for each, weight in weights.items()}
        found[f"{name} float16"] = write_model(base / f"{name} float16", config, halves)
    return found


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Any]]:
    crews: list[Crew] = []

    def new(directory: Path, **settings: Any) -> Any:
        defaults = {
            "num_blocks": 256,
            "num_threads": 2,
            "block_size": 4,
            "linear_plan": "tiled",
            "enable_prefix_caching": False,
        }
        engine = load_engine(directory, EngineConfig(**defaults | settings))
        crews.append(crew_of(engine))
        return engine

    yield new
    for crew in crews:
        crew.close()


def generate(engine: Any, num_prompt_logprobs: int | None = None) -> dict[str, Any]:
    """Return the tokens and log-probabilities, one request after another and then together."""
    found: dict[str, Any] = {}
    for numbers in [*([number] for number in range(len(PROMPTS))), range(len(PROMPTS))]:
        for number in numbers:
            params = SamplingParams(
                max_tokens=4 + number,
                ignore_eos=True,
                temperature=number % 2,
                seed=number,
                logprobs=3,
                prompt_logprobs=num_prompt_logprobs,
            )
            engine.add_request(PROMPTS[number], params, f"{number} of {len(numbers)}")
        while engine.has_work:
            output = engine.step()
            for new in output.outputs:
                rows = [(each.token_ids, each.logprobs) for each in new.logprobs]
                found.setdefault(new.request_id, []).append((new.token_ids, rows))
            for name, rows in output.prompt_logprobs.items():
                found[f"prompt {name}"] = [(each.token_ids, each.logprobs) for each in rows]
    return found


def without_helpers(new_engine: Callable[..., Any], directory: Path, **settings: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew_module, "START_BYTES", NEVER)
        engine = new_engine(directory, **settings)
        found = generate(engine)
        assert crew_of(engine)._team is None
    return found


# Engines.


@needs_helpers
@pytest.mark.parametrize(("model", "num_threads"), [("llama", 3), ("qwen2", 2)])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {"batch_invariant": False, "max_num_batched_tokens": 100},
        pytest.param({"batch_invariant": True, "linear_plan": "packed"}, marks=needs_kernel),
        pytest.param({"linear_plan": "packed"}, marks=needs_kernel),
        pytest.param({"linear_plan": "packed", "weight_dtype": "float16"}, marks=needs_kernel),
        {"batch_invariant": True, "enable_prefix_caching": True},
    ],
    ids=["invariant", "chunks", "packed invariant", "packed", "16 bits", "prefixes"],
)
def test_an_engine_gives_the_same(
    model: str,
    num_threads: int,
    settings: dict[str, Any],
    directories: dict[str, Path],
    steps: Counter[int],
    new_engine: Callable[..., Any],
) -> None:
    settings = settings | {"num_threads": num_threads}
    directory = directories[f"{model} float16" if "weight_dtype" in settings else model]
    wanted = without_helpers(new_engine, directory, **settings)
    assert not steps
    engine = new_engine(directory, **settings)
    assert generate(engine) == wanted
    assert steps
    assert not crew_of(engine)._team.helpers.have_failed


@needs_helpers
def test_shares_may_be_unequal(
    directories: dict[str, Path],
    steps: Counter[int],
    new_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"linear_plan": "packed"} if KERNEL else {}
    wanted = without_helpers(new_engine, directories["llama"], **settings)
    engine, shared = new_engine(directories["llama"], **settings), 0
    generate(engine)
    helpers = crew_of(engine)._team.helpers
    monkeypatch.setattr(Balance, "note", lambda *_: None)
    for border in (0, 3, 20, 40, 61, 64):
        helpers._balance.ends = helpers.ends = [0, border, 64]
        steps.clear()
        assert generate(engine) == wanted
        # A process with few tokens would read all weights for them.
        assert (steps.total() > 0) == (3 <= border <= 61)
        shared += steps.total()
    assert shared > 8


@needs_helpers
@pytest.mark.parametrize(
    "settings",
    [
        {"linear_plan": "plain"},
        {"kv_cache_dtype": "int8"},
        {"num_threads": 1},
    ],
    ids=["plain", "int8 cache", "one thread"],
)
def test_some_engines_do_not_share_tokens(
    settings: dict[str, Any],
    directories: dict[str, Path],
    steps: Counter[int],
    new_engine: Callable[..., Any],
) -> None:
    generate(new_engine(directories["llama"], **settings))
    assert not steps


@needs_helpers
def test_steps_with_many_rows_of_logits_and_of_few_or_too_many_tokens_go_to_threads(
    directories: dict[str, Path],
    steps: Counter[int],
    new_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = directories["llama"]
    generate(new_engine(directory), num_prompt_logprobs=2)
    assert not steps
    monkeypatch.setattr(crew_module, "MAX_LARGE_TOKENS", 100)
    wanted = without_helpers(new_engine, directory)
    assert generate(new_engine(directory)) == wanted
    assert set(steps) == {LENGTHS[1], LENGTHS[4]}
    steps.clear()
    generate(new_engine(directory, num_threads=4))
    assert not steps
    assert MAX_TOKENS < 100 <= 4 * (MAX_GROUP + 1)


@needs_helpers
@pytest.mark.parametrize("how", ["dies", "is killed", "is stuck"])
def test_a_helper_that_fails_at_any_meeting_changes_nothing(
    how: str,
    directories: dict[str, Path],
    steps: Counter[int],
    new_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = without_helpers(new_engine, directories["llama"])
    monkeypatch.setattr(helpers_module, "PATIENCE", 0.05 if how == "is stuck" else 120.0)
    meet, num_left = HelperProcesses.meet, 0

    def fail(helpers: HelperProcesses) -> None:
        nonlocal num_left
        if helpers.rank:
            num_left -= 1
            if num_left == 0 and how == "dies":
                os._exit(1)
            elif num_left == 0:
                os.kill(os.getpid(), signal.SIGSTOP if how == "is stuck" else signal.SIGKILL)
        meet(helpers)

    monkeypatch.setattr(HelperProcesses, "meet", fail)
    for num_meetings in (1, 2, 3, 4, 9):
        num_left = num_meetings
        caplog.clear()
        engine = new_engine(directories["llama"])
        assert generate(engine) == wanted
        [record] = caplog.records
        assert "goes on without helper processes" in record.message
        assert steps
        assert crew_of(engine)._team is None


@needs_helpers
def test_an_engine_survives_interrupts_at_any_line(
    directories: dict[str, Path], new_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    if sys.gettrace() is not None:
        pytest.skip("another tracer is at work")
    caplog.set_level(logging.WARNING)
    wanted = without_helpers(new_engine, directories["llama"])
    rng = np.random.default_rng(0)
    for _ in range(4):
        engine = new_engine(directories["llama"])
        injector = Injector(KINDS["SIGINT"][0], int(rng.integers(1, 40_000)))
        with contextlib.suppress(KeyboardInterrupt):
            injector.run(lambda engine=engine: generate(engine))
        assert injector.where
        for number in range(len(PROMPTS)):
            for together in (1, len(PROMPTS)):
                engine.abort(f"{number} of {together}")
        while engine.has_work:
            engine.step()
        assert generate(engine) == wanted, injector.where
    assert not caplog.records


@needs_helpers
@pytest.mark.parametrize("is_slower", [False, True])
def test_large_steps_that_are_slower_with_helpers_go_to_threads(
    is_slower: bool,
    directories: dict[str, Path],
    new_engine: Callable[..., Any],
    steps: Counter[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew_module, "_new_trials", NEW_TRIALS)
    monkeypatch.setattr(Balance, "note", lambda *_: None)  # each process has enough tokens
    now, plan_step = 0.0, Attention._begin

    def take_time(attention: Attention, batch: StepBatch, cache: Any) -> None:
        nonlocal now
        cost = 2.0 if (attention.shared is not None) == is_slower else 1.0
        now += cost * batch.seq_lens.item(0)  # A longer prompt takes longer.
        plan_step(attention, batch, cache)

    monkeypatch.setattr(Attention, "_begin", take_time)
    monkeypatch.setattr(crew_module, "perf_counter", lambda: now)
    engine, shared = new_engine(directories["llama"]), []
    lengths = [100, 100, *[65, 127, 65, 65] * 20]
    for number, length in enumerate(lengths):
        steps.clear()
        engine.add_request([number % 30] * length, SamplingParams(max_tokens=1), str(number))
        engine.step()
        assert not engine.has_work
        shared.append(bool(steps))
    assert shared[:13] == [False, *([True] * 2 + [False] * 2) * 3]
    assert set(shared[13:]) == {not is_slower}


# Products.


@pytest.mark.parametrize(
    "layout", ["tiled", *(pytest.param(*each.values, marks=needs_kernel) for each in PACKED)]
)
@pytest.mark.parametrize("num_inputs", [100, 576, 2100])
def test_rows_that_are_computed_apart_have_the_same_bits(layout: str, num_inputs: int) -> None:
    """Also where a product takes several calls."""
    plan = TiledPlan(np.dtype("float32"), Workers(1), kernel=KERNEL)
    rng = np.random.default_rng(num_inputs)
    weight = rng.standard_normal((200, num_inputs)).astype(np.float32)
    matrix = plan.load(weight.shape, [weight], layout=layout_of(plan, layout, weight.shape))
    unit = matrix.layout.row_unit(num_inputs)
    assert unit > 0
    x = rng.standard_normal((2 * MAX_ROWS + 60, num_inputs)).astype(np.float32)
    with Blas().threads(1):  # as in a step
        for num_rows in (*rng.integers(2 * unit + 50, 300, 6), MAX_ROWS + 9, len(x)):
            whole = matrix.apply(x[:num_rows], None)
            first = MAX_GROUP // unit * unit + unit
            for cut in rng.integers(first // unit, (num_rows - MAX_GROUP) // unit, 4) * unit:
                np.testing.assert_array_equal(matrix.apply(x[:cut], None), whole[:cut])
                rest = matrix.apply(x[cut:num_rows], None)
                np.testing.assert_array_equal(rest, whole[cut:])
