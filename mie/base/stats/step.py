"""Count the tokens, blocks and seconds of an engine's steps."""

from dataclasses import dataclass

from mie.base.stats.memory import MemoryStats


@dataclass(kw_only=True)
class StepStats:
    """One step in numbers, for observers and the event log.

    Blocks are counted while it computes, empty slots after its tokens are stored, and queues at its
    end. Times are in seconds. It must not be changed. It is not frozen, because each step makes
    one, and this would take three times as long.
    """

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    num_finished: int
    num_blocks_used: int
    """Blocks that are in a sequence's table, or are being copied from."""
    num_blocks_cached: int
    """Blocks that only the prefix cache holds."""
    num_blocks_saved: int
    """Blocks saved by sharing: table entries minus distinct blocks in tables."""
    num_slots_empty: int
    """Slots of used blocks that hold no token (internal fragmentation)."""
    num_copies: int
    num_evicted: int
    num_exported: int
    """Blocks swapped out to the host."""
    num_imported: int
    """Blocks swapped in from the host."""
    start: float
    """Time from the creation of the engine."""
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """The waiting requests of one client."""

    num_requests: int
    """Sequences that wait. A request that has not forked counts as one."""
    num_tokens: int
    """Their tokens."""
    num_free_seats: int
    """Sequences that could be admitted in addition to the running sequences."""
    longest_wait: float
    """Seconds since the first of them arrived; 0 if none waits."""


class EngineStats:
    """The running totals of an engine."""

    def __init__(self, memory: MemoryStats) -> None:
        self.memory = memory
        """Prefix hits, copies, evictions, swaps."""
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.peak_blocks = 0

    def add(self, stats: StepStats, num_generated: int) -> None:
        """Add a step."""
        self.num_steps += 1
        self.num_generated_tokens += num_generated
        self.num_preemptions += stats.num_preempted
        self.peak_blocks = max(self.peak_blocks, stats.num_blocks_used)
