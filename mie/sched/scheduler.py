"""Iteration-level continuous batching with chunked prefill and preemption.

A step takes the running sequences' decodes first, then their unfinished prompts, then admits from
the head of the queue, all under one token budget. Both queues are ordered by the policy's key, and
nobody overtakes. When a decode needs a block and there is none, the last of the running gives its
blocks back and waits again: it keeps its tokens, and is computed again or swapped back in.
The rules, with their reasons: docs/scheduling.md.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from mie.config import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.memory.moves import Emit, Room
from mie.memory.table import BlockTable
from mie.sched.admission import check_budget, check_fits
from mie.sched.ahead import reserve_ahead, rows_ahead
from mie.sched.audit import check_queues, queues
from mie.sched.plan import Chunk, SeqId, StepPlan
from mie.sched.policy import VICTIM_RULES, WaitingQueue, rank_of
from mie.sched.sequence import FinishReason, Request, Sequence


class Scheduler:
    """The queues: ``waiting`` and ``running``, each in order of the sequences' keys."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        max_model_len: int,
        emit: Emit = lambda record: None,
    ) -> None:
        check_budget(config, max_model_len)
        self.manager = manager
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self._config = config
        self._emit = emit
        self._max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._num_spare = math.ceil(config.watermark * manager.num_blocks)
        self._rows: list[Sequence | None] = [None] * config.max_num_seqs
        self._free_rows = list(range(config.max_num_seqs))  # a heap: low rows are taken first
        self._new_rows: dict[int, Sequence] = {}  # rows that the runner has yet to hear of
        self._num_seats = 0  # of the running, as the next two
        self._num_fork_copies = 0
        self._num_prefilling = 0
        self._exported: list[Sequence] = []  # swapped out in this step
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request, or raise `RequestError` if it could never run."""
        check_fits(request, self._config, self.manager, self.max_model_len)
        # The last token's keys and values are never stored.
        longest = min(self.max_model_len, self.manager.num_blocks * self.manager.block_size + 1)
        rank = rank_of(self._config, request, self._step, longest)
        request.enter(rank, longest)
        event = (request.request_id, request.number, rank, request.num_prompt)
        self._emit(("add", *event, request.params.n, request.params.max_tokens))
        self.waiting.add(request.sequences[0])

    # One step.

    def schedule(self, *, may_admit: bool = True) -> StepPlan:
        """Decide what the next step computes, and reserve the blocks for it. Without ``may_admit``
        it is the rest of what `ahead` foretold."""
        self._step += 1
        is_drained = not self.running
        preempted: list[SeqId] = []
        budget = self._config.max_num_batched_tokens
        decodes = self._take_decodes(budget, preempted)
        budget -= len(decodes)
        chunks: list[Chunk] = []
        if self._config.async_scheduling:
            reserve_ahead(self.manager, self.running)
        if self._num_prefilling:
            budget = self._take_prefills(budget, chunks)
        if may_admit and self._may_admit(is_drained, preempted):
            self._admit(budget, chunks)
        new_rows = tuple([seq.new_row() for seq in self._new_rows.values()])
        self._new_rows.clear()
        return StepPlan(
            step=self._step,
            new_rows=new_rows,
            moves=self.manager.take_moves(),
            decodes=tuple(decodes),
            chunks=tuple(chunks),
            preempted=tuple(preempted),
        )

    def ahead(self, plan: StepPlan) -> tuple[int, ...]:
        """The rows that decode in the step after ``plan``, which is not taken in yet; none, if more
        than decodes may follow."""
        has_seat = self.waiting and self._has_seats(self.waiting.first)
        if len(plan.decodes) < len(self.running) or has_seat:
            return ()
        return rows_ahead(self.running)

    def _take_decodes(self, budget: int, preempted: list[SeqId]) -> list[int]:
        """The rows that decode. Most need no block, and cost one comparison."""
        rows: list[int] = []
        for seq in self.running[:]:
            if seq.is_prefilling:
                continue
            table = seq.table
            if table is None or len(rows) == budget:
                break  # from a sequence that was preempted just now, all the rest were, too
            if table.num_tokens == table.num_writable and not self._grow(seq, preempted):
                break
            rows.append(table.row)
        rows.sort()
        return rows

    def _grow(self, seq: Sequence, preempted: list[SeqId]) -> bool:
        """Room for the next token, if need be at the cost of those with a larger key, the largest
        first; False if the sequence was itself the last and had to go."""
        assert seq.table is not None
        while not self.manager.grow(seq.table, seq.num_tokens):
            victim = self.running[-1]
            self.preempt(victim, by=seq)
            preempted.append(victim.seq_id)
            if victim is seq:
                return False
        return True

    def _take_prefills(self, budget: int, chunks: list[Chunk]) -> int:
        """Chunks of the running prompts, whose blocks they have already; the budget left."""
        for seq in self.running:
            if seq.is_prefilling:
                count = self._chunk_size(seq.num_missing, budget)
                if not count:
                    break
                chunks.append(seq.chunk(count))
                budget -= count
        return budget

    def _chunk_size(self, num_missing: int, budget: int) -> int:
        if not self._config.enable_chunked_prefill:
            return num_missing if num_missing <= budget else 0
        return min(num_missing, budget, self._max_chunk)

    def _may_admit(self, is_drained: bool, preempted: list[SeqId]) -> bool:
        if self._config.batching == "static":
            return is_drained
        return not preempted or self._config.admit_after_preemption

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """Move sequences from the head of the queue to the running while there are seats, blocks
        and budget. A static batch is filled whatever the budget; its prompts take turns."""
        is_static = self._config.batching == "static"
        while self.waiting and (budget or is_static):
            seq = self.waiting.first
            if not self._has_seats(seq):
                return
            request = seq.request
            room = self.manager.find_room(
                seq.token_ids,
                salt=request.cache_salt,
                use_cache=self._may_use_cache(request),
                host=seq.host,
                num_spare=self._num_spare_for(seq),
            )
            if room is None:
                return
            count = self._chunk_size(seq.num_tokens - room.num_computed, budget)
            if not count and not is_static:
                return
            self._open(seq, room)
            if count:
                chunks.append(seq.chunk(count))
            budget = budget - count if count else 0  # a prompt that waits whole is not passed

    def _has_seats(self, seq: Sequence) -> bool:
        return self._num_seats + seq.num_seats <= self._config.max_num_seqs

    def _may_use_cache(self, request: Request) -> bool:
        is_scored = request.num_prompt_scored >= request.num_prompt_to_score
        may_read = is_scored and not request.params.skip_reading_prefix_cache
        return self._config.enable_prefix_caching and may_read

    def _num_spare_for(self, seq: Sequence) -> int:
        """Blocks to leave free: the watermark, and those that the forks to come will copy. Alone, a
        sequence may have them all, or it could wait for ever."""
        if not self.running:
            return 0
        return self._num_spare + self._num_fork_copies + self._fork_copies(seq)

    def _fork_copies(self, seq: Sequence) -> int:
        """Blocks that the choices of an unforked request will copy."""
        is_split = seq.request.num_prompt % self.manager.block_size > 0
        return seq.num_seats - 1 if is_split else 0

    def _open(self, seq: Sequence, room: Room) -> None:
        self.waiting.remove(seq)
        row = heapq.heappop(self._free_rows)
        event = (seq.seq_id, row, seq.num_tokens, room.num_computed)
        if seq.was_admitted:
            self._emit(("resume", *event, "recompute" if seq.host is None else "swap"))
            recomputed = max(0, seq.num_lost - room.num_computed)
            seq.request.metrics.num_recomputed_tokens += recomputed
        else:
            self._emit(("admit", *event))
            self._count_query(seq, room)
        seq.was_admitted, seq.host = True, None
        table = self.manager.open_table(room, seq.seq_id, row)
        self._seat(seq, table)
        seq.is_prefilling = True
        self._num_prefilling += 1
        insort(self.running, seq, key=lambda seq: seq.key)

    def _count_query(self, seq: Sequence, room: Room) -> None:
        request = seq.request
        request.metrics.num_cached_tokens = room.num_computed
        if self._may_use_cache(request):
            num_full = len(room.path) * self.manager.block_size
            num_partial = room.num_computed - num_full
            self.manager.stats.add_query(request.num_prompt, num_full, num_partial)
            if room.num_computed:
                source = room.partial and room.partial.block_id
                hit = (request.num_prompt, num_full, num_partial, source)
                self._emit(("hit", seq.seq_id, *hit))

    def _seat(self, seq: Sequence, table: BlockTable) -> None:
        seq.table, seq.row = table, table.row
        self._rows[table.row] = self._new_rows[table.row] = seq
        self._num_seats += seq.num_seats
        self._num_fork_copies += self._fork_copies(seq)

    def update(
        self, plan: StepPlan, decoded: Items[int], sampled: Items[Items[int]]
    ) -> list[Sequence]:
        """Take in a step's result: a token for each decode, and for each chunk one for each of its
        choices.

        Returns the sequences that got a token, in that order; those that ended have a
        ``finish_reason`` and no blocks.
        """
        self.manager.end_step()
        self._exported.clear()
        seqs = [seq for seq in map(self._rows.__getitem__, plan.decodes) if seq is not None]
        if seqs:
            self._emit(("decode", plan.decodes))
            self.manager.advance([seq.table for seq in seqs if seq.table is not None])
        for seq, token_id in zip(seqs, decoded, strict=True):
            seq.token_ids.append(token_id)
            if token_id in seq.end_token_ids or len(seq.token_ids) >= seq.max_tokens:
                self._end(seq, token_id)
        for chunk, token_ids in zip(plan.chunks, sampled, strict=True):
            seqs += self._update_chunk(chunk, token_ids)
        return seqs

    def _update_chunk(self, chunk: Chunk, token_ids: Items[int]) -> list[Sequence]:
        seq = self._rows[chunk.row]
        assert seq is not None
        assert seq.table is not None
        request = seq.request
        self._emit(("prefill", seq.seq_id, chunk.start, len(chunk.token_ids), chunk.choices))
        self.manager.commit(seq.table, chunk.end)
        request.num_prompt_scored = max(request.num_prompt_scored, chunk.scored[1])
        if chunk.choices:
            seq.is_prefilling = False
            self._num_prefilling -= 1
            if not request.is_forked:
                self._fork(seq)
        chosen = [request.sequences[choice] for choice in chunk.choices]
        for each, token_id in zip(chosen, token_ids, strict=True):
            each.token_ids.append(token_id)
        for each, token_id in zip(chosen, token_ids, strict=True):
            if token_id in each.end_token_ids or each.num_tokens >= each.max_tokens:
                self._end(each, token_id)
        return chosen

    def _fork(self, first: Sequence) -> None:
        """The prompt is computed: seat the other choices beside the first, over its blocks."""
        assert first.table is not None
        request = first.request
        self._num_seats -= first.num_seats - 1
        self._num_fork_copies -= self._fork_copies(first)
        request.is_forked = True
        for sibling in request.sequences[1:]:
            row = heapq.heappop(self._free_rows)
            self._emit(("fork", sibling.seq_id, first.seq_id, row))
            table = self.manager.fork(first.table, sibling.seq_id, row, sibling.token_ids)
            self._seat(sibling, table)
            sibling.was_admitted = True
            insort(self.running, sibling, key=lambda seq: seq.key)

    def _end(self, seq: Sequence, token_id: int) -> None:
        """Finish a sequence whose last token or length may be its end."""
        request, params = seq.request, seq.request.params
        is_forced = seq.num_generated <= len(params.trace_decode_token_ids or ())
        if token_id in request.eos_token_ids and not is_forced:
            self.finish(seq, "stop")
        elif token_id in request.stop_token_ids and not is_forced:
            self.finish(seq, "stop", token_id)
        elif seq.num_tokens >= seq.max_tokens:
            self.finish(seq, "length")

    # Leaving, legal in every state.

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one choice and give its blocks back; its siblings go on."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.table is not None:
            self._leave(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if seq.host is not None:
            self._drop_host(seq)
        self._emit(("finish", seq.seq_id, reason))

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End every unfinished choice of a request."""
        for seq in request.sequences:
            self.finish(seq, reason)

    def owner_of(self, row: int) -> Request | None:
        """Return the request whose sequence has a row."""
        seq = self._rows[row]
        return None if seq is None else seq.request

    def preempt(self, seq: Sequence, by: Sequence | None = None, *, swap: bool = True) -> None:
        """Take a running sequence's blocks, for ``by`` to have; it keeps its tokens and waits."""
        assert seq.table is not None
        metrics = seq.request.metrics
        metrics.num_preemptions += 1
        num_computed, mode = seq.num_computed, "recompute"
        if swap and self._config.preemption_mode == "swap" and num_computed:
            seq.host = self.manager.swap_out(seq.table)
            mode = "swap" if seq.host else "recompute: host pool full"
        if seq.host is not None:
            metrics.num_swaps += 1
            self._exported.append(seq)
        seq.num_lost = 0 if seq.host else num_computed
        self._leave(seq)
        self.waiting.add(seq)
        rule = VICTIM_RULES[self._config.scheduling_policy] if by else "all: the step broke off"
        self._emit(("preempt", seq.seq_id, by and by.seq_id, mode, rule, seq.num_lost))

    def preempt_all(self) -> None:
        """Forget what is in the cache's tables: what a step that was broken off leaves behind.

        What it had swapped in or out is computed again, since the moves may not have been made.
        """
        self.manager.end_step()
        for seq in self._exported:
            if seq.host is not None:
                seq.num_lost = seq.host.num_tokens
                self._drop_host(seq)
        self._exported.clear()
        while self.running:
            self.preempt(self.running[-1], swap=False)

    def rebuild(self, requests: Iterable[Request]) -> None:
        """TEMPORARY."""
        self.manager.reset()
        self._rows = [None] * self._config.max_num_seqs
        self._free_rows = list(range(self._config.max_num_seqs))
        self._new_rows = {}
        self._num_seats = self._num_fork_copies = self._num_prefilling = 0
        self._exported.clear()
        self.running.clear()
        self.waiting = WaitingQueue()
        for request in requests:
            for seq in request.sequences:
                seq.table = seq.host = seq.row = None
                seq.is_prefilling = False
                if request.is_forked and seq.finish_reason is None and seq.num_generated:
                    self._end(seq, seq.token_ids[-1])
            for seq in request.sequences if request.is_forked else request.sequences[:1]:
                if seq.finish_reason is None:
                    self.waiting.add(seq)

    def _leave(self, seq: Sequence) -> None:
        assert seq.table is not None
        assert seq.row is not None
        self._num_seats -= seq.num_seats
        self._num_fork_copies -= self._fork_copies(seq)
        self._num_prefilling -= seq.is_prefilling
        self.running.remove(seq)
        seq.request.metrics.num_copied_blocks += seq.table.num_copies
        self.manager.close_table(seq.table)
        heapq.heappush(self._free_rows, seq.row)
        self._rows[seq.row] = None
        self._new_rows.pop(seq.row, None)
        seq.table, seq.row, seq.is_prefilling = None, None, False

    def _drop_host(self, seq: Sequence) -> None:
        assert seq.host is not None
        self.manager.drop_host(seq.host)
        seq.host = None

    # For tests and the event log.

    def snapshot(self) -> dict[str, Any]:
        """The queues, their sequences and the blocks, as plain data."""
        return {**self.manager.snapshot(), **queues(list(self.waiting), self.running)}

    def check_invariants(self) -> None:
        """Assert what holds between steps; for tests."""
        waiting = list(self.waiting)
        tables = [seq.table for seq in self.running if seq.table is not None]
        self.manager.check_invariants(tables, [seq.host for seq in waiting if seq.host is not None])
        check_queues(waiting, self.running, self._rows, self._free_rows)
        assert self._num_seats == sum(seq.num_seats for seq in self.running)
        assert self._num_seats <= self._config.max_num_seqs
        assert self._num_fork_copies == sum(map(self._fork_copies, self.running))
        assert self._num_prefilling == sum(seq.is_prefilling for seq in self.running)
