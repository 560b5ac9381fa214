"""Assemble the real scheduler and memory with the simulator's runner and clock."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO, cast

from mie.config.engine import EngineConfig
from mie.config.speculation import speculation_of
from mie.disk.mover import Mover
from mie.disk.tier import DiskTier, Store
from mie.engine.engine import Engine
from mie.engine.watch.metrics import EngineMetrics
from mie.errors import ConfigError
from mie.events import EventLog
from mie.lab.sim.costs import Costs, SimClock, StepWork, causal_pairs, window_pairs
from mie.lab.sim.devices import Device, costs_on, memory_beside, state_bytes, window_of
from mie.lab.sim.drafts import RIGHT_PERCENT, SimDrafter
from mie.lab.sim.driver import Bench
from mie.lab.workload import TOKEN_FACTOR, text_key, text_token
from mie.load.engine import new_scheduler, warn_of_fewer_seqs
from mie.load.settings import check_states, effective_config
from mie.load.sizing import DEFAULT_SWAP_BYTES, layout_of, num_states_of, sizes_on_host
from mie.memory.layers.window import Window
from mie.model.config import ModelConfig
from mie.sched.plan import Chunk, StepPlan
from mie.sched.result import ChunkResult, StepResult

VOCAB_SIZE = 1 << 18
"""The default vocabulary size. No model in use exceeds it."""


class SimRunner:
    """A `mie.engine.runner.ModelRunner` without a model.

    A choice's tokens depend only on its request and their positions, so scheduling never changes
    its text. Sampling controls are ignored: an answer has ``max_tokens`` tokens, and there are no
    log-probabilities.
    """

    is_ahead = False

    def __init__(
        self,
        costs: Costs,
        clock: SimClock,
        *,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        window: int | None,
        has_states: bool = False,
    ) -> None:
        """``window`` is the number of positions that layers with a window read."""
        self._has_states = has_states
        self._costs = costs
        self._window = window
        self._clock = clock
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._num_stored = [0] * max_num_seqs  # by row, as are the next two
        self._text_keys = [0] * max_num_seqs
        self._draw_keys = [(0, 0)] * max_num_seqs

    def run(self, plan: StepPlan) -> StepResult:
        """Advance the clock by the plan's cost."""
        for new in plan.new_rows:
            self._num_stored[new.row] = new.num_computed
            self._draw_keys[new.row] = new.draw_key
            self._text_keys[new.row] = text_key(*new.draw_key, new.choice)
        num_context, decoded = self._decode(plan)
        chunks = [self._prefill(chunk) for chunk in plan.chunks]
        self._clock.advance(self._costs.step_ns(self._work(plan, num_context, chunks)))
        return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)

    def _decode(self, plan: StepPlan) -> tuple[int, list[int]]:
        """Return the context of the decodes, and their next tokens.

        This is the only loop over all rows, so it inlines `text_token`: a step of 256 sequences
        must not cost more than its scheduling.
        """
        stored, keys, vocab_size = self._num_stored, self._text_keys, self._vocab_size
        num_context, decoded = 0, []
        for row in plan.decodes:
            stored[row] = position = stored[row] + 1
            num_context += position
            spread = keys[row] * (position * TOKEN_FACTOR + 1)
            decoded.append((spread >> 32 & 0xFFFFFFFF) % vocab_size)
        return num_context, decoded

    def _prefill(self, chunk: Chunk) -> ChunkResult:
        if chunk.num_drafts:
            return self._verify(chunk)
        self._num_stored[chunk.row] = chunk.end
        keys = [text_key(*self._draw_keys[chunk.row], choice) for choice in chunk.choices]
        return ChunkResult(
            token_ids=[text_token(key, chunk.end, self._vocab_size) for key in keys],
            logprobs=[None] * len(keys),
            scored=[],
        )

    def _verify(self, chunk: Chunk) -> ChunkResult:
        """Keep the drafts that are the text's next tokens."""
        key, tokens = self._text_keys[chunk.row], []
        for position, draft in enumerate((*chunk.drafts, None), chunk.start + 1):
            tokens.append(text_token(key, position, self._vocab_size))
            if tokens[-1] != draft:
                break
        is_reverted = self._has_states and len(tokens) <= chunk.num_drafts
        self._num_stored[chunk.row] = chunk.start + (0 if is_reverted else len(tokens))
        return ChunkResult(token_ids=tokens, logprobs=[None] * len(tokens), scored=[])

    def _work(self, plan: StepPlan, num_context: int, results: list[ChunkResult]) -> StepWork:
        chunks, moves = plan.chunks, plan.moves
        own: dict[str, int] = {}
        if self._window is not None:
            own |= self._window_work(plan, self._window)
        if states := moves.parts.get("states"):
            # A sequence that begins reads no state.
            num_read = len(plan.decodes) + sum(chunk.start > 0 for chunk in chunks)
            num_written, num_copied = len(plan.decodes) + len(chunks), len(states.copies)
            own["num_states"] = num_read + num_written + 2 * num_copied
            own["num_swapped_states"] = len(states.imports) + len(states.exports)
        return StepWork(
            num_tokens=plan.num_tokens,
            num_sampled=len(plan.decodes) + sum(len(result.token_ids) for result in results),
            num_pairs=sum(causal_pairs(chunk.start, chunk.end) for chunk in chunks),
            num_context=num_context + sum(chunk.end for chunk in chunks),
            num_seqs=len(plan.decodes) + len(chunks),
            num_copied=len(moves.copies) * self._block_size,
            num_swapped=(len(moves.imports) + len(moves.exports)) * self._block_size,
            **own,
        )

    def _window_work(self, plan: StepPlan, window: int) -> dict[str, int]:
        decodes = (min(self._num_stored[row], window) for row in plan.decodes)
        spans = [(chunk.start, chunk.end) for chunk in plan.chunks]
        seen = (end - max(0, start - window + 1) for start, end in spans)
        return {
            "num_window_pairs": sum(window_pairs(start, end, window) for start, end in spans),
            "num_window_context": sum(decodes) + sum(seen),
        }


class SimMover:
    """A `mie.disk.mover.Mover` of blocks without contents."""

    def __init__(self) -> None:
        self.host_blocks: dict[int, bytes] = {}
        self.host_states: dict[int, bytes] = {}

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return a byte for each block."""
        return [b"\0"] * len(block_ids)

    def export_state(self, slot: int) -> bytes:
        """Return a byte."""
        return b"\0"


def simulated(
    costs: Costs,
    config: EngineConfig,
    *,
    max_model_len: int | None = None,
    num_host_blocks: int = 0,
    num_states: tuple[int, int] = (0, 0),
    window: Window | None = None,
    window_size: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    right_percent: int = RIGHT_PERCENT,
    trace: TextIO | None = None,
    store: Store | None = None,
) -> Bench:
    """Return an engine with steps that take the time of ``costs``.

    ``config.num_blocks`` must be given, and ``num_host_blocks`` for swapping. A context is as long
    as the pool unless ``config`` or ``max_model_len`` limits it. ``num_states`` has the slots of
    recurrent states on the device and on the host. With a ``window``, blocks behind it are freed.
    Layers with a window read ``window_size`` positions. ``right_percent`` of the drafts are right,
    if ``config`` wants drafts. A ``store`` is the disk of the prefix cache. It gets a byte for each
    block, by way of the host's pool. Reading takes no time.

    Raises:
        ConfigError: the size of the KV cache, or of the host's pool, is not given in blocks, or a
            setting is not possible with recurrent layers.
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
    given = config
    check_states(given, has_states=num_states[0] > 0)
    config = effective_config(given, num_states[0], is_asynchronous=False)
    warn_of_fewer_seqs(given, config)
    clock = SimClock()
    log = EventLog(config.event_log_steps, trace)
    longest = max_model_len or config.max_model_len or num_blocks * config.block_size + 1
    runner = SimRunner(
        costs,
        clock,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=vocab_size,
        window=window_size,
        has_states=num_states[0] > 0,
    )
    wanted, drafter = speculation_of(config.speculative_config), None
    if wanted is not None:
        drafter = SimDrafter(wanted, costs, vocab_size, right_percent)
    tier = None if store is None else DiskTier(store, clock=clock.seconds)
    scheduler = new_scheduler(
        config,
        num_blocks,
        longest,
        log,
        num_host_blocks=num_host_blocks,
        num_states=num_states,
        window=window,
        drafter=drafter,
        tier=tier,
    )
    engine = Engine(
        config,
        scheduler,
        runner,
        log,
        EngineMetrics(longest),
        vocab_size=vocab_size,
        eos_token_ids=(),
        clock=clock.seconds,
    )
    if tier is not None:
        tier.connect(engine, cast(Mover, SimMover()))
    return Bench(engine=engine, clock=clock, vocab_size=vocab_size)


def simulated_on(
    device: Device,
    model: ModelConfig,
    config: EngineConfig,
    *,
    right_percent: int = RIGHT_PERCENT,
    trace: TextIO | None = None,
) -> Bench:
    """Return an engine that simulates ``model`` on ``device``.

    It has as many blocks as fit the device's memory, beside slots for states, unless ``config``
    sets them. ``right_percent`` of the drafts are right, if ``config`` wants drafts.

    Raises:
        ConfigError: the model does not fit, or a setting does not fit the model.
    """
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's context is {model.context_length}"
            " (lower max_model_len)"
        )
    layout, window = layout_of(config, model, max_model_len)
    token_bytes = 2 * layout.num_layers * model.num_kv_heads * model.head_dim * device.itemsize
    block_bytes, of_states = config.block_size * token_bytes, state_bytes(model)
    left = memory_beside(device, model, block_bytes)
    num_states = num_states_of(config, of_states, left)
    num_blocks = config.num_blocks or (left - num_states * of_states) // block_bytes
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
    num_host = sizes_on_host(config, block_bytes, of_states, 4 * DEFAULT_SWAP_BYTES)
    return simulated(
        costs_on(device, model, layout),
        replace(config, num_blocks=max(1, num_blocks), kv_cache_memory_bytes=None),
        max_model_len=max_model_len,
        num_host_blocks=num_host[0],
        num_states=(num_states, num_host[1]),
        window=window,
        window_size=window_of(model),
        vocab_size=model.vocab_size,
        right_percent=right_percent,
        trace=trace,
    )
