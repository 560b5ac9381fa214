"""Plan a model on a backend, or refuse it and name settings that fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from mie.checkpoint.weights import RandomWeights
from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import choose_backend
from mie.load.opened import ROUNDED, OpenedModel, quantised
from mie.load.settings import LoadSettings
from mie.load.sizing import FLOATS, Forms, MemoryPlan, plan_memory
from mie.model.config import ModelConfig
from mie.ops.backend import Backend
from mie.ops.kv_cache import HALVES


def fitting_plan(opened: OpenedModel, backend: Backend, settings: LoadSettings) -> MemoryPlan:
    """Return the plan of an opened model on the backend that the settings choose.

    Raises:
        ConfigError: a setting is beyond the model, or less than one block.
        TooLittleMemoryError: the plan does not fit. The message names settings that fit.
    """
    config, model, forms = settings.engine, opened.config, opened.forms
    plan = plan_memory(config, model, backend, forms)
    if plan.fits:
        return plan
    smaller = smaller_settings(config, model, backend, plan, forms)
    raise plan.refusal([*smaller, *_smaller_dtypes(opened, settings)])


def check_fits(model: ModelConfig) -> None:
    """Refuse a model of floats as loading would with default settings, from its config alone.

    Raises:
        ConfigError: no backend can run here.
        TooLittleMemoryError: the model does not fit.
    """
    opened, settings = OpenedModel(config=model, weights=RandomWeights(model)), LoadSettings()
    fitting_plan(opened, choose_backend(opened, settings).backend, settings)


def smaller_settings(
    config: EngineConfig,
    model: ModelConfig,
    backend: Backend,
    plan: MemoryPlan,
    forms: Forms = FLOATS,
) -> Iterator[str]:
    """Yield the settings that demand too much, each at a value with which the model fits."""
    num_blocks = plan.left_bytes // plan.block_bytes
    if num_blocks > 0 and plan.capacity(num_blocks):
        if config.num_blocks is not None:
            yield f"num_blocks={num_blocks}"
        elif config.kv_cache_memory_bytes is not None:
            yield f"kv_cache_memory_bytes={num_blocks * plan.block_bytes}"
        else:
            yield f"max_model_len={plan.capacity(num_blocks)}"
    if config.state_memory is not None:
        size = plan.left_bytes - plan.num_blocks * plan.block_bytes + config.state_memory
        if size >= plan.state_bytes:
            yield f"state_memory={size}"
    num_tokens = config.max_num_batched_tokens // 2
    while num_tokens and not fits(
        replace(config, max_num_batched_tokens=num_tokens), model, backend, forms
    ):
        num_tokens //= 2
    if num_tokens:
        yield f"max_num_batched_tokens={num_tokens}"


def _smaller_dtypes(opened: OpenedModel, settings: LoadSettings) -> Iterator[str]:
    """Yield the data types and forms with which the model fits."""
    model = opened.config
    half = model.dtype if model.dtype in HALVES else "float16"
    dtypes = (("kv_cache_dtype", "int8"), ("weight_dtype", model.dtype), ("dtype", half))
    forms = [("quantization", name) for name in ROUNDED if not opened.forms]
    for name, value in (*dtypes, *forms):
        with suppress(ConfigError):  # the backend does not have it
            changed, other = settings.with_setting(name, value), opened
            if name == "quantization":
                other = replace(opened, weights=quantised(opened.weights, model, value, "auto"))
            backend = choose_backend(other, changed).backend
            if fits(changed.engine, model, backend, other.forms):
                yield f"{name}={value}"


def fits(config: EngineConfig, model: ModelConfig, backend: Backend, forms: Forms = FLOATS) -> bool:
    """Whether a plan with these settings is possible and fits."""
    try:
        return plan_memory(config, model, backend, forms).fits
    except ConfigError:  # a block of that backend may be larger than the requested bytes
        return False
