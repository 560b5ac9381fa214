"""Load the part of an engine that a backend computes with: weights, caches, and compiled code."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mie.checkpoint.weights import check_tied_head
from mie.config.engine import EngineConfig
from mie.load.backends import ChosenBackend
from mie.load.opened import OpenedModel
from mie.load.sizing import MemoryPlan, cache_shape, step_size
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.layers.adapters import AdapterSlots
from mie.ops.backend import Array, Backend

Count = Callable[[int], object]
"""Counts the work that was done since the last call."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DevicePart:
    """A decoder, its caches, and the function of a step."""

    decoder: Decoder
    kv_cache: Array
    host_cache: Array
    states: Array
    forward: Callable[..., Array]
    """`Decoder.forward` with the caches."""


def load_device_part(
    opened: OpenedModel,
    chosen: ChosenBackend,
    plan: MemoryPlan,
    *,
    use_tqdm: bool = False,
    adapters: AdapterSlots | None = None,
) -> DevicePart:
    """Load the weights, and allocate the caches."""
    backend, model = chosen.backend, opened.config
    decoder = _load_decoder(opened, chosen, plan, use_tqdm, adapters)
    kv_cache, host_cache = _new_caches(plan, model, backend)
    states = _new_states(plan, model, backend)
    return DevicePart(
        decoder=decoder,
        kv_cache=kv_cache,
        host_cache=host_cache,
        states=states,
        forward=partial(decoder.forward, kv_cache=kv_cache, states=states),
    )


def new_slots(opened: OpenedModel, backend: Backend, config: EngineConfig) -> AdapterSlots | None:
    """Return empty slots of adapters, or None if the settings have none."""
    if not config.enable_lora:
        return None
    sizes = config.max_loras, config.max_lora_rank
    return AdapterSlots(backend.adapters, opened.config, *sizes)


def prepare(part: DevicePart, plan: MemoryPlan, model: ModelConfig, *, use_tqdm: bool) -> None:
    """Compile the code of steps."""
    part.decoder.backend.prepare(
        lambda number: _progress_bar(
            use_tqdm, total=number, desc="compiling kernels", unit="kernel"
        ),
        part.forward,
        step_size(plan.config, model, plan.num_positions, plan.layout.num_groups),
    )


def _load_decoder(
    opened: OpenedModel,
    chosen: ChosenBackend,
    plan: MemoryPlan,
    use_tqdm: bool,
    adapters: AdapterSlots | None,
) -> Decoder:
    with opened.weights as weights:
        if opened.config.tie_word_embeddings:
            check_tied_head(weights)
        bar = _progress_bar(
            use_tqdm,
            total=weights.nbytes,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            delay=0.5,
        )
        with bar as progress:
            return Decoder(
                opened.config,
                chosen.backend,
                weights,
                plan.num_positions,
                progress,
                chosen.kept_dtype,
                plan.layout,
                adapters,
            )


def _new_caches(plan: MemoryPlan, model: ModelConfig, backend: Backend) -> tuple[Array, Array]:
    """Allocate the KV cache, and the host's if the plan has one."""
    shape = cache_shape(model, plan.num_blocks, plan.config.block_size, plan.layout)
    host_shape = replace(shape, num_blocks=plan.num_host_blocks)
    host_cache = backend.new_host_cache(host_shape) if plan.num_host_blocks else None
    return backend.new_kv_cache(shape), host_cache


def _new_states(plan: MemoryPlan, model: ModelConfig, backend: Backend) -> Array:
    """Allocate the states of recurrent layers, or return None if there are none."""
    if model.recurrent is None:
        return None
    num_layers = model.layers_recurrent.count(True)
    return backend.recurrent.new_state_cache(model.recurrent.shape, num_layers, plan.num_states)


@contextmanager
def _progress_bar(is_wanted: bool, **options: Any) -> Iterator[Count]:
    """Show a bar with options of tqdm on a terminal, and take it away at the end.

    Do nothing elsewhere.
    """
    if not is_wanted or not sys.stderr.isatty():
        yield lambda num_new: None
        return
    from tqdm import tqdm

    with tqdm(**options, leave=False) as bar:
        yield bar.update
