"""The flag that chooses the machine."""

from typing import Any

from mie.config import EngineConfig
from mie.errors import ConfigError
from mie.ops.backend import Backend

SETTINGS: dict[str, tuple[str, ...]] = {
    "numpy": ("batch_invariant", "num_threads", "kv_cache_dtype", "linear_plan", "weight_dtype"),
    "numpy-plain": ("kv_cache_dtype",),
    "cupy": ("batch_invariant", "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype"),
    "cupy-emulated": ("batch_invariant", "enforce_eager", "kv_cache_dtype"),
}
"""The backends, and the settings of `EngineConfig` that are theirs."""

BACKENDS = tuple(SETTINGS)


def load_backend(name: str, dtype: str = "auto", config: EngineConfig | None = None) -> Backend:
    """The backend called ``name``, computing in ``dtype``.

    "numpy" is the CPU; "numpy-plain" the CPU by the plain operators that define what is right;
    "cupy" an NVIDIA GPU; "cupy-emulated" runs the GPU's kernels on the CPU, slowly, to check them,
    and needs a C++ compiler instead of CuPy.

    Raises:
        ConfigError: there is no such backend, it does not compute in ``dtype``, or ``config`` has a
            setting that only other backends have.
    """
    if name not in SETTINGS:
        raise ConfigError(f"backend {name!r} is not available; choose from: {', '.join(BACKENDS)}")
    settings = _settings(name, config or EngineConfig())
    if name == "numpy":
        from mie.ops_cpu.cpu_backend import CpuBackend

        return CpuBackend(dtype, **settings)
    if name == "numpy-plain":
        from mie.ops.numpy_backend import NumpyBackend

        return NumpyBackend(dtype, **settings)
    from mie.ops_gpu.cupy_backend import load_cupy_backend, load_emulated_backend

    load = load_cupy_backend if name == "cupy" else load_emulated_backend
    return load(dtype, **settings)


def _settings(name: str, config: EngineConfig) -> dict[str, Any]:
    """What the config says of the backend's own settings."""
    default = EngineConfig()
    for setting in sorted({each for own in SETTINGS.values() for each in own}):
        has_it = setting in SETTINGS[name]
        if not has_it and getattr(config, setting) != getattr(default, setting):
            others = [other for other, own in SETTINGS.items() if setting in own]
            raise ConfigError(
                f"{setting} is not a setting of the {name} backend; it is one of "
                f"{', '.join(others)} (leave it out)"
            )
    return {setting: getattr(config, setting) for setting in SETTINGS[name]}
