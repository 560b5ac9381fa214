"""Explain in numbers, and in a sentence, why a sequence waits."""

from dataclasses import dataclass
from typing import Literal

from mie.base.reprs import count
from mie.sched.admission import find_allocation
from mie.sched.plan import SeqId
from mie.sched.scheduler import Scheduler

Because = Literal["queue", "quota", "seats", "blocks", "budget", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The needs of a waiting sequence, and the free seats, blocks and tokens, between two steps."""

    because: Because
    """The first thing that is missing. With "nothing" the next step admits it."""
    position: int
    """Number of waiting sequences that are before it in the queue."""
    num_tokens: int
    num_cached_tokens: int
    """Number of the sequence's tokens in the prefix cache, or on the host."""
    blocks_needed: int
    """Number of free or evictable blocks that it takes, its cached blocks included."""
    blocks_free: int
    blocks_evictable: int
    """Blocks that only the prefix cache holds."""
    blocks_spare: int
    """Blocks that must be left while others run (watermark)."""
    seats: int
    """Sequences that may run at once."""
    seats_free: int
    budget: int
    """Tokens of a step."""
    budget_decodes: int
    """Tokens of the next step that running answers take."""
    budget_prefills: int
    """Tokens of the next step that running prompts take."""

    @property
    def sentence(self) -> str:
        """The missing thing, in words."""
        blocks = (
            f"It needs {count(self.blocks_needed, 'block')}; {self.blocks_free} are free and "
            f"{self.blocks_evictable} can be evicted"
        )
        if self.blocks_spare:
            blocks += f", of which {self.blocks_spare} must be left"
        left = self.budget - self.budget_decodes - self.budget_prefills
        return {
            "queue": f"{count(self.position, 'sequence')} must go first, and none overtakes "
            "another.",
            "quota": "Its client runs as many sequences as its max_num_seqs allows.",
            "seats": "The only seat is taken."
            if self.seats == 1
            else f"All {self.seats} seats are taken.",
            "blocks": f"{blocks}.",
            "budget": (
                f"A step has {self.budget} tokens: {self.budget_decodes} go to answers, "
                f"{self.budget_prefills} to prompts that have begun, and {left} are left."
            ),
            "nothing": f"Nothing: the next step admits it. {blocks}.",
        }[self.because]


def why_waiting(scheduler: Scheduler, seq_id: SeqId) -> Wait | None:
    """Return why a sequence waits, or None if it does not wait.

    The numbers are those with which the next step begins. While it decodes, it may need blocks and
    preempt sequences, and another sequence may end.
    """
    seq = next((each for each in scheduler.waiting if each.seq_id == seq_id), None)
    if seq is None:
        return None
    manager, running = scheduler.manager, scheduler.running
    config, first = scheduler.config, scheduler.next_waiting
    allocation = find_allocation(manager, seq, -manager.num_blocks)  # as if no other held any
    assert allocation is not None, "a request that can never run is refused when it is added"
    missing = [each.num_missing for each in running if each.is_prefilling]
    num_decodes = len(running) - len(missing)
    budget = config.max_num_batched_tokens
    num_prefills = min(sum(missing), max(0, budget - num_decodes))
    seats_free = config.max_num_seqs - len(running)
    num_spare = scheduler.watermark_blocks if running else 0
    left = budget - num_decodes - num_prefills
    num_missing = seq.num_tokens - allocation.num_computed
    because: Because = "nothing"
    if first is None:
        because = "quota"
    elif first is not seq:
        because = "queue"
    elif seats_free < 1:
        because = "seats"
    elif allocation.num_taken + num_spare > manager.num_available:
        because = "blocks"
    elif left < (1 if config.enable_chunked_prefill else num_missing):
        because = "budget"
    return Wait(
        because=because,
        position=scheduler.waiting.index(seq),
        num_tokens=seq.num_tokens,
        num_cached_tokens=allocation.num_computed,
        blocks_needed=allocation.num_taken,
        blocks_free=manager.num_available - manager.num_cached,
        blocks_evictable=manager.num_cached,
        blocks_spare=num_spare,
        seats=config.max_num_seqs,
        seats_free=seats_free,
        budget=budget,
        budget_decodes=num_decodes,
        budget_prefills=num_prefills,
    )
