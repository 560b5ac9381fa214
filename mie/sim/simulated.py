"""Assemble the real scheduler and memory with the simulator's runner and clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TextIO

from mie.checkpoint.config import ModelConfig
from mie.config.engine import EngineConfig
from mie.engine.engine import Engine
from mie.errors import ConfigError
from mie.events import EventLog
from mie.load.engine import new_scheduler
from mie.load.sizing import DEFAULT_SWAP_BYTES
from mie.sim.clock import SimClock
from mie.sim.costs import Costs
from mie.sim.devices import Device, blocks_on, costs_on
from mie.sim.driver import Bench
from mie.sim.runner import SimRunner

VOCAB_SIZE = 1 << 18
"""The default vocabulary size, which no model in use exceeds."""


def simulated(
    costs: Costs,
    config: EngineConfig,
    *,
    max_model_len: int | None = None,
    num_host_blocks: int = 0,
    vocab_size: int = VOCAB_SIZE,
    trace: TextIO | None = None,
) -> Bench:
    """Return an engine whose steps take the time that ``costs`` give.

    ``config.num_blocks`` must be given, and ``num_host_blocks`` for swapping. A context is as long
    as the pool unless ``config`` or ``max_model_len`` limits it.

    Raises:
        ConfigError: the size of the KV cache, or of the host's pool, is not given in blocks.
    """
    num_blocks = config.num_blocks
    if num_blocks is None:
        raise ConfigError(
            "a simulated engine without a device and a model's shape cannot size its KV cache"
            " (give num_blocks)"
        )
    if config.preemption_mode == "swap" and not num_host_blocks:
        raise ConfigError(
            "a simulated engine without a device and a model's shape cannot size the host's pool"
            " (give num_host_blocks, or preemption_mode='recompute')"
        )
    clock = SimClock()
    log = EventLog(config.event_log_steps, trace)
    longest = max_model_len or config.max_model_len or num_blocks * config.block_size + 1
    runner = SimRunner(
        costs,
        clock,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=vocab_size,
    )
    engine = Engine(
        config,
        new_scheduler(config, num_blocks, longest, log, num_host_blocks),
        runner,
        log,
        vocab_size=vocab_size,
        eos_token_ids=(),
        clock=clock.seconds,
    )
    return Bench(engine=engine, clock=clock, vocab_size=vocab_size)


def simulated_on(
    device: Device, model: ModelConfig, config: EngineConfig, *, trace: TextIO | None = None
) -> Bench:
    """Return an engine that simulates ``model`` on ``device``.

    It has as many blocks as fit the device's memory unless ``config`` sets them.

    Raises:
        ConfigError: the model does not fit, or a setting does not fit the model.
    """
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's context is {model.context_length}"
            " (lower max_model_len)"
        )
    block_bytes = config.block_size * model.kv_bytes_per_token(device.itemsize)
    num_blocks = config.num_blocks or blocks_on(device, model, config.block_size)
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
    swap_bytes = config.swap_space or DEFAULT_SWAP_BYTES
    return simulated(
        costs_on(device, model),
        replace(config, num_blocks=max(1, num_blocks), kv_cache_memory_bytes=None),
        max_model_len=max_model_len,
        num_host_blocks=swap_bytes // block_bytes if config.preemption_mode == "swap" else 0,
        vocab_size=model.vocab_size,
        trace=trace,
    )
