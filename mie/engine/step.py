"""What a step of the engine gives: the choices' new tokens, and its numbers."""

from dataclasses import dataclass

from mie.sched.result import TokenLogprobs
from mie.sched.sequence import FinishReason
from mie.stats.memory import MemoryStats
from mie.stats.request import RequestMetrics


@dataclass(slots=True)
class SequenceOutput:
    """What one choice got in a step."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    """The request's own, which goes on growing."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One step in numbers, for observers and the event log. Blocks are counted while it computes,
    slots when its tokens are stored, queues at its end; times are in seconds."""

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    num_finished: int
    num_blocks_used: int
    """Blocks that stand in a sequence's table, or are being copied from."""
    num_blocks_cached: int
    """Blocks that only the prefix cache holds."""
    num_blocks_saved: int
    """Entries of tables minus blocks in tables: what sharing saves."""
    num_slots_empty: int
    """Slots of used blocks without a token: internal fragmentation."""
    num_copies: int
    num_evicted: int
    num_exported: int
    """Blocks swapped out; and"""
    num_imported: int
    """swapped in."""
    start: float
    """Since the engine was made."""
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step gave: choices with new tokens, and prompt log-probabilities by request."""

    outputs: tuple[SequenceOutput, ...]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    failed: tuple[str, ...] = ()
    """The requests that failed because of an error of their own (`Request.error`)."""
    stats: StepStats


class EngineStats:
    """Running totals of an engine."""

    def __init__(self, memory: MemoryStats) -> None:
        self.memory = memory
        """Prefix hits, copies, evictions, swaps."""
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.peak_blocks = 0

    def add(self, stats: StepStats, num_generated: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_generated_tokens += num_generated
        self.num_preemptions += stats.num_preempted
        self.peak_blocks = max(self.peak_blocks, stats.num_blocks_used)
