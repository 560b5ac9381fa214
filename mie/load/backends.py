"""Choose and load a backend."""

from dataclasses import dataclass, replace
from typing import Any

from mie.config.engine import EngineConfig, EngineSettings
from mie.config.settings import BACKENDS as BACKENDS
from mie.config.settings import settings_of
from mie.errors import ConfigError
from mie.ops.backend import Backend
from mie.ops.kv_cache import HALVES

SETTINGS: dict[str, tuple[str, ...]] = {
    backend: tuple(
        name for name, _, declared in settings_of(EngineSettings) if backend in declared.backends
    )
    for backend in BACKENDS
}
"""Maps each backend to the settings of `EngineConfig` that not every backend has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A loaded backend, and why it is this one."""

    backend: Backend
    line: str
    """The text for a log: the backend's name, with its compiler or the reason of "auto"."""


def load_backend(
    name: str,
    dtype: str = "auto",
    config: EngineConfig | None = None,
    *,
    checkpoint_dtype: str = "float16",
    weights_dtype: str = "float32",
) -> Backend:
    """Return the backend called ``name``, which computes in ``dtype``.

    "jit" is the CPU with compiled kernels. "numpy" is the CPU with NumPy. "numpy-plain" is the CPU
    with the plain operators that define the correct results. On these, "bfloat16" and "float16"
    keep weights and KV cache in 16 bits, and compute in float32. "cupy" is an NVIDIA GPU.
    "cupy-emulated" runs the GPU's kernels on the CPU, slowly, to check them. It needs a C++
    compiler instead of CuPy. "auto" is "jit" if it can run and has all settings, else "numpy".

    On a GPU, dtype "auto" follows ``checkpoint_dtype``, the one that the model's config names.
    ``weights_dtype`` is the widest dtype of the matrices in the files.

    Raises:
        ConfigError: there is no such backend, it cannot run here, it does not compute in ``dtype``,
            or ``config`` has a setting that only other backends have.
    """
    types = {"checkpoint_dtype": checkpoint_dtype, "weights_dtype": weights_dtype}
    return choose_backend(name, dtype, config, **types).backend


def choose_backend(
    name: str,
    dtype: str = "auto",
    config: EngineConfig | None = None,
    *,
    checkpoint_dtype: str = "float16",
    weights_dtype: str = "float32",
) -> Choice:
    """Return the backend of `load_backend`, and a line about the choice.

    Raises:
        ConfigError: as `load_backend` says.
    """
    config = config or EngineConfig()
    if name == "auto":
        return _automatic(dtype, config, weights_dtype)
    if name not in SETTINGS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"backend {name!r} is not available; choose from: {known}")
    if name in ("jit", "numpy") and dtype in HALVES:
        config = _keeping(dtype, config)
    settings = _settings(name, config)
    if name == "numpy":
        from mie.ops_cpu.cpu_backend import CpuBackend

        return Choice(backend=CpuBackend(dtype, **settings), line="backend numpy")
    if name == "jit":
        from mie.ops_jit.jit_backend import JitBackend

        jit = JitBackend(dtype, weights_dtype=weights_dtype, **settings)
        return Choice(backend=jit, line=f"backend jit ({jit.description})")
    if name == "numpy-plain":
        from mie.ops.numpy_backend import NumpyBackend

        return Choice(backend=NumpyBackend(dtype, **settings), line="backend numpy-plain")
    from mie.ops_gpu.load import load_cupy_backend, load_emulated_backend

    backend: Backend
    if name == "cupy":
        backend = load_cupy_backend(dtype, checkpoint_dtype=checkpoint_dtype, **settings)
    else:
        backend = load_emulated_backend(dtype, **settings)
    return Choice(backend=backend, line=f"backend {name}")


def _automatic(dtype: str, config: EngineConfig, weights_dtype: str) -> Choice:
    """Return jit, or numpy if jit cannot run or lacks a setting."""
    from mie.ops_jit.environment import CannotRun

    why = _only_of_numpy(dtype, config)
    if not why:
        try:
            return choose_backend("jit", dtype, config, weights_dtype=weights_dtype)
        except CannotRun as error:
            remedy = f" ({error.remedy} for the compiled backend)" if error.remedy else ""
            why = f"{error.why}{remedy}"
    choice = choose_backend("numpy", dtype, _without_effect(config))
    return replace(choice, line=f"{choice.line}: {why}")


def _only_of_numpy(dtype: str, config: EngineConfig) -> str:
    """Return which setting or dtype numpy has and jit does not, or an empty text."""
    if dtype == "float64":
        return "jit does not compute in dtype float64"
    for setting, default, declared in settings_of(EngineSettings):
        value, own = getattr(config, setting), declared.backends
        if "numpy" in own and "jit" not in own and value != default:
            return f"jit has no setting {setting}, which is {value!r}"
    return ""


def _without_effect(config: EngineConfig) -> EngineConfig:
    """Return the config without settings that jit has, numpy lacks, and vLLM's users may give."""
    ignored = {
        setting: default
        for setting, default, declared in settings_of(EngineSettings)
        if declared.is_ignorable and "jit" in declared.backends and "numpy" not in declared.backends
    }
    return replace(config, **ignored)


def _keeping(dtype: str, config: EngineConfig) -> EngineConfig:
    """Return the config of a CPU backend that keeps its matrices in a dtype of 16 bits."""
    if config.weight_dtype not in ("auto", dtype):
        raise ConfigError(
            f"weight_dtype {config.weight_dtype!r} contradicts dtype {dtype!r} (leave one out)"
        )
    return replace(config, weight_dtype=dtype)


def _settings(name: str, config: EngineConfig) -> dict[str, Any]:
    """Return the config's values of the backend's own settings."""
    for setting, default, declared in settings_of(EngineSettings):
        is_given = getattr(config, setting) != default
        if declared.backends and name not in declared.backends and is_given:
            raise ConfigError(
                f"{setting} is not a setting of the {name} backend; it is one of "
                f"{', '.join(declared.backends)} (leave it out)"
            )
    return {setting: getattr(config, setting) for setting in SETTINGS[name]}
