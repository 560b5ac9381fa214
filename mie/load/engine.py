"""Assemble an engine from a model directory, in four steps: open, choose, plan, build.

This is the only place that wires the parts together.
"""

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from mie.base.arithmetic import ceil_div
from mie.base.logs import PreemptionWarnings
from mie.checkpoint.gguf.header import GgufHeader
from mie.config.engine import EngineConfig
from mie.config.speculation import speculation_of
from mie.disk.mover import Mover
from mie.disk.tier import DiskTier
from mie.engine.constraints.constraint import Constraints
from mie.engine.engine import Engine
from mie.engine.overlap import OverlappingRunner
from mie.engine.runner import ModelRunner
from mie.engine.watch.departures import Departures
from mie.engine.watch.metrics import NO_DISK, EngineMetrics
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.errors import ConfigError
from mie.events import EventLog
from mie.load.adapters import Adapters
from mie.load.backends import ChosenBackend, choose_backend
from mie.load.device import DevicePart, load_device_part, new_slots, prepare
from mie.load.disk import NewStore, both, disk_tier
from mie.load.fit import fitting_plan
from mie.load.opened import OpenedModel, open_model
from mie.load.panels import keep_panels
from mie.load.ranks import Order, Ranks, RankSlots, directory_of
from mie.load.settings import LoadSettings
from mie.load.sizing import MemoryPlan
from mie.memory.layers.part import Part
from mie.memory.layers.states import States
from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.model.config import ModelConfig
from mie.ops.backend import Backend
from mie.sched.scheduler import Scheduler
from mie.sched.speculation import Drafter
from mie.speculate.costs import costs_of
from mie.speculate.drafter import LookupDrafter

logger = logging.getLogger(__name__)


def load_engine(
    directory: Path | GgufHeader,
    settings: LoadSettings | None = None,
    *,
    model: ModelConfig | None = None,
    wrap: Callable[[Backend], Backend] | None = None,
    constraints: Constraints | None = None,
    trace: TextIO | None = None,
    drafter: Drafter | None = None,
    use_tqdm: bool = True,
    new_store: NewStore | None = None,
) -> Engine:
    """Load an engine for token ids with the model in ``directory``, or of a GGUF file's header.

    ``model`` replaces the contents of config.json. ``wrap`` can put another backend around the
    loaded one. ``constraints`` serve requests with structured outputs. ``trace`` gets the event log
    as JSON lines. ``drafter`` replaces the drafter of the settings, and ``new_store`` the folder
    ``prefix_cache_dir``. ``use_tqdm`` shows a progress bar on a terminal.

    Raises:
        ConfigError: a setting is out of range for the model or the machine.
        ModelError: the directory cannot be used; nothing stays loaded.
    """
    began = time.perf_counter()
    settings = settings or LoadSettings()
    opened = open_model(directory, settings, model)
    chosen = choose_backend(opened, settings, logger.info)
    keep_panels(opened, chosen, settings)
    if wrap is not None:
        chosen = replace(chosen, backend=wrap(chosen.backend))
    plan = fitting_plan(opened, chosen.backend, settings)
    warn_of_fewer_seqs(settings.engine, plan.config)
    logger.info("settings of the engine: %r", plan.config)
    with other_ranks(directory, opened, chosen, plan, settings):
        engine = build_engine(
            opened,
            chosen,
            plan,
            constraints=constraints,
            trace=trace,
            drafter=drafter,
            use_tqdm=use_tqdm,
            new_store=new_store,
        )
    warn_of_less(engine, opened, plan)
    name = directory.path if isinstance(directory, GgufHeader) else directory
    seconds = time.perf_counter() - began
    logger.info("loaded %s on %s in %.2f s", name, plan.backend, seconds)
    log_memory(chosen, plan, settings)
    return engine


def build_engine(
    opened: OpenedModel,
    chosen: ChosenBackend,
    plan: MemoryPlan,
    *,
    constraints: Constraints | None,
    trace: TextIO | None,
    drafter: Drafter | None,
    use_tqdm: bool,
    new_store: NewStore | None,
) -> Engine:
    """Load the weights, allocate the caches, and wire the parts of an engine."""
    model, backend, config = opened.config, chosen.backend, plan.config
    drafter = drafter or new_drafter(plan, backend)
    check_drafter(drafter, backend, model)
    log = EventLog(config.event_log_steps, trace, backend.numerics())
    tier = disk_tier(opened, backend, plan, new_store)
    departures = Departures(log.emit) if config.enable_prefix_caching else None
    with plan.guarded():
        scheduler = new_scheduler(
            config,
            plan.num_blocks,
            plan.max_model_len,
            log,
            num_host_blocks=plan.num_host_blocks,
            num_states=(plan.num_states, plan.num_host_states),
            window=plan.window,
            drafter=drafter,
            tier=tier,
            departures=departures,
        )
        slots = new_slots(opened, backend, config)
        part = load_device_part(opened, chosen, plan, use_tqdm=use_tqdm, adapters=slots)
        runner = new_runner(part, plan, constraints)
    prepare(part, plan, model, use_tqdm=use_tqdm)
    disk_counters = tier.counters if tier else lambda: NO_DISK
    engine = Engine(
        config,
        scheduler,
        OverlappingRunner(runner, scheduler.ahead) if config.async_scheduling else runner,
        log,
        EngineMetrics(scheduler.max_model_len, sizes_of(plan), disk_counters),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        constraints=constraints,
        backend=backend.name,
    )
    engine.observers.append(PreemptionWarnings())
    if slots is not None:
        of_all: Any = slots if opened.whole is None else RankSlots(slots, cast(Any, backend))
        engine.adapters = Adapters(of_all, opened.whole or model, config, engine)
    if tier is not None:
        tier.connect(engine, new_mover(part, runner))
        weakref.finalize(engine, tier.close)
    if departures is not None:
        departures.connect(engine, tier.is_slow if tier else lambda seq: False)
    return engine


# The parts of an engine.


def other_ranks(
    directory: Path | GgufHeader,
    opened: OpenedModel,
    chosen: ChosenBackend,
    plan: MemoryPlan,
    settings: LoadSettings,
) -> AbstractContextManager[object]:
    """Start the processes of the other ranks, if there are any.

    The end of the context waits until they have loaded their parts.
    """
    if opened.whole is None:
        return nullcontext()
    path = directory_of(directory)
    order = Order(directory=path, settings=settings, model=opened.whole, plan=plan)
    backend = cast(Any, chosen.backend)
    return Ranks(backend, order).loading(backend)


def new_drafter(plan: MemoryPlan, backend: Backend) -> Drafter | None:
    """Return the drafter that the settings name, or None. It keeps as many tokens as the cache."""
    config = plan.config
    wanted = speculation_of(config.speculative_config)
    if wanted is None:
        return None
    costs = costs_of(backend.name, config.activations)
    return LookupDrafter(wanted, costs, plan.num_blocks * config.block_size)


def check_drafter(drafter: Drafter | None, backend: Backend, model: ModelConfig) -> None:
    """Raise `ConfigError` if the backend cannot compute drafts for the model."""
    if drafter and backend.has_decode_kernels and model.recurrent is not None:
        raise ConfigError(
            "speculative_config is not supported with recurrent layers on a GPU (leave it out, or "
            "use backend='jit')"
        )


def new_scheduler(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    log: EventLog,
    *,
    num_host_blocks: int = 0,
    num_states: tuple[int, int] = (0, 0),
    window: Window | None = None,
    drafter: Drafter | None = None,
    tier: DiskTier | None = None,
    departures: Departures | None = None,
) -> Scheduler:
    """Return a scheduler with its memory manager, both writing to ``log``, which starts here.

    ``num_states`` has the slots of recurrent states on the device and on the host.
    """
    emit = log.emit
    if departures is not None:
        emit = both(departures.note, emit)
    if tier is not None:
        emit = both(tier.emit, emit)
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
        emit=emit,
    )
    scheduler = Scheduler(config, manager, max_model_len, log.emit, drafter)
    log.start(lambda: scheduler_snapshot(scheduler))
    return scheduler


def new_runner(part: DevicePart, plan: MemoryPlan, constraints: Constraints | None) -> ModelRunner:
    """Return the runner of a decoder and its caches."""
    config = plan.config
    return ModelRunner(
        part.decoder,
        part.kv_cache,
        part.host_cache,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_blocks_per_seq=ceil_div(plan.num_positions, config.block_size),
        constraints=constraints,
        max_forced_run=config.max_forced_run,
        states=part.states,
        num_groups=plan.layout.num_groups,
    )


def new_mover(part: DevicePart, runner: ModelRunner) -> Mover:
    """Return the mover of blocks and states between the runner and a disk."""
    return Mover(
        backend=part.decoder.backend,
        kv_cache=part.kv_cache,
        states=part.states,
        host_blocks=runner.host_blocks,
        host_states=runner.host_states,
    )


def sizes_of(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of the parts of an engine by the names of their metrics."""
    return {
        "mie:weights_bytes": plan.num_ranks * plan.weight_bytes,
        "mie:kv_bytes": plan.num_ranks * plan.num_blocks * plan.block_bytes,
        "mie:answer_bytes": plan.answer_bytes,
    }


# Lines of the log.


def warn_of_fewer_seqs(given: EngineConfig, effective: EngineConfig) -> None:
    """Log that fewer sequences run at once than the settings allow, if so."""
    if effective.max_num_seqs < given.max_num_seqs:
        text = "max_num_seqs is lowered to %d, the number of slots for states (raise state_memory)"
        logger.warning(text, effective.max_num_seqs)


def warn_of_less(engine: Engine, opened: OpenedModel, plan: MemoryPlan) -> None:
    """Log that the context is shorter than its setting, or that parts of the model are absent."""
    if engine.max_model_len < plan.max_model_len:
        text = (
            "a prompt and its answer have at most %d tokens: the KV cache holds no more, and "
            "max_model_len is %d (raise num_blocks to at least %d, or lower max_model_len)"
        )
        num_blocks = engine.scheduler.manager.blocks_needed(plan.max_model_len - 1)
        logger.warning(text, engine.max_model_len, plan.max_model_len, num_blocks)
    if opened.config.left_out:
        logger.warning(
            "only the text part is loaded, without %s", ", ".join(opened.config.left_out)
        )


def log_memory(chosen: ChosenBackend, plan: MemoryPlan, settings: LoadSettings) -> None:
    """Log the memory plan, and the data types of weights and cache if a CPU keeps 16 bits."""
    if chosen.kept_dtype is not None:
        cache = settings.engine.kv_cache_dtype
        cache = settings.dtype if cache == "auto" else cache
        text = "weights are kept in %s and the KV cache in %s; a CPU computes in float32"
        logger.info(text, settings.dtype, cache)
    logger.info("%s", plan.cache_line())
    logger.info("memory plan:\n%s", plan.table())
