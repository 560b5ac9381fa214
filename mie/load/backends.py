"""Choose and load a backend."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mie.base.resources import available_cpus
from mie.config.engine import EngineConfig, EngineSettings
from mie.config.settings import AUTO_BACKENDS, settings_of
from mie.config.settings import BACKENDS as BACKENDS
from mie.errors import ConfigError
from mie.load.opened import OpenedModel
from mie.load.settings import LoadSettings
from mie.ops.backend import Backend
from mie.ops.kv_cache import HALVES
from mie.ranks.backend import RankBackend

SETTINGS: dict[str, tuple[str, ...]] = {
    backend: tuple(
        name for name, _, declared in settings_of(EngineSettings) if backend in declared.backends
    )
    for backend in BACKENDS
}
"""Maps each backend to the settings of `EngineConfig` that not every backend has."""

OF_SLOTS = ("enable_lora", "max_loras", "max_lora_rank")
"""Settings of the slots of adapters. A backend gets them with each matrix."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChosenBackend:
    """The backend of a model, and how it keeps the weights."""

    backend: Backend
    kept_dtype: Any
    """NumPy's dtype of 16 bits that a CPU rounds weights to. None: weights are not rounded."""


def choose_backend(
    opened: OpenedModel, settings: LoadSettings, tell: Callable[[str], object] = str
) -> ChosenBackend:
    """Load the backend that the settings name, for the model. See `load_backend`.

    Without ``num_threads``, ranks have equal shares of the CPUs.
    """
    num_ranks, config = settings.tensor_parallel_size, settings.engine
    if num_ranks > 1:
        check_ranks(settings)
        if settings.backend in ("auto", *AUTO_BACKENDS):
            config = replace(config, num_threads=config.num_threads or threads_of_rank(num_ranks))
    backend = load_backend(
        settings.backend,
        settings.dtype,
        config,
        checkpoint_dtype=opened.config.dtype,
        weights_dtype=opened.widest_dtype,
        tell=tell,
        rank=opened.share.rank if opened.share else 0,
        num_ranks=num_ranks,
    )
    kept = HALVES.get(settings.dtype) if backend.name in AUTO_BACKENDS else None
    if opened.share is not None and opened.whole is not None:
        ranked: Any = RankBackend(backend, opened.share, opened.whole)
        backend = ranked
    return ChosenBackend(backend=backend, kept_dtype=kept)


def threads_of_rank(num_ranks: int) -> int:
    """Return the number of threads of each of so many ranks, by default."""
    return max(1, available_cpus() // num_ranks)


def check_ranks(settings: LoadSettings) -> None:
    """Raise `ConfigError` for settings that several ranks do not have."""
    size, config = settings.tensor_parallel_size, settings.engine
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"tensor_parallel_size is {size}; ranks share memory as Linux does, and this is "
            f"{sys.platform} (leave it out)"
        )
    for name in ("async_scheduling", "enable_lora"):
        if settings.backend in ("cupy", "cupy-emulated") and getattr(config, name):
            raise ConfigError(
                f"{name}=True is not supported with tensor_parallel_size={size} on backend "
                f"{settings.backend!r} (leave it out)"
            )


def load_backend(
    name: str,
    dtype: str = "auto",
    config: EngineConfig | None = None,
    *,
    checkpoint_dtype: str = "float16",
    weights_dtype: str = "float32",
    tell: Callable[[str], object] = str,
    rank: int = 0,
    num_ranks: int = 1,
) -> Backend:
    """Return the backend called ``name`` that computes in ``dtype``.

    "jit" is the CPU with compiled kernels. "numpy" is the CPU with the NumPy operators that define
    the correct results. On these, "bfloat16" and "float16" keep weights and KV cache in 16 bits,
    and compute in float32. "cupy" is an NVIDIA GPU.
    "cupy-emulated" runs the GPU's kernels on the CPU, slowly, to check them. It needs a C++
    compiler instead of CuPy. "auto" is "jit" if it can run and has all settings, else "numpy".

    On a GPU, dtype "auto" follows ``checkpoint_dtype``, the dtype in the model's config.
    ``weights_dtype`` is the widest dtype of the matrices in the files. ``tell`` gets a line for the
    log: the backend's name, with its threads or the reason why "auto" took it. On "cupy", rank r of
    several has GPU r.

    Raises:
        ConfigError: there is no such backend, it cannot run here, it does not compute in ``dtype``,
            or ``config`` has a setting that only other backends have.
    """
    config = config or EngineConfig()
    if name == "auto":
        return _automatic(dtype, config, weights_dtype, tell)
    if name not in SETTINGS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"backend {name!r} is not available; choose from: {known}")
    settings = _settings(name, dtype, config)
    backend: Backend
    line = f"backend {name}"
    if name == "numpy":
        backend = _numpy(dtype, settings)
    elif name == "jit":
        from mie.ops_jit.jit_backend import JitBackend

        backend = JitBackend(dtype, weights_dtype=weights_dtype, **settings)
        line = f"backend jit ({backend.description})"
    else:
        from mie.ops_gpu.load import load_cupy_backend, load_emulated_backend

        if name == "cupy":
            settings |= {"rank": rank, "num_ranks": num_ranks}
            backend = load_cupy_backend(dtype, checkpoint_dtype=checkpoint_dtype, **settings)
        else:
            backend = load_emulated_backend(dtype, **settings)
    tell(line)
    return backend


def _automatic(
    dtype: str, config: EngineConfig, weights_dtype: str, tell: Callable[[str], object]
) -> Backend:
    """Return jit, or numpy if jit cannot run or compute in the dtype."""
    from mie.ops_jit.environment import CannotRun

    why = "jit does not compute in dtype float64"
    if dtype != "float64":
        try:
            return load_backend("jit", dtype, config, weights_dtype=weights_dtype, tell=tell)
        except CannotRun as error:
            remedy = f" ({error.remedy} for the compiled backend)" if error.remedy else ""
            why = f"{error.why}{remedy}"
    backend = _numpy(dtype, _settings("numpy", dtype, config, is_automatic=True))
    tell(f"backend numpy: {why}")
    return backend


def _numpy(dtype: str, settings: dict[str, Any]) -> Backend:
    from mie.ops.numpy_backend import NumpyBackend

    return NumpyBackend(dtype, **settings)


def _settings(
    name: str, dtype: str, config: EngineConfig, *, is_automatic: bool = False
) -> dict[str, Any]:
    """Return the config's values of the backend's own settings.

    A CPU with a dtype of 16 bits keeps weights in this dtype. ``is_automatic`` numpy ignores the
    settings of jit that vLLM's users may give.
    """
    for setting, default, declared in settings_of(EngineSettings):
        is_given = getattr(config, setting) != default
        is_ignored = is_automatic and declared.is_ignorable and "jit" in declared.backends
        if declared.backends and name not in declared.backends and is_given and not is_ignored:
            raise ConfigError(
                f"{setting} is not a setting of the {name} backend; it is one of "
                f"{', '.join(declared.backends)} (leave it out)"
            )
    own = [setting for setting in SETTINGS[name] if setting not in OF_SLOTS]
    values = {setting: getattr(config, setting) for setting in own}
    if name in AUTO_BACKENDS and dtype in HALVES:
        if config.weight_dtype not in ("auto", dtype):
            raise ConfigError(
                f"weight_dtype {config.weight_dtype!r} contradicts dtype {dtype!r} (leave one out)"
            )
        values["weight_dtype"] = dtype
    return values
