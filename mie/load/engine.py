"""Assemble an engine from a model directory.

This is the one place that wires the parts together.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from mie.base.arithmetic import ceil_div
from mie.base.logs import PreemptionWarnings
from mie.base.resources import available_bytes
from mie.checkpoint.config import load_model_config
from mie.checkpoint.weights import Checkpoint, RandomWeights, check_tied_head, expected_tensors
from mie.config.engine import EngineConfig
from mie.engine.constraint import Constraints
from mie.engine.engine import Engine, Runner
from mie.engine.overlap import OverlappingRunner
from mie.engine.runner import ModelRunner
from mie.errors import ConfigError
from mie.events import EventLog
from mie.load.backends import load_backend
from mie.load.fit import fitting_plan
from mie.load.quantisation import quantised
from mie.load.sizing import MemoryPlan, cache_shape, step_size
from mie.memory.layers.states import States
from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.memory.part import Part
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops.backend import Array, Backend
from mie.ops.kv_cache import HALVES
from mie.sched.scheduler import Scheduler

Count = Callable[[int], object]
"""Counts the work that was done since the last call."""

CPUS = ("jit", "numpy")
"""The backends that compute in float32 with weights and a cache of 16 bits."""


MOST_ANSWER_BYTES = 256 << 20
"""Maximum memory for the log-probabilities of answers, and at most an eighth of the rest.

A server's ``max_answer_bytes`` sets another one.
"""


def answer_bytes(plan: MemoryPlan) -> int:
    """Return the bytes that a plan leaves to the log-probabilities of all answers together."""
    left = available_bytes()
    if plan.memory.is_shared:
        left = plan.left_bytes - plan.num_blocks * plan.block_bytes
    return max(0, min(MOST_ANSWER_BYTES, left // 8))


def load_engine(
    directory: Path,
    config: EngineConfig | None = None,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    trace: TextIO | None = None,
    wrap: Callable[[Backend], Backend] | None = None,
    model: ModelConfig | None = None,
    load_format: str = "auto",
    use_tqdm: bool = True,
    constraints: Constraints | None = None,
    quantization: str | None = None,
    head_dtype: str = "auto",
) -> Engine:
    """Load an engine for token ids with the model in ``directory``.

    ``trace`` gets the event log as JSON lines. ``wrap`` can put another backend around the one that
    is loaded. ``model`` replaces the contents of config.json. A ``load_format`` of "dummy"
    generates random weights from the config's seed. ``use_tqdm`` shows a progress bar on a
    terminal. ``constraints`` serve requests with structured outputs. ``quantization`` and
    ``head_dtype`` are those of `mie.load.quantisation.quantised`.

    Raises:
        ConfigError: a setting is out of range for the model or the machine.
        ModelError: the directory cannot be used; nothing stays loaded.
    """
    began = time.perf_counter()
    config = config or EngineConfig()
    model = model or load_model_config(directory)
    weights = opened(directory, model, load_format, config.seed, quantization, head_dtype)
    load = partial(load_backend, checkpoint_dtype=model.dtype, weights_dtype=widest(weights))
    logger = logging.getLogger(__name__)
    machine = load(backend, dtype, config, tell=logger.info)
    backend = machine.name
    if wrap is not None:
        machine = wrap(machine)
    if model.recurrent is not None:
        config = with_states(config)
    elif config.async_scheduling is None:
        config = replace(config, async_scheduling=machine.is_asynchronous)
    plan = fitting_plan(load, machine, backend, dtype, config, model, weights.forms)
    config = with_seats(config, plan.num_states)
    kept = HALVES.get(dtype) if backend in CPUS else None
    num_positions, num_host_blocks = plan.num_positions, plan.num_host_blocks
    log = EventLog(config.event_log_steps, trace, machine.numerics())
    with plan.guarded():
        scheduler = new_scheduler(
            config,
            plan.num_blocks,
            plan.max_model_len,
            log,
            num_host_blocks,
            (plan.num_states, plan.num_host_states),
            plan.window,
        )
        decoder = _load_decoder(weights, model, machine, plan, use_tqdm, kept)
        kv_cache, host_cache = _new_caches(plan, model, machine)
        states = _new_states(plan, model, machine)
        model_runner = ModelRunner(
            decoder,
            kv_cache,
            host_cache,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=ceil_div(num_positions, config.block_size),
            constraints=constraints,
            max_forced_run=config.max_forced_run,
            states=states,
            num_groups=plan.layout.num_groups,
        )
    about = {"desc": "compiling kernels", "unit": "kernel"}
    machine.prepare(
        lambda number: _progress_bar(use_tqdm, total=number, **about),
        partial(decoder.forward, kv_cache=kv_cache, states=states),
        step_size(config, model, num_positions, plan.layout.num_groups),
    )
    runner: Runner = model_runner
    if config.async_scheduling:
        runner = OverlappingRunner(model_runner, scheduler.ahead)
    engine = Engine(
        config,
        scheduler,
        runner,
        log,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        constraints=constraints,
        backend=backend,
    )
    engine.observers.append(PreemptionWarnings())
    engine.metrics.sizes = {
        "mie:weights_bytes": plan.weight_bytes,
        "mie:kv_bytes": plan.num_blocks * plan.block_bytes,
        "mie:answer_bytes": answer_bytes(plan),
    }
    if scheduler.longest < plan.max_model_len:
        text = (
            "a prompt and its answer have at most %d tokens: the KV cache holds no more, and "
            "max_model_len is %d (raise num_blocks to at least %d, or lower max_model_len)"
        )
        num_blocks = scheduler.manager.blocks_needed(plan.max_model_len - 1)
        logger.warning(text, scheduler.longest, plan.max_model_len, num_blocks)
    if model.left_out:
        logger.warning("only the text part is loaded, without %s", ", ".join(model.left_out))
    logger.info("loaded %s on %s in %.2f s", directory, backend, time.perf_counter() - began)
    if kept is not None:
        cache = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        text = "weights are kept in %s and the KV cache in %s; a CPU computes in float32"
        logger.info(text, dtype, cache)
    logger.info("memory plan:\n%s", plan.table())
    return engine


def opened(
    directory: Path,
    model: ModelConfig,
    load_format: str,
    seed: int,
    quantization: str | None,
    head_dtype: str,
) -> Checkpoint:
    """Return the weights of a model, in the forms that the settings ask for. None is read yet."""
    weights = (
        RandomWeights(model, seed)
        if load_format == "dummy"
        else Checkpoint.open(directory, expected_tensors(model), model.quantisation)
    )
    return quantised(weights, model, quantization, head_dtype)


def widest(weights: Checkpoint) -> str:
    """Return the widest dtype of the matrices."""
    dtypes = weights.matrix_dtypes
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def with_states(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine for a model with recurrent layers.

    Raises:
        ConfigError: a setting is not possible with them.
    """
    if config.async_scheduling:  # a token that is discarded would stay in the state
        raise ConfigError(
            "async_scheduling=True is not supported with recurrent layers (leave it out)"
        )
    if config.enable_prefix_caching and not config.enable_chunked_prefill:
        raise ConfigError(
            "enable_prefix_caching=True needs enable_chunked_prefill=True with recurrent layers: "
            "chunks end where a state is kept (set enable_prefix_caching=False, or chunk prompts)"
        )
    return replace(config, async_scheduling=False)


def with_seats(config: EngineConfig, num_states: int) -> EngineConfig:
    """Return the settings with at most as many sequences as there are slots for states, if any."""
    if not 0 < num_states < config.max_num_seqs:
        return config
    text = "max_num_seqs is lowered to %d, the number of slots for states (raise state_memory)"
    logging.getLogger(__name__).warning(text, num_states)
    return replace(config, max_num_seqs=num_states)


def new_scheduler(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    log: EventLog,
    num_host_blocks: int = 0,
    num_states: tuple[int, int] = (0, 0),
    window: Window | None = None,
) -> Scheduler:
    """Return a scheduler with its memory manager, both writing to ``log``.

    ``num_states`` has the slots of recurrent states on the device and on the host.
    """
    parts: list[Part] = []
    if window is not None:
        parts.append(Windows(window))
    if num_states[0]:
        distance = config.state_snapshot_distance
        states = States(num_states[0], num_host_states=num_states[1], snapshot_distance=distance)
        parts.append(states)
    manager = KVCacheManager(
        num_blocks,
        config.block_size,
        parts,
        enable_prefix_caching=config.enable_prefix_caching,
        partial_block_sharing=config.partial_block_sharing,
        max_cached_blocks=config.max_cached_blocks,
        num_host_blocks=num_host_blocks,
        emit=log.emit,
    )
    return Scheduler(config, manager, max_model_len, log.emit)


def _load_decoder(
    weights: Checkpoint,
    model: ModelConfig,
    machine: Backend,
    plan: MemoryPlan,
    use_tqdm: bool,
    kept: Any,  # a dtype of NumPy, or None
) -> Decoder:
    with weights as checkpoint:
        if model.tie_word_embeddings:
            check_tied_head(checkpoint)
        about = {"desc": "loading weights", "unit": "B", "unit_scale": True, "delay": 0.5}
        with _progress_bar(use_tqdm, total=checkpoint.nbytes, **about) as progress:
            return Decoder(
                model, machine, checkpoint, plan.num_positions, progress, kept, plan.layout
            )


def _new_caches(plan: MemoryPlan, model: ModelConfig, machine: Backend) -> tuple[Array, Array]:
    """Allocate the KV cache, and the host's if the plan has one."""
    shape = cache_shape(model, plan.num_blocks, plan.block_size, plan.layout)
    host_shape = replace(shape, num_blocks=plan.num_host_blocks)
    host_cache = machine.new_host_cache(host_shape) if plan.num_host_blocks else None
    return machine.new_kv_cache(shape), host_cache


def _new_states(plan: MemoryPlan, model: ModelConfig, machine: Backend) -> Array:
    """Allocate the states of recurrent layers, or return None if there are none."""
    if model.recurrent is None:
        return None
    num_layers = model.layers_recurrent.count(True)
    return machine.new_state_cache(model.recurrent.shape, num_layers, plan.num_states)


@contextmanager
def _progress_bar(is_wanted: bool, **about: Any) -> Iterator[Count]:
    """Show a bar on a terminal, and take it away at the end. Do nothing elsewhere."""
    if not is_wanted or not sys.stderr.isatty():
        yield lambda num_new: None
        return
    from tqdm import tqdm

    with tqdm(**about, leave=False) as bar:
        yield bar.update
