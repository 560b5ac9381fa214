"""Test that steps which helper processes share give the bits of steps without them.

In most tests the helpers do every message: the caller takes none back, however slow they are.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forks import exit_code_of_child
from interrupts import KINDS, Injector
from test_ops_cpu_attention_reuse import Load, attend
from tiny_models import LLAMA, QWEN2, random_weights, write_model

from mie import EngineConfig, SamplingParams
from mie.load.engine import load_engine
from mie.ops.backend import StepBatch
from mie.ops_cpu import crew as crew_module
from mie.ops_cpu.allocator import CachingAllocator
from mie.ops_cpu.attention import attention as attention_module
from mie.ops_cpu.attention import geometry as attention_geometry
from mie.ops_cpu.attention import shared as shared_attention
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.cpu_backend import CpuBackend
from mie.ops_cpu.crew import MAX_TOKENS, Crew
from mie.ops_cpu.linear import shared as shared_products
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.processes import helpers as helpers_module
from mie.ops_cpu.processes.helpers import HelperProcesses, unpack
from mie.ops_cpu.threads.counts import ThreadCount
from mie.ops_cpu.threads.gains import Gains
from mie.ops_cpu.threads.workers import Workers

pytestmark = pytest.mark.skipif(
    not helpers_module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
NEVER = 1 << 62
PATIENCE = 120.0
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def messages(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Share any work of any model. Count the messages of each kind that helpers have done."""
    monkeypatch.setattr(crew_module, "START_BYTES", 0)
    monkeypatch.setattr(crew_module, "available_cpus", lambda: 64)
    monkeypatch.setattr(attention_module, "WORTH_SHARING", 1)
    monkeypatch.setattr(shared_products, "LEAST_BYTES", 0)
    monkeypatch.setattr(
        TiledPlan, "new_count", lambda plan, *_: ThreadCount(*[plan._workers.num_threads] * 2)
    )
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: False)
    monkeypatch.setattr(helpers_module, "PATIENCE", PATIENCE)
    monkeypatch.setattr(helpers_module._Helper, "take_back", never_take_back)
    done: Counter[int] = Counter()
    run = HelperProcesses.run

    def counted(
        helpers: HelperProcesses, messages: Sequence[bytes], own: Callable[[], object]
    ) -> float:
        done.update(unpack(message)[0] for message in messages)
        return run(helpers, messages, own)

    monkeypatch.setattr(HelperProcesses, "run", counted)
    return done


def never_take_back(helper: helpers_module._Helper) -> bool:
    """Let the helper do the message, and wake it if it fell asleep just before."""
    with contextlib.suppress(OSError):
        os.eventfd_write(helper._wake, 1)
    return False


PRODUCT, ATTENTION = range(2)


# Products.


def step_of(num_rows: int) -> StepBatch:
    none = np.empty(0, np.int64)
    return StepBatch(
        token_ids=np.zeros(num_rows, np.int64),
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=none,
        seq_lens=none,
        block_tables=none,
        logits_rows=none,
    )


def multiply(
    backend: CpuBackend, num_rows: int, *arguments: Any, method: str = "linear"
) -> np.ndarray:
    return backend.run_step(lambda _: getattr(backend, method)(*arguments), step_of(num_rows))


def backends(**settings: Any) -> list[CpuBackend]:
    """Return a backend with helper processes and one without."""
    made = [CpuBackend(num_threads=n, linear_plan="tiled", **settings) for n in (2, 1)]
    assert not made[1]._crew._may_start
    return made


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "every"),
    [
        ((64, 64), "float32", "auto", True),
        ((100, 130), "float32", "auto", False),
        ((4001, 70), "float32", "auto", False),
        ((300, 700), "float32", "bfloat16", False),
        ((4001, 70), "float32", "float16", False),
        ((100, 130), "float64", "auto", False),
    ],
)
def test_shared_products_have_the_bits_of_those_alone(
    shape: tuple[int, int], dtype: str, weight_dtype: str, every: bool, messages: Counter[int]
) -> None:
    num_inputs, num_outputs = shape
    weight = RNG.standard_normal((num_outputs, num_inputs))
    weight = weight.astype(dtype if weight_dtype == "auto" else weight_dtype)
    bias = RNG.standard_normal(num_outputs).astype(dtype)
    norm = np.ones(num_inputs, dtype)
    both = backends(dtype=dtype, weight_dtype=weight_dtype)
    plain = [backend.load_linear(weight.shape, [weight]) for backend in both]
    biased = [backend.load_linear(weight.shape, [weight], bias) for backend in both]
    every_rows = range(MAX_TOKENS + 1) if every else (1, 2, 5, 17, 33, MAX_TOKENS)
    for num_rows in every_rows:
        x = RNG.standard_normal((num_rows, num_inputs)).astype(dtype)
        residual = RNG.standard_normal((num_rows, num_outputs)).astype(dtype)
        before = messages[PRODUCT]
        for matrices in (plain, biased):
            for added in (None, residual):
                got, wanted = (
                    multiply(backend, num_rows, x, matrix, added)
                    for backend, matrix in zip(both, matrices, strict=True)
                )
                np.testing.assert_array_equal(got, wanted)
                assert got.dtype == wanted.dtype
                assert got.flags.c_contiguous
            got, wanted = (
                multiply(backend, num_rows, x, norm, 1e-6, matrix, method="norm_linear")
                for backend, matrix in zip(both, matrices, strict=True)
            )
            np.testing.assert_array_equal(got, wanted)
        assert messages[PRODUCT] > before or num_outputs < 65
    assert not both[0]._crew._team.helpers.have_failed


def test_only_brief_results_are_overwritten(messages: Counter[int]) -> None:
    backend = backends(dtype="float32")[0]
    weight = RNG.standard_normal((128, 64)).astype("float32")
    matrix, norm = backend.load_linear((128, 64), [weight]), np.ones(64, "float32")
    x = RNG.standard_normal((2, 64)).astype("float32")
    lasting = multiply(backend, 2, x, matrix)
    copy = lasting.copy()
    brief = multiply(backend, 2, x, norm, 1e-6, matrix, method="norm_linear")
    multiply(backend, 2, -x, matrix)
    np.testing.assert_array_equal(lasting, copy)
    assert (brief != copy).any()  # or this test would test nothing
    assert messages[PRODUCT] == 3


def test_a_matrix_may_be_loaded_after_the_helpers_have_started(messages: Counter[int]) -> None:
    both = backends(dtype="float32")
    x = RNG.standard_normal((3, 100)).astype("float32")
    pids = set()
    for _ in range(3):
        weight = RNG.standard_normal((200, 100)).astype("float32")
        got, wanted = (
            multiply(backend, 3, x, backend.load_linear((200, 100), [weight])) for backend in both
        )
        np.testing.assert_array_equal(got, wanted)
        team = both[0]._crew._team
        pids.add(team.helpers._helpers[0]._pid)
    assert len(pids) == 3
    assert messages[PRODUCT] == 3


def test_a_result_does_not_depend_on_a_helper_that_dies_between_turns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large product takes several turns. The first notices, and the others go on alone."""
    monkeypatch.setattr("mie.ops_cpu.linear.tiled.BYTES_PER_TURN", 1 << 14)
    both = backends(dtype="float32")
    weight = RNG.standard_normal((640, 100)).astype("float32")
    x = RNG.standard_normal((3, 100)).astype("float32")
    matrices = [backend.load_linear((640, 100), [weight]) for backend in both]
    wanted = multiply(both[1], 3, x, matrices[1])
    np.testing.assert_array_equal(multiply(both[0], 3, x, matrices[0]), wanted)
    helpers = both[0]._crew._team.helpers
    os.kill(helpers._helpers[0]._pid, signal.SIGKILL)
    for _ in range(2):
        np.testing.assert_array_equal(multiply(both[0], 3, x, matrices[0]), wanted)
    assert helpers.have_failed
    assert both[0]._crew._team is None
    assert len(caplog.records) == 1


# Attention.


class Crewed:
    """Attention whose small steps helpers share, and a crew that decides so."""

    def __init__(self, num_threads: int = 2) -> None:
        self.workers = Workers(num_threads)
        self.attention = Attention(self.workers)
        self._plan = TiledPlan(np.dtype("float32"), self.workers)
        self._matrix = self._plan.load((8, 8), [np.zeros((8, 8), np.float32)])
        self.crew = Crew(self.workers, self._plan, self.attention, CachingAllocator())

    def attend(self, load: Load, q: np.ndarray, batch: StepBatch, *key: Any) -> list[np.ndarray]:
        return attend(self.attention, load, q, batch, *key)

    def close(self) -> None:
        self.crew.close()
        self.workers.close()


@pytest.fixture
def new_crewed() -> Iterator[Callable[..., Crewed]]:
    made: list[Crewed] = []

    def new(*arguments: Any) -> Crewed:
        made.append(Crewed(*arguments))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use splits of a few tiles."""
    monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", 1 << 11)


ONE_WINDOW = ((None, True), (20, True))
MANY_WINDOWS = ((20, True), (None, True), (7, True), (40, True), (3, True), (100, True))


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("heads", [(1, 1), (8, 2)])
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("keys", [ONE_WINDOW, MANY_WINDOWS], ids=["one window", "many windows"])
def test_shared_attention_has_the_bits_of_one_thread(
    heads: tuple[int, int],
    num_processes: int,
    keys: tuple[tuple[int | None, bool], ...],
    new_crewed: Callable[..., Crewed],
    messages: Counter[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences grow, join, leave and are preempted.

    Long steps and pauses of the helpers come between. Some messages are taken back, and some layers
    are not asked for.
    """
    load = Load(seed=num_processes, heads=heads)
    rng, crewed = load.rng, new_crewed(num_processes)
    is_taken_back = are_paused = False

    def take_back(helper: helpers_module._Helper) -> bool:
        return (is_taken_back and helper._given.take()) or never_take_back(helper)

    monkeypatch.setattr(helpers_module._Helper, "take_back", take_back)
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: are_paused)
    for length in (120, 31, 250):
        load.join(length)
    for _ in range(40):
        happens = rng.random()
        if happens < 0.06 and len(load.lengths) < 4:
            load.join(int(rng.integers(1, 140)))
        elif (happens < 0.12 and len(load.lengths) > 1) or max(load.lengths) > 290:
            load.leave(int(np.argmax(load.lengths)))
        elif happens < 0.15:
            load.leave(0)
            load.join(int(rng.integers(1, 140)))
        counts = [1] * len(load.lengths)
        if rng.random() < 0.15:
            most = 2 * MAX_TOKENS if rng.random() < 0.3 else 6
            counts[int(rng.integers(len(counts)))] = int(rng.integers(most // 2, most))
        q, batch = load.step(counts)
        crewed.crew.begin_step(len(q))
        fresh = Attention(Workers(1))
        is_taken_back = bool(rng.random() < 0.2)
        for key in keys:
            are_paused = bool(rng.random() < 0.1)
            if rng.random() < 0.9:
                expected = attend(fresh, load, q, batch, *key)
                np.testing.assert_array_equal(crewed.attend(load, q, batch, *key), expected)
    assert messages[ATTENTION] > 40
    assert not crewed.crew._team.helpers.have_failed


def test_attention_that_depends_on_the_batch_is_as_exact(
    new_crewed: Callable[..., Crewed], messages: Counter[int]
) -> None:
    load, crewed = Load(seed=1, heads=(8, 2)), new_crewed()
    for length in (5, 90, 300):
        load.join(length)
    for counts in ([1, 1, 1], [1, 1, 1], [20, 1, 5], [1, 1, 1]):
        q, batch = load.step(counts)
        crewed.crew.begin_step(len(q))
        for window in (None, 20):
            got = crewed.attend(load, q, batch, window, False)
            expected = attend(Attention(Workers(1)), load, q, batch, window, False)
            np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)
    assert messages[ATTENTION] > 8


def test_very_long_block_tables_are_not_shared(
    new_crewed: Callable[..., Crewed], messages: Counter[int]
) -> None:
    load, crewed = Load(seed=2, heads=(4, 2)), new_crewed()
    load.join(200)
    load.join(100)
    for width in (0, shared_attention.MOST_INTS, 0):
        before = messages[ATTENTION]
        for _ in range(3):
            q, batch = load.step([1, 1])
            wide = np.pad(batch.block_tables, ((0, 0), (0, width)), constant_values=10**9)
            batch = replace(batch, block_tables=wide)
            crewed.crew.begin_step(len(q))
            for window in (None, 20):
                got = crewed.attend(load, q, batch, window, True)
                expected = attend(Attention(Workers(1)), load, q, batch, window, True)
                np.testing.assert_array_equal(got, expected)
        assert (messages[ATTENTION] == before) == (width > 0)


def test_two_caches_may_take_turns(
    new_crewed: Callable[..., Crewed], messages: Counter[int]
) -> None:
    loads, crewed = [Load(seed=seed, heads=(4, 2)) for seed in (3, 4)], new_crewed()
    for load in loads:
        load.join(100)
        load.join(30)
    for number in range(12):
        load = loads[number // 3 % 2]
        q, batch = load.step([1, 1])
        crewed.crew.begin_step(len(q))
        got = crewed.attend(load, q, batch, None, True)
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        np.testing.assert_array_equal(got, expected)
    assert messages[ATTENTION] > 5


def test_an_interrupt_before_a_step_is_known_does_not_matter(
    new_crewed: Callable[..., Crewed],
) -> None:
    """The same step may be run again after it."""
    load, crewed = Load(seed=5, heads=(4, 2)), new_crewed()
    load.join(100)
    line = 1
    while True:
        q, batch = load.step([1])
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        crewed.crew.begin_step(1)
        injector = Injector(KINDS["SIGINT"][0], line)

        def run(q: np.ndarray = q, batch: StepBatch = batch) -> list[np.ndarray]:
            return crewed.attend(load, q, batch, None, True)

        with contextlib.suppress(KeyboardInterrupt):
            injector.run(run)
        np.testing.assert_array_equal(run(), expected)
        if injector.num_lines < line:
            break
        line += 11
    assert line > 100


# Engines.

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 1, 5], [9] * 20, [2, 7]]
# Matrices of several tiles.
SHAPES = {
    "max_position_embeddings": 512,
    "eos_token_id": 39,
    "hidden_size": 100,
    "intermediate_size": 130,
    "head_dim": 40,
}
MODELS = {
    "llama": LLAMA | SHAPES,
    # Some layers have a window, and all have a bias.
    "qwen2": QWEN2
    | SHAPES
    | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("models")
    return {
        name: write_model(base / name, config, random_weights(config))
        for name, config in MODELS.items()
    }


def new_engine(directory: Any, **settings: Any) -> Any:
    defaults = {"num_blocks": 64, "num_threads": 2, "block_size": 4, "linear_plan": "tiled"}
    return load_engine(directory, EngineConfig(**defaults | settings))


def crew_of(engine: Any) -> Crew:
    crew = engine._runner.backend._crew
    assert isinstance(crew, Crew)
    return crew


def generate(
    engine: Any, max_tokens: int = 20, each_step: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the tokens, and the log-probabilities of tokens and prompts."""
    found: dict[str, Any] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=max_tokens + number,
            ignore_eos=True,
            temperature=number % 2,
            seed=number,
            logprobs=5,
            prompt_logprobs=2 if number == 0 else None,
        )
        engine.add_request(prompt, params, str(number))
    while engine.has_work:
        each_step()
        output = engine.step()
        for new in output.outputs:
            rows = [(each.token_ids, each.logprobs) for each in new.logprobs]
            found.setdefault(new.request_id, []).append((new.token_ids, rows))
        for name, prompt_rows in output.prompt_logprobs.items():
            found[f"prompt {name}"] = [(each.token_ids, each.logprobs) for each in prompt_rows]
    return found


def without_helpers(directory: Any, **settings: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew_module, "START_BYTES", NEVER)
        engine = new_engine(directory, **settings)
        found = generate(engine)
        assert crew_of(engine)._team is None
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {"batch_invariant": True, "max_num_batched_tokens": 3},
        {"kv_cache_dtype": "int8", "enable_prefix_caching": False},
    ],
    ids=["invariant", "short chunks", "int8 cache"],
)
def test_an_engine_gives_the_same(
    model: str, settings: dict[str, Any], directories: dict[str, Any], messages: Counter[int]
) -> None:
    wanted = without_helpers(directories[model], **settings)
    assert not messages
    engine = new_engine(directories[model], **settings)
    for _ in range(2):
        assert generate(engine) == wanted
    assert messages[PRODUCT] > 100
    assert (messages[ATTENTION] > 50) == ("kv_cache_dtype" not in settings)
    assert not crew_of(engine)._team.helpers.have_failed


def test_two_engines_may_run_at_once(directories: dict[str, Any]) -> None:
    wanted = {name: without_helpers(path) for name, path in directories.items()}
    found: dict[str, Any] = {}

    def work(name: str) -> None:
        found[name] = generate(new_engine(directories[name]))

    threads = [threading.Thread(target=work, args=(name,)) for name in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == wanted


def test_an_engine_is_freed_at_once_with_its_helpers(directories: dict[str, Any]) -> None:
    engine = new_engine(directories["llama"])
    generate(engine)
    pids = [helper._pid for helper in crew_of(engine)._team.helpers._helpers]
    attention = engine._runner.backend._attention
    matrix = engine._runner.decoder._head
    freed = [weakref.ref(each) for each in (matrix.tiles, attention.cache)]
    del attention, matrix
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [each() is None for each in freed] == [True, True]
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["fork", "eventfd", "pidfd_open", "mmap"])
def test_an_engine_goes_on_where_helpers_cannot_start(
    what: str,
    directories: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = without_helpers(directories["llama"])

    def fails(*_: Any) -> Any:
        raise MemoryError("planted") if what == "mmap" else OSError(11, "planted")

    engine = new_engine(directories["llama"])
    if what == "mmap":
        monkeypatch.setattr(shared_products, "shared_zeros", fails)
    else:
        monkeypatch.setattr(os, what, fails)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert generate(engine) == wanted
    [record] = caplog.records
    assert "could not be started" in record.message
    assert "planted" in record.message


@pytest.mark.parametrize("how", ["killed", "stopped for a while", "both"])
def test_helpers_that_die_or_stop_at_any_step_change_nothing(
    how: str,
    directories: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread kills or stops them whenever it gets to it."""
    wanted = without_helpers(directories["llama"])
    monkeypatch.setattr(helpers_module, "PATIENCE", PATIENCE)
    for seed in range(2):
        engine, rng = new_engine(directories["llama"]), np.random.default_rng(seed)
        num_steps, at = 0, int(rng.integers(1, 20))
        threads: list[threading.Thread] = []

        def strike(pid: int, pause: float) -> None:
            threading.Event().wait(pause)
            with contextlib.suppress(ProcessLookupError):
                if how != "killed":
                    os.kill(pid, signal.SIGSTOP)
                    threading.Event().wait(0.02)
                os.kill(pid, signal.SIGCONT if how == "stopped for a while" else signal.SIGKILL)

        def each_step(
            engine: Any = engine,
            threads: list[threading.Thread] = threads,
            at: int = at,
            rng: np.random.Generator = rng,
        ) -> None:
            nonlocal num_steps
            num_steps += 1
            team = crew_of(engine)._team
            if team is None or num_steps < at or (threads and how != "stopped for a while"):
                return
            pid, pause = team.helpers._helpers[0]._pid, rng.random() * 3e-3
            threads.append(threading.Thread(target=strike, args=(pid, pause)))
            threads[-1].start()

        assert generate(engine, each_step=each_step) == wanted
        for thread in threads:
            thread.join(PATIENCE)
        assert threads
        assert len(caplog.records) <= seed + 1


def test_a_fork_while_a_step_runs_disturbs_neither(directories: dict[str, Any]) -> None:
    """The child computes with an engine of its own."""
    wanted = without_helpers(directories["llama"])
    engine = new_engine(directories["llama"])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(generate(engine) for _ in range(3)))
    thread.start()

    def action() -> None:
        crew_of(engine)._find_team()
        assert crew_of(engine)._team is None or crew_of(engine)._team.helpers.are_usable
        crew_of(engine).close()

    for _ in range(3):
        assert exit_code_of_child(action) == 0
    thread.join(PATIENCE)
    assert found == [wanted] * 3
    assert not crew_of(engine)._team.helpers.have_failed


def test_an_engine_runs_in_a_forked_child_with_helpers_of_its_own(
    directories: dict[str, Any], messages: Counter[int]
) -> None:
    wanted = without_helpers(directories["llama"])
    engine = new_engine(directories["llama"])
    assert generate(engine) == wanted

    def action() -> None:
        messages.clear()
        assert generate(engine) == wanted
        assert messages[PRODUCT] > 100
        assert messages[ATTENTION] > 50

    assert exit_code_of_child(action) == 0
    assert generate(engine) == wanted
    assert not crew_of(engine)._team.helpers.have_failed


def test_an_engine_survives_interrupts_at_any_line(directories: dict[str, Any]) -> None:
    """After each one the engine goes on, or is given up. No token may differ."""
    if sys.gettrace() is not None:
        pytest.skip("another tracer is at work")
    wanted = without_helpers(directories["llama"])
    rng = np.random.default_rng(0)
    for _ in range(4):
        engine = new_engine(directories["llama"])
        injector = Injector(KINDS["SIGINT"][0], int(rng.integers(1, 60_000)))
        with contextlib.suppress(KeyboardInterrupt):
            injector.run(lambda engine=engine: generate(engine))
        for number in range(len(PROMPTS)):
            engine.abort(str(number))
        while engine.has_work:
            engine.step()
        assert generate(engine) == wanted, injector.where
