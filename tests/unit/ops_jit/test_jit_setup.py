"""Test where backend jit can run, the choice of "auto", and the settings and sizes."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_models
from command_line import python
from tiny_hybrids import HYBRIDS, TinyHybrid
from tiny_models import TINY, TinyModel

from mie.checkpoint.config import load_model_config
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.load.sizing import step_size
from mie.ops.backend import StepBatch
from mie.ops_jit import environment
from mie.ops_jit.compiler import Cpu, host_cpu
from mie.ops_jit.environment import CannotRun, check_cpu, jit_facts
from mie.ops_jit.jit_backend import JitBackend

LINUX = "unknown-linux-gnu"
HASWELL = Cpu(f"x86_64-{LINUX}", "haswell", "+avx,+avx2,+f16c,+fma,-avx512f")
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(scope="module")
def jit() -> JitBackend:
    return JitBackend(num_threads=1)


# Where it can run.


@pytest.mark.parametrize(
    ("cpu", "why"),
    [
        (
            HASWELL._replace(name="nehalem", features="+sse4.2"),
            r"this CPU \(nehalem\) lacks AVX2, F16C, FMA",
        ),
        (HASWELL._replace(features="+avx2,+fma"), r"this CPU \(haswell\) lacks F16C"),
        (HASWELL._replace(features="+avx2,+f16c,+fma4"), r"this CPU \(haswell\) lacks FMA"),
        (Cpu(f"riscv64-{LINUX}", "u74", ""), "needs x86-64 or aarch64; this machine is riscv64"),
        (Cpu(f"i686-{LINUX}", "haswell", "+avx2,+f16c,+fma"), "this machine is i686"),
        (Cpu("aarch64-apple-os", "apple-m1", ""), "needs Linux; this system is aarch64-apple-os"),
    ],
)
def test_a_cpu_that_cannot_is_refused_with_the_reason(cpu: Cpu, why: str):
    check_cpu(HASWELL)
    check_cpu(Cpu(f"aarch64-{LINUX}", "cortex-a78", "+neon"))
    with pytest.raises(CannotRun, match=rf"jit cannot run here: .*{why} \(use backend numpy\)$"):
        check_cpu(cpu)


def test_an_older_cpu_can_be_named(monkeypatch: pytest.MonkeyPatch):
    """Kernels for it can be compiled, and have no instructions of AVX-512."""
    own = host_cpu()
    monkeypatch.setenv("MIE_CPU", "haswell")
    named = host_cpu()
    assert (named.triple, named.name) == (own.triple, "haswell")
    assert "avx512" not in named.features
    check_cpu(named)


def test_a_missing_numba_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    message = "Numba is not installed (pip install numba, or use backend numpy)"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_backend("jit")
    lines: list[str] = []
    assert load_backend("auto", tell=lines.append).name == "numpy"
    assert lines == [
        "backend numpy: Numba is not installed (pip install numba for the compiled backend)"
    ]
    facts = jit_facts()
    assert (facts["numba"], facts["why"]) == (None, "Numba is not installed")


def fake_numba(folder: Path, version: str, code: str = "") -> Path:
    """Write a package that states a version, and runs code when it is imported."""
    (folder / "numba").mkdir()
    (folder / "numba/__init__.py").write_text(code)
    (folder / "numba/_version.py").write_text(f'x = """\n {{\n "version": "{version}"\n}}\n"""')
    return folder


BROKEN = 'raise ImportError("Numba needs Python 3.13 or less.\\nGot Python 3.14.")'
CHOOSE = """
from mie.errors import ConfigError
from mie.load.backends import load_backend
try:
    load_backend("jit")
except ConfigError as error:
    print(error)
load_backend("auto", tell=print)
"""


def test_a_numba_that_cannot_be_imported_is_refused_in_one_line(tmp_path, monkeypatch):
    """Its version says nothing. Only compiling shows it, so nothing may be in the cache."""
    monkeypatch.setenv("PYTHONPATH", str(fake_numba(tmp_path, "0.99.0", BROKEN)))
    done = python("-W", "error", "-c", CHOOSE)
    why = (
        "Numba 0.99.0 cannot compile its kernels: ImportError: Numba needs Python 3.13 or less. "
        "Got Python 3.14."
    )
    assert done.stdout.splitlines() == [
        f"backend jit cannot run here: {why} (pip install --upgrade numba, or use backend numpy)",
        f"backend numpy: {why} (pip install --upgrade numba for the compiled backend)",
    ]


# The choice of "auto".


@pytest.mark.parametrize(
    ("dtype", "settings", "why"), [("float64", {}, "jit does not compute in dtype float64")]
)
def test_auto_takes_numpy_for_what_only_numpy_has(dtype: str, settings: Any, why: str):
    config = EngineConfig(enforce_eager=True, **settings)
    lines: list[str] = []
    assert load_backend("auto", dtype, config, tell=lines.append).name == "numpy"
    assert lines == [f"backend numpy: {why}"]


def test_jit_refuses_what_only_numpy_has():
    with pytest.raises(ConfigError, match="'float64' is not supported by the jit backend; choose"):
        load_backend("jit", "float64")


def test_a_wrong_setting_does_not_make_auto_choose_numpy():
    with pytest.raises(ConfigError, match="gpu_memory_utilization is not a setting of the jit"):
        load_backend("auto", config=EngineConfig(gpu_memory_utilization=0.5))
    with pytest.raises(ConfigError, match="dtype 'float8' is not supported by the jit backend"):
        load_backend("auto", "float8")


# Weights.


def blocks(dtype: Any, shape: tuple[int, int] = (70, 9)) -> list[np.ndarray]:
    whole = np.random.default_rng(0).normal(size=shape).astype(dtype)
    return [whole[:33], whole[33:]]


@pytest.mark.parametrize("backend", ["jit", "numpy"])
@pytest.mark.parametrize(
    ("weight_dtype", "other"), [("float16", "bfloat16"), ("bfloat16", "float32")]
)
def test_weights_of_another_dtype_are_refused_alike(backend: str, weight_dtype: str, other: str):
    machine = load_backend(backend, config=EngineConfig(weight_dtype=weight_dtype))
    message = (
        f"weight_dtype is '{weight_dtype}'; the checkpoint has weights in {other}, and they are "
        "kept as they are or widened (use 'auto')"
    )
    for load in (machine.load_linear, machine.load_embedding):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load((70, 9), blocks(HALVES.get(other, np.float32)))


def logits_of(engine: Engine, prompt: list[int]) -> bytes:
    """Return the bytes of the logits of every step."""
    backend: Any = engine.runner.backend  # type: ignore[attr-defined]
    seen, run_step = [], backend.run_step

    def observed(forward: Any, batch: StepBatch) -> Any:
        logits = run_step(forward, batch)
        seen.append(logits.tobytes())
        return logits

    backend.run_step = observed
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return b"".join(seen)


# Memory.


SHAPES: dict[str, dict[str, Any]] = {
    **TINY,
    "odd": tiny_models.LLAMA | {"intermediate_size": 40, "head_dim": 24},
    "narrow": tiny_models.LLAMA | {"hidden_size": 16, "head_dim": 64, "intermediate_size": 16},
}


@pytest.mark.parametrize(
    ("name", "activations"),
    [*((name, "float32") for name in (*SHAPES, *HYBRIDS)), ("llama", "int8"), ("odd", "int8")],
)
def test_a_step_takes_at_most_what_was_planned(name: str, activations: str, tmp_path: Path):
    model: Any = None
    if name in HYBRIDS:
        model = TinyHybrid(tmp_path / name, HYBRIDS[name])
    else:
        model = TinyModel(tmp_path / name, SHAPES[name])
    config = EngineConfig(
        num_blocks=64, num_threads=1, max_num_batched_tokens=256, activations=activations
    )
    quantization = "int4" if activations == "int8" else None
    settings = LoadSettings(engine=config, backend="jit", quantization=quantization)
    engine = load_engine(model.directory, settings)
    backend: Any = engine.runner.backend  # type: ignore[attr-defined]
    engine.add_request([1] * 200, SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    [_, (program, _)] = backend.recorder.recorded
    size = step_size(config, load_model_config(model.directory), 256)
    planned = backend.step_bytes(replace(size, num_tokens=200, num_seqs=1))
    taken = program.nbytes + backend.recorder.team.scratch_bytes
    assert 0.5 * planned < taken <= planned


# Compilation.


@contextmanager
def no_bar(number: int) -> Iterator[Callable[[int], object]]:
    raise AssertionError(f"{number} kernels were compiled")
    yield print


@pytest.mark.parametrize(
    ("name", "dtype", "kv_cache_dtype"),
    [
        *((name, "auto", "auto") for name in TINY),
        ("llama", "bfloat16", "int8"),
        pytest.param("llama", "float16", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3_tied", "float16", "fp8", marks=pytest.mark.slow),
    ],
)
def test_the_first_step_compiles_nothing(tiny: Any, name: str, dtype: str, kv_cache_dtype: str):
    config = EngineConfig(num_blocks=64, num_threads=1, kv_cache_dtype=kv_cache_dtype)
    engine = load_engine(
        tiny[name].directory, LoadSettings(engine=config, backend="jit", dtype=dtype)
    )
    backend: Any = engine.runner.backend  # type: ignore[attr-defined]
    present = set(backend.recorder.kernels._addresses)
    logits_of(engine, [1, 2, 3])
    backend.recorder.enforce_eager = True
    logits_of(engine, [1, 2, 3, 4])
    assert set(backend.recorder.kernels._addresses) == present
    backend.prepare(no_bar, logits_of, None)
