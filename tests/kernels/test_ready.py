"""Test that a loaded model is ready: its first requests compile, capture and allocate nothing."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from audit import kv_cache_of
from emulated import needs_compiler
from engines import run_to_end
from fake_cupy import FakeCupy, fake_cupy
from test_graphs import WIDE
from test_recording import reading_backend

from mie import LLM
from mie.cli.compiling import compile_for_gpu
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.lab.sim.devices import find_shape
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.load.sizing import step_size
from mie.ops_gpu import cubins
from mie.ops_gpu.batch import ANY_LENGTH, Bucket
from mie.ops_gpu.load import load_cupy_backend
from mie.ops_gpu.ready import LAUNCH_BYTES, MOST_STEPS, buckets

__all__ = ["fake_cupy"]
pytestmark = needs_compiler


def load(cupy: FakeCupy, folder: Path, config: Any, dtype: str, **settings: Any) -> Any:
    model = tiny_models.write_model(folder, config, tiny_models.random_weights(config))
    settings = {"num_blocks": 40, "block_size": 16, "max_num_batched_tokens": 20, **settings}
    wrap = reading_backend(cupy)
    return load_engine(
        model,
        LoadSettings(engine=EngineConfig(**settings), backend="cupy", dtype=dtype),
        wrap=wrap,
        use_tqdm=False,
    )


@pytest.mark.few
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", ["stream", "plain"])
def test_the_first_requests_find_everything_ready(
    fake_cupy: FakeCupy, tmp_path: Path, name: str, async_scheduling: bool
):
    config, dtype = {"stream": (WIDE, "float16"), "plain": (tiny_models.QWEN2, "float32")}[name]
    settings = {"async_scheduling": async_scheduling, "max_num_seqs": 2}
    engine = load(fake_cupy, tmp_path, config, dtype, **settings)
    compiled, num_graphs = list(fake_cupy.nvrtc.compiled), len(fake_cupy.graphs)
    assert len(compiled) == len(set(compiled)) > 10
    assert num_graphs == 2  # of one and of two sequences
    drawn = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=6, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine.add_request([5, 6, 7, 8], greedy)
    engine.add_request([*range(4, 30)], drawn)  # in two chunks
    with fake_cupy.steady():
        while engine.has_work:
            engine.step()
    assert fake_cupy.nvrtc.compiled == compiled
    assert len(fake_cupy.graphs) == num_graphs
    assert all(graph.num_launches > 1 for graph in fake_cupy.graphs)


def test_nothing_is_compiled_when_a_model_is_loaded_again(fake_cupy: FakeCupy, tmp_path: Path):
    for is_first in (True, False):
        fake_cupy.nvrtc.compiled.clear()
        engine = load(fake_cupy, tmp_path, WIDE, "float16", max_num_seqs=1)
        assert bool(fake_cupy.nvrtc.compiled) == is_first
    engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert len(run_to_end(engine)) == 1


def test_steps_that_run_ahead_write_no_keys(fake_cupy: FakeCupy, tmp_path: Path):
    engine = load(fake_cupy, tmp_path, WIDE, "float16", max_num_seqs=2)
    fake_cupy.finish_streams()
    planes = kv_cache_of(engine).planes
    assert len(planes) == WIDE["num_hidden_layers"]
    assert not any(plane.any() for plane in planes)


def test_the_smallest_steps_are_captured_first():
    streamed = buckets([1, 2, 4], 5000, follows_lengths=False)
    assert streamed == [Bucket(n, ANY_LENGTH) for n in (1, 2, 4)]
    split = buckets([1, 2], 1000, follows_lengths=True)
    assert split == [Bucket(n, length) for n in (1, 2) for length in (256, 512, 1024)]
    many = buckets([1, 2, 4, 8, 16, 24, 32, 48, 64], 1 << 20, follows_lengths=True)
    assert len(many) == 54 > MOST_STEPS
    assert many[:6] == [Bucket(1, n) for n in (256, 512, 1024, 2048, 4096, ANY_LENGTH)]


@pytest.mark.parametrize(
    ("max_num_seqs", "batch_invariant", "num_graphs"),
    [(4, False, 3), (256, False, 21), (4, True, 3), (256, True, 21)],
)
def test_the_plan_counts_the_graphs(
    fake_cupy: FakeCupy, max_num_seqs: int, batch_invariant: bool, num_graphs: int
):
    """Graphs of streamed decodes serve all lengths. At most 64 are kept, and 16 of chunks."""
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=1 << 17)
    size = step_size(config, find_shape("Llama-3.2-1B"), 1 << 17)
    captured, eager = (
        load_cupy_backend("float16", batch_invariant=batch_invariant, enforce_eager=is_eager)
        for is_eager in (False, True)
    )
    more = captured.step_bytes(size) - eager.step_bytes(size)
    of_decodes, of_chunks = 16 * 6 + 6, 16 * 12 + 6
    assert more == (num_graphs * of_decodes + 16 * of_chunks) * LAUNCH_BYTES


def test_doctor_compiles_the_kernels_of_a_model(
    fake_cupy: FakeCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = tiny_models.random_weights(WIDE)
    model = tiny_models.write_model(tmp_path, WIDE | {"max_position_embeddings": 64}, weights)
    monkeypatch.setattr(LLM, "__init__", lambda self, model, backend: load_small(model, backend))
    folder = cubins.open_cache("cubins")
    [first, second] = [compile_for_gpu(str(model), folder) for _ in range(2)]
    num_kernels = len(fake_cupy.nvrtc.compiled)
    assert first == (num_kernels, 0, True)
    assert second == (0, num_kernels, True)


def load_small(model: str, backend: str) -> None:
    settings = EngineConfig(num_blocks=4, block_size=16, max_num_batched_tokens=4, max_num_seqs=1)
    load_engine(Path(model), LoadSettings(engine=settings, backend=backend, dtype="float16"))


def test_a_model_with_recurrent_layers_is_ready(fake_cupy: FakeCupy):
    """The steps that run ahead have states, and change none."""
    config = EngineConfig(num_blocks=40, block_size=16, max_num_batched_tokens=20, max_num_seqs=2)
    wrap = reading_backend(fake_cupy)
    model = Path(__file__).parents[1] / "golden" / "models" / "qwen35_delta"
    settings = LoadSettings(engine=config, backend="cupy", dtype="float16", load_format="dummy")
    engine = load_engine(model, settings, wrap=wrap, use_tqdm=False)
    compiled = list(fake_cupy.nvrtc.compiled)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    with fake_cupy.steady():
        tokens = run_to_end(engine)
    assert [len(each) for each in tokens.values()] == [5]
    assert fake_cupy.nvrtc.compiled == compiled
