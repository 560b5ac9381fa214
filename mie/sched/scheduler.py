"""Iteration-level continuous batching with chunked prefill, strict first come, first served.

A step takes the running in order of admission, then admits from the head of the queue, all under
one token budget. A prompt that is not finished has used up its step's budget, so only the last of
the running can be one: decodes come first. When a block is missing, the last admitted sequence
gives its blocks back and goes to the front of the queue: it keeps its tokens and is recomputed.
"""

from collections import deque
from collections.abc import Sequence as Items

from mie.config import EngineConfig
from mie.errors import RequestError
from mie.memory.manager import Copy, KVCacheManager
from mie.memory.table import BlockTable
from mie.sched.plan import Chunk, NewRow, SeqId, StepPlan
from mie.sched.sequence import FinishReason, Request, Sequence


class Scheduler:
    """The queues. ``waiting`` is in order of arrival, ``running`` in order of admission."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, max_model_len: int) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_num_seqs = config.max_num_seqs
        self._token_budget = config.max_num_batched_tokens
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request, or raise `RequestError` if it could never run."""
        self._check_fits(request)
        self.waiting.append(request.sequences[0])

    def _check_fits(self, request: Request) -> None:
        num_prompt, manager = request.num_prompt, self.manager
        if num_prompt >= self.max_model_len:
            raise RequestError(
                f"prompt has {num_prompt} tokens; the context holds {self.max_model_len}, the "
                "answer included (shorten the prompt, or raise max_model_len to at least "
                f"{num_prompt + 1} if the model allows it)"
            )
        if manager.blocks_for(num_prompt) > manager.num_blocks:
            raise RequestError(
                f"prompt has {num_prompt} tokens; the KV cache holds "
                f"{manager.num_blocks * manager.block_size} "
                f"(raise num_blocks to at least {manager.blocks_for(num_prompt + 1)})"
            )
        if request.params.n > self._max_num_seqs:
            raise RequestError(
                f"n is {request.params.n}; at most {self._max_num_seqs} sequences run at once "
                f"(raise max_num_seqs to at least {request.params.n})"
            )

    # One step.

    def schedule(self) -> StepPlan:
        """Decide what the next step computes, and reserve the blocks for it."""
        chunks: list[Chunk] = []
        preempted: list[SeqId] = []
        budget = self._token_budget
        for seq in list(self.running):
            if budget == 0 or seq.table is None:
                break  # from a sequence that was preempted just now, all the rest were, too
            count = min(seq.num_missing, budget)
            copies = self._grow_or_preempt(seq, seq.num_computed + count, preempted)
            if copies is not None:
                chunks.append(self._chunk(seq, count, copies))
                budget -= count
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            copies = self._admit(seq)
            if copies is None:
                break  # strict order: nobody overtakes
            count = min(seq.num_missing, budget)
            chunks.append(self._chunk(seq, count, copies))
            budget -= count
        self._step += 1
        return StepPlan(step=self._step, chunks=tuple(chunks), preempted=tuple(preempted))

    def _grow_or_preempt(
        self, seq: Sequence, num_tokens: int, preempted: list[SeqId]
    ) -> tuple[Copy, ...] | None:
        """Room for ``num_tokens`` of the sequence, if need be at the cost of those admitted after
        it, the last first; None if it was itself the last and had to go."""
        assert seq.table is not None
        while True:
            copies = self.manager.grow(seq.table, num_tokens)
            if copies is not None:
                return copies
            victim = self.running[-1]
            self.preempt(victim)
            preempted.append(victim.seq_id)
            if victim is seq:
                return None

    def _admit(self, seq: Sequence) -> tuple[Copy, ...] | None:
        """Move the head of the queue to the running, with blocks for all its tokens; else None."""
        num_seats = sum(other.num_seats for other in self.running) + seq.num_seats
        if num_seats > self._max_num_seqs:
            return None
        request = seq.request
        use_cache = request.num_prompt_scored >= request.num_prompt_to_score
        table = self.manager.open_table(seq.token_ids, use_cache=use_cache)
        copies = self.manager.grow(table, seq.num_tokens)
        if copies is None:
            self.manager.close_table(table)
            return None
        self.waiting.popleft()
        self.running.append(seq)
        self._seat(seq, table)
        seq.num_recomputed += max(0, seq.num_lost - table.num_cached)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = table.num_cached
        return copies

    def _seat(self, seq: Sequence, table: BlockTable) -> None:
        seq.table, seq.row, seq.is_new_row = table, self._free_rows.pop(), True
        seq.num_computed = table.num_tokens

    def _chunk(self, seq: Sequence, count: int, copies: tuple[Copy, ...]) -> Chunk:
        assert seq.table is not None
        assert seq.row is not None
        request, start = seq.request, seq.num_computed
        end = start + count
        choices: tuple[int, ...] = ()
        if end == seq.num_tokens:
            choices = (seq.index,) if request.is_forked else tuple(range(request.params.n))
        new_row = self._new_row(seq) if seq.is_new_row else None
        seq.is_new_row = False
        scored = (max(start, request.num_prompt_scored), min(end, request.num_prompt_to_score))
        return Chunk(
            seq_id=seq.seq_id,
            row=seq.row,
            start=start,
            token_ids=tuple(seq.token_ids[start:end]),
            block_updates=seq.table.take_changes(),
            copies=copies,
            choices=choices,
            scored=scored if scored[0] < scored[1] else (0, 0),
            new_row=new_row,
        )

    def _new_row(self, seq: Sequence) -> NewRow:
        request = seq.request
        return NewRow(
            token_ids=tuple(seq.token_ids),
            num_prompt=request.num_prompt,
            params=request.params,
            banned_ids=tuple(sorted(request.eos_token_ids | request.stop_token_ids)),
            draw_key=request.draw_key,
        )

    def update(self, plan: StepPlan, token_ids: Items[Items[int]]) -> list[Sequence]:
        """Take in a step's result: the sampled tokens of each chunk, one for each of its choices.

        Returns the sequences that got a token, in that order; those that ended have a
        ``finish_reason`` and no blocks.
        """
        running = {seq.seq_id: seq for seq in self.running}
        sampled: list[Sequence] = []
        for chunk, chunk_token_ids in zip(plan.chunks, token_ids, strict=True):
            seq = running[chunk.seq_id]
            request = seq.request
            assert seq.table is not None
            seq.num_computed = chunk.end
            self.manager.commit(seq.table, seq.token_ids, chunk.end)
            request.num_prompt_scored = max(request.num_prompt_scored, chunk.scored[1])
            if chunk.choices and not request.is_forked:
                self._fork(seq)
            for choice, token_id in zip(chunk.choices, chunk_token_ids, strict=True):
                chosen = request.sequences[choice]
                self._append(chosen, token_id)
                sampled.append(chosen)
        return sampled

    def _fork(self, first: Sequence) -> None:
        """The prompt is computed: seat the other choices beside the first, over its blocks."""
        assert first.table is not None
        request = first.request
        request.is_forked = True
        place = self.running.index(first) + 1
        siblings = request.sequences[1:]
        self.running[place:place] = siblings
        for sibling in siblings:
            self._seat(sibling, self.manager.fork(first.table))
            sibling.num_cached_tokens = first.num_cached_tokens

    def _append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        request, params = seq.request, seq.request.params
        is_forced = seq.num_generated <= len(params.trace_decode_token_ids or ())
        longest = min(self.max_model_len, self.manager.num_blocks * self.manager.block_size + 1)
        if token_id in request.eos_token_ids and not is_forced:
            self.finish(seq, "stop")
        elif token_id in request.stop_token_ids and not is_forced:
            self.finish(seq, "stop", token_id)
        elif seq.num_generated == params.max_tokens or seq.num_tokens >= longest:
            self.finish(seq, "length")

    # Leaving, legal in every state.

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one choice and give its blocks back; its siblings go on."""
        if seq.finish_reason is not None:
            return
        assert seq.request.is_forked or reason == "abort", "an unforked choice has no text to end"
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.table is not None:
            self._leave(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def abort(self, request: Request) -> None:
        """End every choice of a request."""
        for seq in request.sequences:
            self.finish(seq, "abort")

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it keeps its tokens and waits first in the queue."""
        seq.num_preemptions += 1
        seq.num_lost = seq.num_computed
        self._leave(seq)
        self.waiting.appendleft(seq)

    def preempt_all(self) -> None:
        """Forget what is in the cache's tables: what a step that was broken off leaves behind."""
        while self.running:
            self.preempt(self.running[-1])

    def _leave(self, seq: Sequence) -> None:
        assert seq.table is not None
        assert seq.row is not None
        self.running.remove(seq)
        self.manager.close_table(seq.table)
        self._free_rows.append(seq.row)
        seq.table, seq.row, seq.num_computed = None, None, 0

    def check_invariants(self) -> None:
        """Assert what holds between steps; for tests."""
        self.manager.check_invariants(seq.table for seq in self.running if seq.table is not None)
        order = [seq.seq_id for seq in [*self.running, *self.waiting]]
        assert order == sorted(set(order)), "somebody overtook"
        rows = [seq.row for seq in self.running]
        assert len({*rows, *self._free_rows}) == len(rows) + len(self._free_rows), "a shared row"
        for seq in self.running:
            assert seq.finish_reason is None
            assert seq.table is not None
            assert seq.num_missing >= 1
            assert seq.num_computed == seq.table.num_tokens
        assert all(seq.num_missing == 1 for seq in self.running[:-1]), "a prefill before a decode"
