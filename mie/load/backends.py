"""Load the backend that a name chooses."""

from dataclasses import replace
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


def load_backend(
    name: str,
    dtype: str = "auto",
    config: EngineConfig | None = None,
    *,
    checkpoint_dtype: str = "float16",
) -> Backend:
    """Return the backend called ``name``, which computes in ``dtype``.

    "numpy" is the CPU. "numpy-plain" is the CPU with the plain operators that define the correct
    results. On both, "bfloat16" and "float16" keep weights and KV cache in 16 bits, and compute in
    float32. "cupy" is an NVIDIA GPU. "cupy-emulated" runs the GPU's kernels on the CPU, slowly, to
    check them. It needs a C++ compiler instead of CuPy. On a GPU, dtype "auto" follows
    ``checkpoint_dtype``, the one that the model's config names.

    Raises:
        ConfigError: there is no such backend, it does not compute in ``dtype``, or ``config`` has a
            setting that only other backends have.
    """
    if name not in SETTINGS:
        raise ConfigError(f"backend {name!r} is not available; choose from: {', '.join(BACKENDS)}")
    config = config or EngineConfig()
    if name in ("jit", "numpy") and dtype in HALVES:
        config = _keeping(dtype, config)
    settings = _settings(name, config)
    if name == "numpy":
        from mie.ops_cpu.cpu_backend import CpuBackend

        return CpuBackend(dtype, **settings)
    if name == "jit":
        from mie.ops_jit.jit_backend import JitBackend

        return JitBackend(dtype, **settings)
    if name == "numpy-plain":
        from mie.ops.numpy_backend import NumpyBackend

        return NumpyBackend(dtype, **settings)
    from mie.ops_gpu.load import load_cupy_backend, load_emulated_backend

    if name == "cupy":
        return load_cupy_backend(dtype, checkpoint_dtype=checkpoint_dtype, **settings)
    return load_emulated_backend(dtype, **settings)


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
