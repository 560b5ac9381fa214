"""Refuse a model that does not fit this machine's memory, and name settings that fit."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.load.quantisation import ROUNDED, rounded_forms
from mie.load.sizing import Forms, MemoryPlan, fits, plan_memory, smaller_settings
from mie.model.config import ModelConfig
from mie.ops.backend import Backend
from mie.ops.kv_cache import HALVES

Load = Callable[[str, str, EngineConfig], Backend]
"""Loads a backend by its name and dtype."""


def check_fits(model: ModelConfig) -> None:
    """Refuse a model of floats as `load_engine` would with default settings, from its config alone.

    Raises:
        ConfigError: no backend can run here.
        TooLittleMemoryError: the model does not fit.
    """
    config = EngineConfig()
    load = partial(load_backend, checkpoint_dtype=model.dtype, weights_dtype=model.dtype)
    machine = load("auto", "auto", config)
    fitting_plan(load, machine, machine.name, "auto", config, model, {})


def fitting_plan(
    load: Load,
    machine: Backend,
    backend: str,
    dtype: str,
    config: EngineConfig,
    model: ModelConfig,
    forms: Forms,
) -> MemoryPlan:
    """Return the plan of the model's memory on ``machine``, which is of the kind ``backend``.

    Raises:
        TooLittleMemoryError: the plan does not fit.
    """
    plan = plan_memory(config, model, machine, forms)
    if plan.fits:
        return plan
    smaller = smaller_settings(config, model, machine, plan, forms)
    of_dtypes = _smaller_dtypes(load, machine, backend, dtype, config, model, forms)
    raise plan.refusal([*smaller, *of_dtypes])


def _smaller_dtypes(
    load: Load,
    machine: Backend,
    backend: str,
    dtype: str,
    config: EngineConfig,
    model: ModelConfig,
    forms: Forms,
) -> Iterator[str]:
    """Yield the data types and forms with which the model fits, if the backend supports them."""
    half = model.dtype if model.dtype in HALVES else "float16"
    for changes, changed_dtype in (
        ({"kv_cache_dtype": "int8"}, dtype),
        ({"weight_dtype": model.dtype}, dtype),
        ({}, half),
    ):
        with suppress(ConfigError):
            changed = replace(config, **changes)  # type: ignore[arg-type]  # these are words
            smaller = load(backend, changed_dtype, changed)
            if fits(changed, model, smaller, forms):
                text = ", ".join(f"{name}={value}" for name, value in changes.items())
                yield text or f"dtype={half}"
    for quantization in ROUNDED if not forms else ():
        if fits(config, model, machine, rounded_forms(model, quantization)):
            yield f"quantization={quantization}"
