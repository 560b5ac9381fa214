"""Keep the queues in order, and divide a step's tokens.

Every sequence has one key that orders both queues. The smallest key is admitted first and the
largest is preempted first. The key is fixed when its request arrives. The fair policy
(`mie.sched.fair`) fixes it when the request is admitted, and orders the sequences of each client by
it.
"""

from dataclasses import dataclass

from mie.config.engine import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.memory.table import Emit
from mie.sched.seats import Seats, dequeue, enqueue
from mie.sched.sequence import Request, Sequence

VICTIM_RULES = {
    "fcfs": "last arrived",
    "priority": "lowest priority, then last arrived",
    "sjf": "longest job",
    "fair": "last of the client with the largest share",
}
"""Which sequence each policy preempts, in words."""


@dataclass(slots=True)
class Budget:
    """The tokens that a step has left, and each client's part if all want more than there are."""

    left: int
    parts: dict[str | None, int] | None = None

    def most(self, request: Request) -> int:
        """Return how many tokens a request's sequences may take."""
        if self.parts is None:
            return self.left
        return min(self.left, self.parts.get(request.client, 0))

    def take(self, request: Request, count: int) -> None:
        """Take tokens for a sequence of a request."""
        self.left -= count
        if self.parts is not None:
            self.parts[request.client] -= count


class Policy:
    """The queue and the seats of requests whose rank is fixed when they arrive."""

    is_shared = False
    """Whether clients have shares, so that sequences are preempted to admit others."""

    def __init__(self, config: EngineConfig, emit: Emit, manager: KVCacheManager) -> None:
        self.victim_rule = VICTIM_RULES[config.scheduling_policy]
        self._config = config
        self._emit = emit
        self._manager = manager
        self.max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        """Maximum number of tokens of a chunk."""
        self.clear()

    def clear(self) -> None:
        """Begin with empty queues."""
        self.waiting: list[Sequence] = []
        self.seats = Seats(self._config.max_num_seqs)

    def rank(self, request: Request, step: int) -> int:
        """Return the rank of a request that arrives now, and will wait: the first part of its key.

        ``fcfs``: the same for all. ``priority``: the request's own. ``sjf``: the maximum number of
        tokens of a choice. Under ``sjf`` a waiting request ages by ``sjf_ageing`` tokens a step, so
        a request that arrives later starts that far behind. This gives the same differences as
        ageing every request at every step, so a rank never changes.
        """
        if self._config.scheduling_policy == "priority":
            return request.priority
        if self._config.scheduling_policy == "sjf":
            return request.sequences[0].max_tokens + (self._config.sjf_ageing or 1) * step
        return 0

    # The queue.

    def enqueue(self, seq: Sequence) -> None:
        """Let a sequence wait."""
        enqueue(self.waiting, seq)

    def dequeue(self, seq: Sequence) -> bool:
        """Remove a waiting sequence. Return False if it does not wait."""
        return dequeue(self.waiting, seq)

    def first(self) -> Sequence | None:
        """Return the sequence that is admitted next, or None if none may be."""
        return self.waiting[0] if self.waiting else None

    def num_forks(self, seq: Sequence) -> int:
        """Return the number of seats for choices that fork from ``seq``, overtaking none."""
        return 0 if self.waiting and self.waiting[0].key < seq.key else self.seats.num_free

    def admit(self, seq: Sequence) -> None:
        """Note that a sequence's blocks were opened. It is in no queue."""

    # Accounts.

    def settle(self) -> None:
        """Charge the running sequences for their tokens, before sequences are admitted."""

    def charge(self, request: Request) -> None:
        """Charge a request for its tokens, because one of its sequences got or lost its seat."""

    # The step.

    def order(self, step: int) -> list[Sequence]:
        """Return the running sequences; those at the end are preempted if blocks run out."""
        return self.seats.running[:]

    def victims(self, head: Sequence, step: int) -> list[Sequence]:
        """Return the sequences that may be preempted to admit ``head``, in this order."""
        return []

    def budget(self, head: Sequence | None) -> Budget:
        """Return a step's budget. ``head`` is the sequence that will be admitted, if any."""
        return Budget(self._config.max_num_batched_tokens)
