"""Run the whole engine on a stand-in for CuPy that does nothing before it is waited for.

The stand-in fails on actions that a step must not take once its size is warm, and on memory that a
graph must not use. The last tests check that it notices each of these.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from audit import steps_of
from emulated import needs_compiler
from engines import run_to_end
from fake_cupy import FakeCupy, Violation, fake_cupy

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.backend import Backend, StepBatch
from mie.ops.sampling import RowControls
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.load import load_cupy_backend

__all__ = ["fake_cupy"]
pytestmark = needs_compiler

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.3, top_p=0.9, seed=5, max_tokens=32, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with biases and an untied output head."""
    weights = tiny_models.random_weights(tiny_models.QWEN2)
    return tiny_models.write_model(tmp_path, tiny_models.QWEN2, weights)


def reading_backend(cupy: FakeCupy) -> Any:
    """Patch `load_engine` so that the backend may wait where it reads the sampled ids."""

    def wrap(backend: Backend) -> Backend:
        finish = backend.finish_sample

        def finish_sample(drawn: Any) -> list[int]:
            with cupy.reading():
                return finish(drawn)

        backend.finish_sample = finish_sample  # type: ignore[method-assign]
        return backend

    return wrap


def start(model: Path, cupy: FakeCupy | None, **settings: Any) -> Engine:
    """Return an engine with three requests, on the stand-in or on the emulator."""
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, **settings}
    config = EngineConfig(num_blocks=40, block_size=4, **settings)
    backend = "cupy-emulated" if cupy is None else "cupy"
    wrap = None if cupy is None else reading_backend(cupy)
    engine = load_engine(
        model, LoadSettings(engine=config, backend=backend, dtype="float32"), wrap=wrap
    )
    for number, params in enumerate((GREEDY, DRAWN, GREEDY)):
        engine.add_request(list(range(5 + number, 15 + 2 * number)), params)
    return engine


@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_warm_step_only_queues_and_reads_its_tokens(
    fake_cupy: FakeCupy, model: Path, async_scheduling: bool
):
    wanted = run_to_end(start(model, None, enforce_eager=True))
    engine = start(model, fake_cupy, async_scheduling=async_scheduling)
    for _ in range(8):
        engine.step()
    num_graphs = len(fake_cupy.graphs)
    with fake_cupy.steady():
        for _ in range(20):
            engine.step()
    assert len(fake_cupy.graphs) == num_graphs
    assert fake_cupy.graphs[-1].num_launches >= 20
    assert run_to_end(engine) == wanted


@pytest.mark.parametrize(
    ("checkpoint", "version", "chosen"),
    [
        pytest.param("bfloat16", "14.0.0", "bfloat16", marks=pytest.mark.slow),
        ("float16", "14.0.0", "float16"),
        ("float32", "14.0.0", "float16"),
        ("bfloat16", "13.6.0", "float16"),
    ],
)
def test_the_dtype_follows_the_checkpoint(
    fake_cupy: FakeCupy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    checkpoint: str,
    version: str,
    chosen: str,
):
    fake_cupy.__version__ = version  # type: ignore[misc]
    config = tiny_models.QWEN2 | {"torch_dtype": checkpoint}
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    found: list[str] = []

    def wrap(backend: Any) -> Backend:
        found.append(backend.dtype.name)
        return backend

    settings = EngineConfig(
        num_blocks=40, block_size=4, max_model_len=160, max_num_batched_tokens=4, max_num_seqs=1
    )
    load_engine(model, LoadSettings(engine=settings, backend="cupy"), wrap=wrap)
    assert found == [chosen]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [f"this is {version}" in each for each in warnings] == (
        [True] if checkpoint == "bfloat16" != chosen else []
    )


def test_enforce_eager_captures_nothing(fake_cupy: FakeCupy, model: Path):
    outputs = []
    for is_eager in (True, False):
        engine = start(model, fake_cupy, enforce_eager=is_eager)
        for _ in range(12):
            engine.step()
        assert bool(fake_cupy.graphs) != is_eager
        outputs.append([seq.output_ids for each in engine.requests for seq in each.sequences])
    assert outputs[0] == outputs[1]


def test_cublas_is_set_up_for_captures(fake_cupy: FakeCupy):
    backend = load_cupy_backend("float32")
    [state] = fake_cupy.cublas_library.handles
    assert state.stream == backend._queue.stream.ptr
    assert state.workspace == 32 << 20  # set after the stream, which would reset it
    assert state.math_mode == 16  # no reduction in 16 bits, no TF32


# The stand-in notices each failure.


def decodes(*token_ids: int, **drawn: Any) -> StepBatch:
    """Return the third token of each of two sequences."""
    return StepBatch(
        token_ids=np.array(token_ids),
        positions=np.array([2, 2]),
        slot_mapping=np.array([2, 18]),
        cu_seqlens_q=np.arange(3),
        seq_lens=np.array([3, 3]),
        block_tables=np.array([[0], [1]]),
        logits_rows=np.arange(2),
        **drawn,
    )


class Model:
    """A forward pass of one product, followed by ``also``."""

    def __init__(self, backend: CupyBackend) -> None:
        self.backend = backend
        matrix = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
        self.embedding = backend.load_embedding((6, 4), [matrix])
        self.also: Any = lambda x: None

    def forward(self, batch: StepBatch) -> Any:
        x = self.backend.embed(batch.token_ids, self.embedding)
        self.also(x)
        return self.backend.linear(x, self.backend.tie_linear(self.embedding))

    def step(self, batch: StepBatch | None = None) -> Any:
        return self.backend.run_step(self.forward, batch or decodes(1, 2))

    def draw(self, batch: StepBatch) -> Any:
        """Return tokens of a step that is only queued. Its controls are random, so they are staged,
        too."""
        rows = [RowControls(temperature=1.0, uniform=0.3), RowControls()]
        return self.backend.start_sample(self.step(batch), rows)


@pytest.fixture
def machine(fake_cupy: FakeCupy) -> Model:
    return Model(load_cupy_backend("float32"))


def test_the_next_step_takes_its_tokens_on_the_device(fake_cupy: FakeCupy, machine: Model):
    """Each step is read one step late, and no memory is overwritten before the device reads it."""
    tokens, wanted = np.array([1, 2]), []
    for _ in range(6):
        wanted.append(machine.backend.finish_sample(machine.draw(decodes(*tokens))))
        tokens = np.array(wanted[-1][::-1])
    drawn, got = [machine.draw(decodes(1, 2))], []
    for _ in range(5):
        ahead = decodes(0, 0, drawn=drawn[-1], drawn_rows=np.array([1, 0]))
        drawn.append(machine.draw(ahead))
        got.append(machine.backend.finish_sample(drawn.pop(0)))
    got.append(machine.backend.finish_sample(drawn.pop()))
    assert got == wanted
    assert len({tuple(each) for each in wanted}) > 1


def test_writing_before_a_copy_has_read_is_noticed(
    fake_cupy: FakeCupy, machine: Model, monkeypatch: pytest.MonkeyPatch
):
    wanted = machine.backend.finish_sample(machine.draw(decodes(1, 2)))
    staging = steps_of(machine.backend)._staging
    staging._buffers = [staging._buffers[0]] * 2
    drawn = machine.draw(decodes(1, 2))
    machine.draw(decodes(3, 4))
    assert machine.backend.finish_sample(drawn) != wanted


def test_overwritten_ids_are_not_returned(machine: Model):
    first, second, third = (machine.draw(decodes(1, 2)) for _ in range(3))
    with pytest.raises(AssertionError, match="read too late"):
        machine.backend.finish_sample(first)
    assert len(machine.backend.finish_sample(second)) == 2
    assert len(machine.backend.finish_sample(third)) == 2


OFFENCES = {
    "an allocation": lambda cupy, x: cupy.empty(3, np.float32),
    "a wait for the device": lambda cupy, x: cupy.current.synchronize(),
    "a copy": lambda cupy, x: x.get(),
    "a compilation": lambda cupy, x: cupy.nvrtc.compile("", ["gated_mul<float>"], []),
}


@pytest.mark.parametrize("offence", OFFENCES)
@pytest.mark.parametrize("is_eager", [False, True], ids=["while capturing", "in a steady step"])
def test_a_violation_is_noticed(fake_cupy: FakeCupy, machine: Model, offence: str, is_eager: bool):
    steps_of(machine.backend).enforces_eager = is_eager
    machine.step()  # the first one may do anything
    fake_cupy.finish_streams()
    machine.also = lambda x: OFFENCES[offence](fake_cupy, x)
    when = "in a steady step" if is_eager else "while capturing"
    steady = fake_cupy.steady() if is_eager else nullcontext()
    with steady, pytest.raises(Violation, match=f"{offence}.* {when}"):
        machine.step()


def test_a_step_after_a_failed_capture_is_captured(fake_cupy: FakeCupy, machine: Model):
    machine.step()
    machine.also = lambda x: fake_cupy.empty(3, np.float32)
    with pytest.raises(Violation):
        machine.step()
    machine.also = lambda x: None
    wanted = (machine.embedding @ machine.embedding.T)[[1, 2]]
    np.testing.assert_allclose(machine.step().get(), wanted, rtol=1e-5)
    assert [graph.num_launches for graph in fake_cupy.graphs[-1:]] == [1]


def test_a_launch_into_the_default_stream_is_noticed(fake_cupy: FakeCupy, machine: Model):
    machine.step()
    x = fake_cupy.zeros((2, 4), np.float32)
    rows = fake_cupy.zeros(2, np.int32)
    kernel = machine.backend.launcher.kernel("gather_rows.cu", "gather_rows<float>")
    with fake_cupy.steady(), pytest.raises(Violation, match="default stream"):
        kernel((2,), (32,), (x, rows, x, np.int32(4)))


# Python's collections of garbage.


class Cycle:
    """Garbage that only a collection frees, such as another engine with its memory."""

    def __init__(self) -> None:
        self.itself = self


@contextmanager
def collecting_eagerly() -> Iterator[list[str]]:
    """Collect after nearly every allocation, and note each collection."""
    before, notes = gc.get_threshold(), list[str]()

    def note(phase: str, info: dict[str, int]) -> None:
        notes.append(phase)

    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        yield notes
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.remove(note)


@pytest.fixture
def eager_collections() -> Iterator[list[str]]:
    with collecting_eagerly() as notes:
        yield notes


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(
    machine: Model, eager_collections: list[str], fails: bool
):
    """A collection may free another engine's memory, and a free ends the capture.

    An H200 noticed this on 2026-11-27. After a capture, also one that fails, collections go on.
    """
    during: list[int] = []

    def litter(x: Any) -> None:
        eager_collections.clear()
        kept = [[Cycle()] for _ in range(300)]
        during.append(len(eager_collections))
        if fails and len(during) == 2:
            raise RuntimeError(f"a capture of {len(kept)} cycles that fails")

    machine.also = litter
    machine.step()
    assert during[0] > 0, "the threshold has no effect"
    with pytest.raises(RuntimeError, match="that fails") if fails else nullcontext():
        machine.step()  # is captured
    assert during[1] == 0
    assert gc.isenabled()


def test_a_capture_leaves_collections_off_if_they_were(machine: Model):
    gc.disable()
    try:
        for _ in range(2):
            machine.step()
        assert not gc.isenabled()
    finally:
        gc.enable()
