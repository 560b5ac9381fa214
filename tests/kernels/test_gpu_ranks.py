"""Run an engine of two ranks on stand-ins for GPUs: of the emulator, and of CuPy with NCCL.

The ranks are threads. Each has a module of its own in place of CuPy.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from audit import captured_steps
from emulated import needs_compiler
from engines import run_to_end
from fake_cublas import FakeCublas
from fake_cupy import FakeCupy
from rank_threads import RankThreads, ranks_as_threads
from tiny_hybrids import HYBRIDS, TinyHybrid
from tiny_models import CONFIGS, QWEN2, random_weights, write_model

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.errors import ConfigError, WorkerError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops_gpu.host import nccl as stand_in

pytestmark = needs_compiler
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.3, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)


@pytest.fixture
def ranks() -> Iterator[list[RankThreads]]:
    with ranks_as_threads() as made:
        yield made


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> list[FakeCupy]:
    """The modules of all ranks, by the order in which they import CuPy."""
    own, made = threading.local(), []

    def import_cupy() -> FakeCupy:
        if not hasattr(own, "cupy"):
            own.cupy = FakeCupy()
            made.append(own.cupy)
        return own.cupy

    folder = tmp_path_factory.mktemp("cubins")
    compile_apart = lambda path, *work: FakeCupy().nvrtc.compile(*work)  # noqa: E731
    for name, value in {
        "launcher.import_cupy": import_cupy,
        "load.import_cupy": import_cupy,
        "launcher.nvrtc_of_cupy": lambda module: module.nvrtc,
        "cubins.compile_apart": compile_apart,
        "cubins.open_cache": lambda name: folder,
        "cublas.load_library": FakeCublas,
    }.items():
        monkeypatch.setattr(f"mie.ops_gpu.{name}", value)
    return made


def engine_of(folder: Any, backend: str, num_ranks: int, **more: Any) -> Engine:
    """Return an engine with the model in a folder, which is made if there is none."""
    directory = folder / "model"
    if not directory.exists():
        write_model(directory, QWEN2, random_weights(QWEN2))
    sizes = {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    settings = LoadSettings(
        engine=EngineConfig(**{**sizes, **more}),
        backend=backend,
        dtype="float32",
        tensor_parallel_size=num_ranks,
    )
    return load_engine(directory, settings)


def ask(engine: Engine) -> list[Any]:
    prompts = ([*range(5, 30)], GREEDY), ([7, 8, 9], DRAWN)
    return [engine.add_request(prompt, params) for prompt, params in prompts]


def tokens(requests: list[Any]) -> list[list[int]]:
    return [list(each.sequences[0].output_ids) for each in requests]


def answers(engine: Engine) -> list[list[int]]:
    requests = ask(engine)
    run_to_end(engine)
    return tokens(requests)


@pytest.mark.slow
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.usefixtures("ranks")
def test_two_gpus_give_the_tokens_of_one(gpus: list[FakeCupy], tmp_path: Any, enforce_eager: bool):
    expected = answers(engine_of(tmp_path, "cupy-emulated", 1, enforce_eager=True))
    engine = engine_of(tmp_path, "cupy", 2, enforce_eager=enforce_eager)
    assert answers(engine) == answers(engine) == expected
    assert len(gpus) == 2
    for cupy in gpus:
        names = [[launch.name for launch in graph.launches] for graph in cupy.graphs]
        assert bool(names) != enforce_eager
        assert all(each.count("allGather") == 4 * 2 + 2 for each in names), "two layers"
        assert all(graph.num_launches for graph in cupy.graphs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo3", "gpt_oss", "qwen35"])
@pytest.mark.usefixtures("ranks")
def test_the_emulated_gpu_divides_every_kind_of_layer(tmp_path: Any, name: str):
    if name in HYBRIDS:
        TinyHybrid(tmp_path / "model", HYBRIDS[name])
    else:
        write_model(tmp_path / "model", CONFIGS[name], random_weights(CONFIGS[name]))
    given = [answers(engine_of(tmp_path, "cupy-emulated", num_ranks)) for num_ranks in (1, 2)]
    assert given[0] == given[1]


@pytest.mark.parametrize(
    "number", [33, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 150))]
)
def test_a_step_of_gpus_that_is_interrupted_is_repeated(
    ranks: list[RankThreads], tmp_path: Any, number: int, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 is interrupted at one of its gathers. The ranks join again, and capture again."""
    engine = engine_of(tmp_path, "cupy-emulated", 2)
    expected = answers(engine)
    received, calls = stand_in.received, iter(range(number))

    def interrupted(*args: Any) -> bytes:
        if threading.current_thread() is threading.main_thread() and next(calls, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return received(*args)

    monkeypatch.setattr(stand_in, "received", interrupted)
    again = ask(engine)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(engine)
    backend: Any = ranks[0].backend
    before = [*captured_steps(backend.inner).values()]
    assert before
    run_to_end(engine)
    assert tokens(again) == expected
    after = captured_steps(backend.inner).values()
    assert not any(each is other for each in before for other in after), "graphs are forgotten"
    assert answers(engine) == expected


@pytest.mark.slow
def test_a_failed_rank_of_a_gpu_ends_the_engine(ranks: list[RankThreads], tmp_path: Any):
    engine = engine_of(tmp_path, "cupy-emulated", 2)
    requests = ask(engine)
    for _ in range(4):
        engine.step()
    kept = tokens(requests)
    ranks[0].error = MemoryError("for a test")
    with pytest.raises(WorkerError, match="a rank has ended: for a test"):
        engine.step()
    assert tokens(requests) == kept
    assert any(kept)


def test_more_ranks_than_gpus_are_refused(gpus: list[FakeCupy], tmp_path: Any):
    config = QWEN2 | {"num_attention_heads": 4}
    write_model(tmp_path / "model", config, random_weights(config))
    with pytest.raises(ConfigError, match="is 4; each rank needs a GPU, and CuPy finds 2"):
        engine_of(tmp_path, "cupy", 4)
    assert len(gpus) == 1
