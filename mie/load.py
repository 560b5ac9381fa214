"""The one place that wires things together: from a model directory to an engine."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mie.backend import load_backend
from mie.config import EngineConfig
from mie.engine import Engine
from mie.errors import ConfigError
from mie.events import EventLog
from mie.memory.manager import KVCacheManager
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.weights import Checkpoint, check_tied_head, expected_tensors
from mie.ops.backend import Backend
from mie.runner import ModelRunner
from mie.sched.scheduler import Scheduler

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Most that the KV cache takes unless told otherwise; and at most a quarter of the free memory."""


DEFAULT_SWAP_BYTES = 4 << 30


def load_engine(
    directory: Path,
    config: EngineConfig | None = None,
    *,
    backend: str = "numpy",
    dtype: str = "auto",
    trace: TextIO | None = None,
    wrap: Callable[[Backend], Backend] | None = None,
) -> Engine:
    """An engine with the model in ``directory``; token ids in, token ids out. ``trace`` gets the
    event log as JSON lines; ``wrap`` may put a backend of its own around the one that is loaded.

    Raises:
        ConfigError: a setting is out of range for the model or the machine.
        ModelError: the directory cannot be used; nothing stays loaded.
    """
    config = config or EngineConfig()
    model = ModelConfig.load(directory)
    machine = load_backend(backend, dtype, config)
    if wrap is not None:
        machine = wrap(machine)
    max_model_len = _max_model_len(config, model)
    block_bytes = config.block_size * model.kv_bytes_per_token(machine.itemsize)
    num_blocks = _num_blocks(config, max_model_len, block_bytes)
    num_positions = min(max_model_len, num_blocks * config.block_size)
    num_host_blocks = _num_host_blocks(config, block_bytes)
    log = EventLog(config.event_log_steps, trace)
    with _memory_for(num_blocks, block_bytes):
        scheduler = new_scheduler(config, num_blocks, max_model_len, log, num_host_blocks)
    decoder = _load_decoder(directory, model, machine, num_positions)
    with _memory_for(num_blocks, block_bytes):
        runner = ModelRunner(
            decoder,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=-(-num_positions // config.block_size),
        )
    return Engine(
        config,
        scheduler,
        runner,
        log,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def new_scheduler(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    log: EventLog,
    num_host_blocks: int = 0,
) -> Scheduler:
    """A scheduler with its memory, both writing to ``log``."""
    manager = KVCacheManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        partial_block_sharing=config.partial_block_sharing,
        max_cached_blocks=config.max_cached_blocks,
        num_host_blocks=num_host_blocks,
        emit=log.emit,
    )
    return Scheduler(config, manager, max_model_len, log.emit)


@contextmanager
def _memory_for(num_blocks: int, block_bytes: int) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise ConfigError(
            f"the KV cache of {num_blocks} blocks takes {num_blocks * block_bytes} bytes, which "
            "this machine does not have (lower num_blocks or kv_cache_memory_bytes)"
        ) from error


def _load_decoder(
    directory: Path, model: ModelConfig, machine: Backend, num_positions: int
) -> Decoder:
    with Checkpoint.open(directory, expected_tensors(model)) as checkpoint:
        if model.tie_word_embeddings:
            check_tied_head(checkpoint)
        with _progress_bar(checkpoint.nbytes) as progress:
            return Decoder(model, machine, checkpoint, num_positions, progress)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.context_length
    if config.max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model's context is "
            f"{model.context_length} (lower max_model_len)"
        )
    return config.max_model_len


def _num_blocks(config: EngineConfig, max_model_len: int, block_bytes: int) -> int:
    """As many as asked for; by default what every sequence could use, within the free memory."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        if num_blocks == 0:
            raise ConfigError(
                f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}; one block of "
                f"{config.block_size} tokens takes {block_bytes} (raise it to at least that, or "
                "lower block_size)"
            )
        return num_blocks
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    affordable = min(DEFAULT_KV_CACHE_BYTES, _available_bytes() // 4) // block_bytes
    return max(1, min(wanted, affordable))


def _num_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    if config.preemption_mode != "swap":
        return 0
    if config.swap_space is None:
        return min(DEFAULT_SWAP_BYTES, _available_bytes() // 4) // block_bytes
    if config.swap_space < block_bytes:
        raise ConfigError(
            f"swap_space is {config.swap_space} bytes; one block of {config.block_size} tokens "
            f"takes {block_bytes} (raise it to at least that, or lower block_size)"
        )
    return config.swap_space // block_bytes


def _available_bytes() -> int:
    """Memory that a program can get without pushing others out (MemAvailable of Linux)."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 4 * DEFAULT_KV_CACHE_BYTES


@contextmanager
def _progress_bar(num_bytes: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal for a load of more than a moment; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda num_new: None
        return
    from tqdm import tqdm

    with tqdm(
        total=num_bytes, desc="loading weights", unit="B", unit_scale=True, delay=0.5, leave=False
    ) as bar:
        yield bar.update
