"""Find out whether a sequence could be admitted, and which others would have to make way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from mie.config.engine import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.memory.moves import Room
from mie.sched.opening import Opener
from mie.sched.policy import Policy
from mie.sched.seats import Seats
from mie.sched.sequence import Sequence


class Places:
    """The seats, blocks and tokens of a step that a sequence needs to be admitted."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        manager: KVCacheManager,
        opener: Opener,
        seats: Seats,
    ) -> None:
        self._config = config
        self._policy = policy
        self._manager = manager
        self._opener = opener
        self._seats = seats
        self._num_spare = math.ceil(config.watermark * manager.num_blocks)

    def next(self, waiting: list[Sequence], step: int) -> tuple[Sequence | None, list[Sequence]]:
        """Return the sequence that is admitted next, and those that must be preempted for it.

        If clients have shares, it is None if the next sequence finds no place even so.
        """
        self._policy.settle(self._seats.running)
        head = self._policy.first(waiting, self._seats)
        if not self._policy.is_shared or self._config.batching == "static":
            return head, []
        if head is None or self._has(head):
            return head, []
        victims = self._victims(head, step)
        return head if victims else None, victims

    def _has(self, head: Sequence) -> bool:
        """Whether ``head`` could be admitted now, or only its own client's sequences run."""
        running = self._seats.running
        if all(seq.request.client == head.request.client for seq in running):
            return True
        if not self._seats.num_free:
            return False
        room = self._opener.find_room(head, self._num_spare)
        return room is not None and self._fits(head, room, len(running))

    def _victims(self, head: Sequence, step: int) -> list[Sequence]:
        """Return the sequences to preempt for ``head``, or none if they would not suffice."""
        victims = self._policy.victims(head, self._seats.running, step)
        if not victims:
            return []
        # With this many blocks to spare there is always room.
        room = self._opener.find_room(head, -self._manager.num_blocks)
        assert room is not None, "a request that can never run is refused when it is added"
        kept = _Holders(self._seats.running)
        for count, victim in enumerate(victims, start=1):
            kept.remove(victim)
            # Each of those that go on may need a block before ``head`` is admitted.
            num_spare = self._num_spare + kept.num_seqs if kept.num_seqs else 0
            num_left = self._manager.num_blocks - kept.num_blocks - num_spare
            if self._manager.num_taken(room) <= num_left and self._fits(head, room, kept.num_seqs):
                return victims[:count]
        return []

    def _fits(self, head: Sequence, room: Room, num_running: int) -> bool:
        """Whether the budget has room for an unchunked prompt beside the decodes of others."""
        num_left = self._config.max_num_batched_tokens - num_running
        num_missing = head.num_tokens - room.num_computed
        return self._config.enable_chunked_prefill or num_missing <= num_left


class _Holders:
    """Running sequences that are removed one by one, to see how many blocks the others hold."""

    def __init__(self, seqs: Iterable[Sequence]) -> None:
        self.num_seqs = 0
        self._counts: Counter[int] = Counter()
        for seq in seqs:
            self.num_seqs += 1
            self._counts.update(_blocks_of(seq))

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the sequences hold, each counted once."""
        return len(self._counts)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence."""
        self.num_seqs -= 1
        for block_id in _blocks_of(seq):
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id]


def _blocks_of(seq: Sequence) -> list[int]:
    return [] if seq.table is None else seq.table.block_ids
