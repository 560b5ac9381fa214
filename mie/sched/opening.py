"""Open a waiting sequence's table from the prefix cache, the host, or a kept sequence.

A kept sequence has ended, but its blocks stay allocated for the beams of a beam search that
continue it. Each of them forks its table, so the partly filled last block is shared too, and copied
at the first write. Kept blocks are a cache. When blocks run out they are released first, and a
sequence that would have forked from them is computed from its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from mie.memory.manager import KVCacheManager
from mie.memory.moves import Emit, Room
from mie.memory.table import BlockTable
from mie.sched.sequence import Sequence


class Opener:
    """Opens the tables of sequences that are admitted, and keeps those of some that have ended."""

    def __init__(self, manager: KVCacheManager, emit: Emit) -> None:
        self._manager = manager
        self._emit = emit
        self.kept: dict[str | None, Sequence] = {}
        """The ended sequences that hold blocks, by request id, the oldest first."""

    def find_room(self, seq: Sequence, num_spare: int) -> Room | None:
        """Find blocks with ``num_spare`` left over, or return None if there are too few."""
        return self._manager.find_room(
            seq.token_ids,
            salt=seq.request.cache_salt,
            use_cache=seq.may_read_cache,
            host=seq.host,
            parent=self._parent_of(seq),
            num_spare=num_spare,
        )

    def _parent_of(self, seq: Sequence) -> BlockTable | None:
        """Return the table of the kept sequence that this one continues, or None."""
        request = seq.request
        parent = self.kept.get(request.beam.parent_id) if request.beam else None
        if parent is None or parent.table is None or seq.was_admitted:
            return None
        num_stored = parent.num_computed
        is_same = parent.request.cache_salt == request.cache_salt
        if not is_same or parent.token_ids[:num_stored] != seq.token_ids[:num_stored]:
            return None
        return parent.table if num_stored < seq.num_tokens else None

    def open(self, seq: Sequence, room: Room, row: int) -> BlockTable:
        """Open the table that `find_room` just found."""
        metrics = seq.request.metrics
        event = (seq.seq_id, row, seq.num_tokens, room.num_computed)
        if room.parent is not None:
            self._emit(("branch", seq.seq_id, room.parent.owner, row))
            metrics.num_cached_tokens = room.num_computed
        elif seq.was_admitted:
            self._emit(("resume", *event, "recompute" if seq.host is None else "swap"))
            metrics.num_recomputed_tokens += max(0, seq.num_lost - room.num_computed)
        else:
            self._emit(("admit", *event))
            if not any(each.was_admitted for each in seq.request.sequences):
                metrics.num_cached_tokens = room.num_computed
                if self._manager.shares_full and seq.may_read_cache:
                    self._count_query(seq, room)
        seq.host = None
        return self._manager.open_table(room, seq.seq_id, row)

    def _count_query(self, seq: Sequence, room: Room) -> None:
        num_full = len(room.path) * self._manager.block_size
        query = (seq.request.num_prompt, num_full, room.num_computed - num_full)
        self._manager.stats.add_query(*query)
        if room.num_computed:
            source = room.partial and room.partial.block_id
            self._emit(("hit", seq.seq_id, *query, source))

    # Keeping.

    def keep(self, seq: Sequence, table: BlockTable) -> None:
        """Let an ended sequence keep its blocks."""
        self._emit(("keep", seq.seq_id))
        seq.table = table
        self.kept[seq.request.request_id] = seq

    def drop(self, request_ids: Iterable[str | None]) -> None:
        """Release the blocks that are kept for these requests. Unknown ids are ignored."""
        for request_id in request_ids:
            seq = self.kept.pop(request_id, None)
            if seq is not None and seq.table is not None:
                self._manager.close_table(seq.table)
                seq.table = None
                self._emit(("finish", seq.seq_id, seq.finish_reason))

    def drop_oldest(self) -> bool:
        """Release the blocks that were kept first. Return False if none are kept."""
        oldest = [*self.kept][:1]
        self.drop(oldest)
        return bool(oldest)
