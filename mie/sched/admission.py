"""Admit waiting sequences: find a place for each, and open its block table.

A table is opened from the prefix cache, or from the host.
"""

from __future__ import annotations

import math
from collections import Counter

from mie.config.engine import EngineConfig
from mie.config.params.checks import check_length
from mie.errors import ConfigError, RequestError, shown
from mie.memory.manager import KVCacheManager
from mie.memory.part import Allocation
from mie.memory.table import BlockTable, Emit
from mie.sched.policy import Policy
from mie.sched.sequence import Request, Sequence


def check_budget(config: EngineConfig, max_model_len: int) -> None:
    """Raise `ConfigError` if a whole context can be too long for the step that must take it."""
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}; without chunked"
            f" prefill a step must hold a whole context of {max_model_len} tokens (raise it to"
            " that, lower max_model_len, or allow enable_chunked_prefill)"
        )


def check_fits(
    request: Request, config: EngineConfig, manager: KVCacheManager, max_model_len: int
) -> None:
    """Raise `RequestError` if even an idle engine could not serve the request."""
    num_prompt, policy = request.num_prompt, config.scheduling_policy
    check_length(num_prompt, max_model_len)
    if num_prompt > manager.capacity:
        raise RequestError(
            f"prompt has {num_prompt} tokens; the KV cache holds {manager.capacity} "
            f"(raise num_blocks to at least {manager.blocks_needed(num_prompt + 1)})"
        )
    for name, value, needed in (
        ("priority", request.priority or None, "priority"),
        ("client", request.client, "fair"),
    ):
        if value is not None and policy != needed:
            raise RequestError(
                f"{name} is {shown(value)}; the engine schedules by {policy} "
                f"(set scheduling_policy={needed!r})"
            )


class Admission:
    """The seats, blocks and tokens that a waiting sequence needs."""

    def __init__(
        self, config: EngineConfig, policy: Policy, manager: KVCacheManager, emit: Emit
    ) -> None:
        self._config = config
        self._policy = policy
        self._manager = manager
        self._seats = policy.seats
        self._emit = emit
        self.num_spare = math.ceil(config.watermark * manager.num_blocks)
        """The number of blocks that must be left while others run."""

    @property
    def num_reserved(self) -> int:
        """The number of blocks that must be left, those for promised choices included."""
        return self.num_spare + self._seats.num_promised * self._manager.blocks_per_fork

    # Places.

    def next(self, step: int) -> tuple[Sequence | None, list[Sequence]]:
        """Return the sequence that is admitted next, and those that must be preempted for it.

        If clients have shares, it is None if the next sequence finds no place even so.
        """
        self._policy.settle()
        head = self._policy.first()
        if not self._policy.is_shared or self._config.batching == "static":
            return head, []
        if head is None or self._has_place(head):
            return head, []
        victims = self._victims(head, step)
        return head if victims else None, victims

    def _has_place(self, head: Sequence) -> bool:
        """Whether ``head`` could be admitted now, or only its own client's sequences run."""
        running = self._seats.running
        if all(seq.request.client == head.request.client for seq in running):
            return True
        room = self.find_room(head, self.num_spare) if self._seats.num_free else None
        return room is not None and self._fits(head, room, len(running))

    def _victims(self, head: Sequence, step: int) -> list[Sequence]:
        """Return the sequences to preempt for ``head``, or none if they would not suffice."""
        running = self._seats.running
        victims = self._policy.victims(head, step)
        if not victims:
            return []
        room, num_kept = self.room_in_empty_pool(head), len(running)
        num_blocks = self._manager.num_blocks - self._manager.pool.num_reserved
        num_holders = Counter(block_id for seq in running for block_id in seq.held_ids)
        for count, victim in enumerate(victims, start=1):
            num_kept -= 1
            for block_id in victim.held_ids:
                num_holders[block_id] -= 1
                if not num_holders[block_id]:
                    del num_holders[block_id]
            # Each of those that continue may need a block before ``head`` is admitted.
            num_spare = self.num_spare + num_kept if num_kept else 0
            num_left = num_blocks - len(num_holders) - num_spare
            if room.num_taken <= num_left and self._fits(head, room, num_kept):
                return victims[:count]
        return []

    def _fits(self, head: Sequence, room: Allocation, num_running: int) -> bool:
        """Whether the budget has room for an unchunked prompt beside the decodes of others."""
        num_left = self._config.max_num_batched_tokens - num_running
        num_missing = head.num_tokens - room.num_computed
        return self._config.enable_chunked_prefill or num_missing <= num_left

    # Tables.

    def find_room(self, seq: Sequence, num_spare: int) -> Allocation | None:
        """Find blocks with ``num_spare`` left over, or return None if there are too few."""
        return self._manager.find_allocation(
            seq.token_ids,
            salt=seq.request.cache_salt,
            use_cache=seq.may_read_cache,
            host=seq.host,
            num_reserved=num_spare,
        )

    def room_in_empty_pool(self, seq: Sequence) -> Allocation:
        """Return the blocks that a sequence would need if no other held any."""
        room = self.find_room(seq, -self._manager.num_blocks)
        assert room is not None, "a request that can never run is refused when it is added"
        return room

    def open(self, seq: Sequence, room: Allocation, row: int) -> BlockTable:
        """Open the table that `find_room` just found."""
        metrics = seq.request.metrics
        event = (seq.seq_id, row, seq.num_tokens, room.num_computed)
        if seq.was_admitted:
            self._emit(("resume", *event, "recompute" if seq.host is None else "swap"))
            metrics.num_recomputed_tokens += max(0, seq.num_lost - room.num_computed)
        else:
            self._emit(("admit", *event))
            if not any(each.was_admitted for each in seq.request.sequences):
                metrics.num_cached_tokens = room.num_computed
                if self._manager.shares_full and seq.may_read_cache:
                    self._count_query(seq, room)
        seq.host = None
        return self._manager.open_table(room, seq.seq_id, row, seq.request.notes)

    def _count_query(self, seq: Sequence, room: Allocation) -> None:
        num_full = len(room.path) * self._manager.block_size
        query = (seq.request.num_prompt, num_full, room.num_computed - num_full)
        self._manager.stats.add_query(*query)
        if room.num_computed:
            source = room.partial and room.partial.block_id
            self._emit(("hit", seq.seq_id, *query, source))
