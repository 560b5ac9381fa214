"""Schedule with iteration-level continuous batching, chunked prefill and preemption.

A step takes the decodes of the running sequences first, then the prompts in progress, and then
admits from the head of the queue, all under one token budget. The queue has an order, and no
sequence overtakes another. When a decode needs a block and none is left, the last running sequence
is preempted. It keeps its tokens, waits again, and is recomputed or swapped back in.
docs/scheduling.md states the rules and their reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items

from mie.config.engine import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Allocation
from mie.memory.table import Emit
from mie.sched.admission import count_admission, find_allocation
from mie.sched.ahead import reserve_ahead, rows_ahead
from mie.sched.draft import Budget, StepDraft
from mie.sched.limits import check_budget, check_fits, chunk_size, watermark_blocks
from mie.sched.orders import ORDERS
from mie.sched.plan import Chunk, StepPlan
from mie.sched.result import ChunkResult, StepResult
from mie.sched.rows import RunningRows
from mie.sched.sequence import FinishReason, Request, Sequence
from mie.sched.speculation import Drafter, Speculation
from mie.sched.swap import drop_host, swap_out


class Scheduler:
    """Plans each step: the tokens that waiting and running sequences compute."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        max_model_len: int,
        emit: Emit = lambda record: None,
        drafter: Drafter | None = None,
    ) -> None:
        """Schedule in the memory of ``manager``. A ``drafter`` guesses the next tokens."""
        check_budget(config, max_model_len)
        self.config = config
        self.manager = manager
        self.max_model_len = max_model_len
        # The last token's keys and values are never stored.
        self.longest = min(max_model_len, manager.capacity + 1)
        """Maximum number of tokens of a sequence, the prompt's included."""
        self.watermark_blocks = watermark_blocks(config, manager)
        """Number of blocks that admission leaves free while others run."""
        self._emit = emit
        self._rows = RunningRows(config.max_num_seqs)
        self._queue = ORDERS[config.scheduling_policy](config, self._rows, manager)
        self.waiting: Items[Sequence] = self._queue.waiting
        """The waiting sequences in the order of their keys."""
        self.running: Items[Sequence] = self._rows.running
        """The running sequences in the order of their keys."""
        self.by_row: Mapping[int, Sequence] = self._rows.by_row
        """The running sequences by their rows."""
        self.speculation: Speculation | None = None
        if drafter is not None:
            self.speculation = Speculation(drafter, self._rows, manager, emit, config.max_num_seqs)
        self._step = 0
        self._preempted: list[Sequence] = []  # sequences that this step has preempted

    @property
    def next_waiting(self) -> Sequence | None:
        """The sequence that is admitted next, or None if none may be."""
        return self._queue.first()

    def owner_of(self, row: int) -> Request | None:
        """Return the request with a sequence in this row."""
        seq = self.by_row.get(row)
        return None if seq is None else seq.request

    # Arriving.

    def check(self, request: Request) -> None:
        """Raise `RequestError` if a request could never run. Call it before `add`."""
        check_fits(request, self.config, self.manager, self.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.limit(self.longest)
        request.rank = self._queue.rank(request, self._step)
        event = (request.request_id, request.number, request.rank, request.num_prompt)
        self._emit(("add", *event, request.params.n, request.params.max_tokens))
        self._queue.add(request.sequences[0])

    # One step.

    def schedule(self, *, may_admit: bool = True) -> StepPlan:
        """Plan the next step and reserve its blocks.

        Without ``may_admit``, the step is already launched for the rows of `ahead`. Then no
        sequence is admitted.
        """
        step = self._begin_step(may_admit=may_admit)
        self._take_decodes(step)
        self._take_prefills(step)
        if may_admit and self.config.batching == "static":
            self._admit_batch(step)
        elif may_admit:
            self._admit_waiting(step)
        if self.running and not step.decodes and not step.chunks:
            self._take_reserved(step)
        if self.speculation and may_admit:
            self.speculation.add_drafts(step)
        return StepPlan(
            step=self._step,
            new_rows=self._rows.take_new(),
            moves=self.manager.take_moves(),
            decodes=tuple(sorted(step.decodes)),
            chunks=tuple(step.chunks),
            preempted=tuple([seq.seq_id for seq in self._preempted]),
        )

    def ahead(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the rows that decode after ``plan``, or none if more than decodes may follow."""
        first = self._queue.first()
        makes_way = first and any(self._queue.make_way(first, self._step))
        may_admit = makes_way or (first and self._rows.num_free)
        if len(plan.decodes) < len(self.running) or may_admit:
            return ()
        if self.speculation and self.speculation.may_draft():
            return ()
        return rows_ahead(self.running)

    def _begin_step(self, *, may_admit: bool) -> StepDraft:
        """Preempt the sequences that make way for the next one, under an order that has any."""
        self._step += 1
        self._preempted = []
        first = self._queue.first() if may_admit else None
        for victim in self._queue.make_way(first, self._step) if first else ():
            self.preempt(victim, by=first)
        return StepDraft(self._queue.budget(first), only=first if self._preempted else None)

    def _take_decodes(self, step: StepDraft) -> None:
        """Take the newest token of each sequence with a computed prompt, the first key first.

        Tokens that must follow it (forced tokens) are computed with it, in a chunk.
        """
        budget, decodes = step.budget, step.decodes
        order = self._queue.by_preemption()
        for seq in order:  # a preempted sequence leaves it at the end
            if seq.is_prefilling:
                continue
            request, table = seq.request, seq.table
            most = budget.most(request)
            if not most or table is None:
                continue
            if len(seq.token_ids) > table.num_writable and not self._grow(step, seq, order):
                break
            count = len(seq.token_ids) - table.num_tokens
            if count == 1:
                decodes.append(table.row)
                budget.take(request, 1)
            else:
                self._add_chunk(step, seq, min(count, most))
        if self.config.async_scheduling:
            reserve_ahead(self.running, self.manager)

    def _grow(self, step: StepDraft, seq: Sequence, order: list[Sequence]) -> bool:
        """Make room for the next token, or preempt the sequence itself and return False."""
        while seq.table is not None and not self.manager.grow(seq.table, seq.num_tokens):
            self.preempt(order.pop(), by=seq)
            step.is_short_of_blocks = True
        return seq.table is not None

    def _take_prefills(self, step: StepDraft) -> None:
        """Take chunks of the prompts in progress. They have their blocks."""
        for seq in self.running if self._rows.num_prefilling else ():
            if seq.is_prefilling:
                count = chunk_size(self.config, seq.num_missing, step.budget.most(seq.request))
                if count:
                    self._add_chunk(step, seq, count)
                elif not self.config.enable_chunked_prefill:
                    break

    def _add_chunk(self, step: StepDraft, seq: Sequence, count: int) -> None:
        """Take the next tokens as a chunk. It ends early where a state is kept."""
        assert seq.table is not None
        count = self.manager.chunk_limit(seq.table, count)
        choices = () if count < seq.num_missing else self._choices_after(seq)
        step.chunks.append(seq.chunk(count, choices))
        step.budget.take(seq.request, count)

    def _take_reserved(self, step: StepDraft) -> None:
        """Take the tokens that the budget reserved for a sequence that was not admitted."""
        step.budget = Budget(step.budget.left)
        self._take_decodes(step)
        self._take_prefills(step)

    # Admission.

    def _admit_waiting(self, step: StepDraft) -> None:
        """Admit from the head of the queue, as far as there are rows, blocks and tokens."""
        if step.is_short_of_blocks and not self.config.admit_after_preemption:
            return
        while self._rows.num_free and step.budget.left:
            seq = step.only or self._queue.first()
            if seq is None or not self._admit(step, seq) or step.only:
                return

    def _admit_batch(self, step: StepDraft) -> None:
        """Fill a static batch regardless of the budget. The prompts of the batch take turns."""
        if self.running:
            return
        while self._rows.num_free and (seq := self._queue.first()):
            if not self._admit(step, seq, needs_tokens=False):
                return

    def _admit(self, step: StepDraft, seq: Sequence, *, needs_tokens: bool = True) -> bool:
        """Start a waiting sequence with a chunk. Return False if it lacks blocks or tokens."""
        # A sequence that runs alone may take every block, or it could wait forever.
        num_reserved = self._num_reserved if self.running else 0
        allocation = find_allocation(self.manager, seq, num_reserved)
        if allocation is None:
            return False
        num_missing = seq.num_tokens - allocation.num_computed
        count = chunk_size(self.config, num_missing, step.budget.most(seq.request))
        if not count and needs_tokens:
            return False
        self._start(seq, allocation)
        if count:
            self._add_chunk(step, seq, count)
        else:
            step.budget.left = 0  # later prompts do not overtake
        return True

    @property
    def _num_reserved(self) -> int:
        """The number of blocks that must be left, those for choices that fork included."""
        num_forking = len(self._rows.forking)
        return self.watermark_blocks + num_forking * self.manager.blocks_per_fork

    def _start(self, seq: Sequence, allocation: Allocation) -> None:
        """Move a waiting sequence to the next row, with the blocks that were just found."""
        row, notes = self._rows.next_row, seq.request.notes
        count_admission(seq, allocation, row, self.manager, self._emit)
        seq.host = None
        table = self.manager.open_table(allocation, seq.seq_id, row, notes)
        self._rows.take(seq, table, self._step, is_prefilling=True)
        self._queue.remove(seq)

    # The result of a step.

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Apply a step's result: first blocks and drafts, then one token after another.

        A sequence's token is the last part of it to change, so `rebuild` finds every sequence in
        the state before or after its step.

        Return the sequences that got a token, decodes before chunks. A sequence that ended has a
        ``finish_reason`` and no blocks.
        """
        self.manager.end_step()
        seqs = [self.by_row[row] for row in plan.decodes]
        if seqs:
            self._emit(("decode", plan.decodes))
            self.manager.advance([seq.table for seq in seqs if seq.table is not None])
        token_ids, logprobs = [*result.token_ids], [*result.logprobs]
        for chunk, yielded in zip(plan.chunks, result.chunks, strict=True):
            seqs += self._take_in_chunk(chunk, yielded)
            # One token for each choice. `Speculation.settle` has appended the drafts before it.
            token_ids += yielded.token_ids[-len(chunk.choices) :]
            logprobs += yielded.logprobs[-len(chunk.choices) :]
        self._rows.forking.clear()
        for seq, token_id, row in zip(seqs, token_ids, logprobs, strict=True):
            if row is not None:
                seq.logprobs.append(row)
            seq.token_ids.append(token_id)
            if token_id in seq.end_token_ids or len(seq.token_ids) >= seq.max_tokens:
                self._finish_at_end(seq)
        for row_id, run in result.forced.items():
            self._append_forced(row_id, run)
        return seqs

    def _take_in_chunk(self, chunk: Chunk, yielded: ChunkResult) -> list[Sequence]:
        """Record that the chunk's tokens are stored. Return the choices. They are now running."""
        seq = self.by_row[chunk.row]
        assert seq.table is not None
        if chunk.num_drafts and self.speculation:
            self.speculation.settle(seq, chunk, yielded)
            return [seq]
        request = seq.request
        self._emit(("prefill", seq.seq_id, chunk.start, len(chunk.token_ids), chunk.choices))
        self.manager.commit(seq.table, chunk.end)
        scored = seq.logprobs if seq.num_generated else request.prompt_logprobs
        scored.extend(yielded.scored)
        chosen = [request.sequences[choice] for choice in chunk.choices]
        if chosen:
            self._rows.end_prefill(seq)
            if seq is request.prefill_choice:
                self._fork(seq, chosen)
        return chosen

    def _append_forced(self, row: int, run: tuple[int, ...]) -> None:
        """Append tokens that must follow the new one. They are computed in the next step."""
        seq = self.by_row[row]
        self._emit(("force", seq.seq_id, len(run)))
        seq.request.metrics.num_forced_tokens += len(run)
        seq.token_ids.extend(run)
        self._finish_at_end(seq)

    def _finish_at_end(self, seq: Sequence) -> None:
        """End a sequence if the last token ends it."""
        ending = seq.ending
        if ending is not None:
            self.finish(seq, *ending)

    # Choices.

    def _choices_after(self, seq: Sequence) -> tuple[int, ...]:
        """Return the choices that sample after a chunk: its own, and choices that fork from it.

        The forks get rows and blocks without overtaking. The rows are reserved.
        """
        request = seq.request
        if seq is not request.prefill_choice:
            return (seq.index,)
        others = [each for each in request.sequences if each is not seq and not each.finish_reason]
        num_blocks = self.manager.num_available - self._num_reserved
        num_forks = min(self._queue.num_forks(seq), num_blocks // self.manager.blocks_per_fork)
        forking = others[: max(0, num_forks)]
        self._rows.forking += forking
        return (seq.index, *[each.index for each in forking])

    def _fork(self, first: Sequence, chosen: Items[Sequence]) -> None:
        """Start the chosen choices on the first one's blocks. The others wait."""
        assert first.table is not None
        for sibling in first.request.sequences:
            if sibling is first or sibling.finish_reason is not None:
                continue
            if sibling not in chosen:
                self._wait(sibling, first)
                continue
            row = self._rows.next_row
            self._emit(("fork", sibling.seq_id, first.seq_id, row))
            table = self.manager.fork(first.table, sibling.seq_id, row, sibling.token_ids)
            self._rows.take(sibling, table, self._step, is_prefilling=False)

    def _wait(self, seq: Sequence, parent: Sequence) -> None:
        """Queue a choice that computes the prompt itself, like its sibling."""
        self._emit(("wait", seq.seq_id, parent.seq_id))
        self._queue.add(seq)

    # Leaving. It is legal in every state.

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one choice and release its blocks. The other choices continue."""
        if seq.finish_reason is not None:
            return
        seq.stop_reason = stop_reason
        seq.finish_reason = reason
        was_waiting = self._queue.remove(seq)
        if seq.table is not None:
            self.manager.close_table(self._rows.free(seq))
        elif was_waiting:
            drop_host(seq, self.manager)
        else:
            return  # another choice computes its prompt
        if self.speculation:
            self.speculation.drafter.end(seq)
        next_choice = seq.request.prefill_choice
        if next_choice is not None:
            self._wait(next_choice, seq)
        self._emit(("finish", seq.seq_id, reason))

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End every unfinished choice of a request."""
        for seq in reversed(request.sequences):  # so that none begins to compute the prompt
            self.finish(seq, reason)

    def preempt(self, seq: Sequence, by: Sequence | None) -> None:
        """Preempt a running sequence to make room for ``by``. It keeps its tokens and waits.

        Without ``by`` the step was abandoned, so the blocks are not worth swapping out.
        """
        metrics, table, mode = seq.request.metrics, self._rows.free(seq), "recompute"
        metrics.num_preemptions += 1
        seq.num_lost = table.num_tokens
        if by and self.config.preemption_mode == "swap" and seq.num_lost:
            mode = swap_out(seq, table, self.manager)
        self.manager.close_table(table)
        self._queue.add(seq)
        self._preempted.append(seq)
        rule = self._queue.victim if by else "all: the step was abandoned"
        self._emit(("preempt", seq.seq_id, by and by.seq_id, mode, rule, seq.num_lost))

    def preempt_all(self) -> None:
        """Discard the contents of all tables. An abandoned step may have left them incomplete.

        Sequences that it swapped in or out are recomputed, because the moves may not have been
        made.
        """
        self.manager.end_step(has_moved=False)
        self._rows.forking.clear()
        for seq in self._preempted:
            seq.num_lost = seq.host.num_tokens if seq.host else seq.num_lost
            drop_host(seq, self.manager)
        while self.running:
            self.preempt(self.running[-1], by=None)

    def rebuild(self, requests: Collection[Request]) -> None:
        """Start again from nothing but the tokens of ``requests``, given in order of arrival.

        Use it after an exception at any line, when any state can be half-changed. The blocks are a
        cache. Every unfinished sequence waits as if it had been preempted, and a sequence with an
        ending last token is finished. If `rebuild` is interrupted, it can be called again.
        """
        self.manager.reset()
        self._rows.clear()
        self._queue.clear()
        self._preempted = []
        for request in requests:
            for seq in request.restore():
                self._queue.add(seq)
