"""Schedule with iteration-level continuous batching, chunked prefill and preemption.

A step takes the decodes of the running sequences first, then their unfinished prompts, and then
admits from the head of the queue, all under one token budget. Both queues are ordered by the
policy's key, and no sequence overtakes another. When a decode needs a block and none is left, the
last running sequence is preempted. It keeps its tokens, waits again, and is recomputed or swapped
back in. Under the fair policy, a client that holds too much also makes way for others, before the
step. docs/scheduling.md states the rules and their reasons.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from mie.config.engine import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.memory.table import Emit
from mie.sched.admission import Admission, check_budget, check_fits
from mie.sched.fair import FairPolicy
from mie.sched.plan import Chunk, StepPlan
from mie.sched.policy import Budget, Policy
from mie.sched.result import ChunkResult, StepResult
from mie.sched.sequence import FinishReason, Request, Sequence


class Scheduler:
    """Keeps two queues, ``waiting`` and ``running``, each in the order of the sequences' keys."""

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
        self._config = config
        self._emit = emit
        # The last token's keys and values are never stored.
        self.longest = min(max_model_len, manager.capacity + 1)
        """Maximum number of tokens of a sequence, the prompt's included."""
        policy = FairPolicy if config.scheduling_policy == "fair" else Policy
        self._policy = policy(config, emit, manager)
        self._step = 0
        self._clear()

    def _clear(self) -> None:
        self._policy.clear()
        self.waiting, self._seats = self._policy.waiting, self._policy.seats
        self.running = self._seats.running
        self._admission = Admission(self._config, self._policy, self.manager, self._emit)
        self._preempted: list[Sequence] = []  # in this step

    def check(self, request: Request) -> None:
        """Raise `RequestError` if a request could never run. Call it before `add`."""
        check_fits(request, self._config, self.manager, self.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.limit(self.longest)
        rank = self._policy.rank(request, self._step)
        request.set_rank(rank)
        event = (request.request_id, request.number, rank, request.num_prompt)
        self._emit(("add", *event, request.params.n, request.params.max_tokens))
        self._policy.enqueue(request.sequences[0])

    # One step.

    def schedule(self, *, may_admit: bool = True) -> StepPlan:
        """Plan the next step and reserve its blocks. Without ``may_admit``, follow `ahead`."""
        self._step += 1
        self._seats.promised.clear()
        self._preempted = []
        head, victims = self._admission.next(self._step) if may_admit else (None, [])
        for victim in victims:
            self.preempt(victim, by=head)
        budget = self._policy.budget(head)
        chunks: list[Chunk] = []
        decodes = self._take_running(budget, chunks)
        if may_admit and self._may_admit(len(victims)):
            self._admit(budget, chunks, head if victims else None)
        if budget.parts and not decodes and not chunks:  # ``head`` lost its place to a decode
            budget.parts = None
            decodes = self._take_running(budget, chunks)
        return StepPlan(
            step=self._step,
            new_rows=self._seats.take_new(),
            moves=self.manager.take_moves(),
            decodes=tuple(decodes),
            chunks=tuple(chunks),
            preempted=tuple([seq.seq_id for seq in self._preempted]),
        )

    def ahead(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the rows that decode after ``plan``, or none if more than decodes may follow."""
        head, victims = self._admission.next(self._step)
        may_admit = victims or (head and self._seats.num_free)
        if len(plan.decodes) < len(self.running) or may_admit:
            return ()
        return self._seats.rows_ahead()

    def _take_running(self, budget: Budget, chunks: list[Chunk]) -> list[int]:
        """Take the tokens of the running sequences. Return the rows that decode."""
        decodes = self._take_decodes(budget, chunks)
        if self._config.async_scheduling:
            self._seats.reserve_ahead(self.manager)
        if self._seats.num_prefilling:
            self._take_prefills(budget, chunks)
        return decodes

    def _take_decodes(self, budget: Budget, chunks: list[Chunk]) -> list[int]:
        """Return the rows that decode. Those with forced tokens compute them too, in chunks."""
        rows: list[int] = []
        order = self._policy.order(self._step)
        for seq in order:  # those that are preempted leave it at its end
            if seq.is_prefilling:
                continue
            most, table = budget.most(seq.request), seq.table
            if table is None:
                break
            if not most:
                continue
            if len(seq.token_ids) > table.num_writable and not self._grow(seq, order):
                break
            count = len(seq.token_ids) - table.num_tokens
            if count == 1:
                rows.append(table.row)
            else:
                count = self._add_chunk(chunks, seq, min(count, most))
            budget.take(seq.request, count)
        rows.sort()
        return rows

    def _grow(self, seq: Sequence, order: list[Sequence]) -> bool:
        """Make room for the next token, or preempt the sequence itself and return False."""
        while seq.table is not None and not self.manager.grow(seq.table, seq.num_tokens):
            self.preempt(order.pop(), by=seq)
        return seq.table is not None

    def _take_prefills(self, budget: Budget, chunks: list[Chunk]) -> None:
        """Add chunks of the running prompts, which have their blocks."""
        for seq in self.running:
            if seq.is_prefilling:
                count = self._chunk_size(seq.num_missing, budget.most(seq.request))
                if count:
                    budget.take(seq.request, self._add_chunk(chunks, seq, count))
                elif budget.parts is None:
                    break

    def _add_chunk(self, chunks: list[Chunk], seq: Sequence, count: int) -> int:
        """Add the next tokens as a chunk, and return their number. At a prompt's end, choices fork.

        The chunk ends early where a state is kept.
        """
        assert seq.table is not None
        count = self.manager.chunk_limit(seq.table, count)
        choices = [] if count < seq.num_missing else [seq.index]
        if choices and seq is seq.request.leader:
            live = [each.index for each in seq.request.sequences if each.finish_reason is None]
            choices = live[: 1 + self._num_forks_for(seq)]
            self._seats.promised[seq.request.client] += len(choices) - 1
        chunks.append(seq.chunk(count, tuple(choices)))
        return count

    def _num_forks_for(self, seq: Sequence) -> int:
        """Return the number of choices that can get a seat and a block without overtaking."""
        num_seats = self._policy.num_forks(seq)
        num_blocks = self.manager.num_available - self._admission.num_reserved
        return max(0, min(num_seats, num_blocks // self.manager.blocks_per_fork))

    def _chunk_size(self, num_missing: int, budget: int) -> int:
        if not self._config.enable_chunked_prefill:
            return num_missing if num_missing <= budget else 0
        return min(num_missing, budget, self._policy.max_chunk)

    def _may_admit(self, num_made_way: int) -> bool:
        if self._config.batching == "static":
            return not self.running
        return len(self._preempted) == num_made_way or self._config.admit_after_preemption

    def _admit(self, budget: Budget, chunks: list[Chunk], only: Sequence | None) -> None:
        """Admit sequences from the head of the queue, or ``only`` one for which others made way.

        A static batch is filled regardless of the budget, and its prompts take turns.
        """
        is_static = self._config.batching == "static"
        while self._seats.num_free and (budget.left or is_static):
            seq = only or self._policy.first()
            if seq is None:
                return
            # A sequence that runs alone may take every block, or it could wait forever.
            num_spare = self._admission.num_reserved if self.running else 0
            room = self._admission.find_room(seq, num_spare)
            if room is None:
                return
            num_missing = seq.num_tokens - room.num_computed
            count = self._chunk_size(num_missing, budget.most(seq.request))
            if not count and not is_static:
                return
            self._policy.dequeue(seq)
            table = self._admission.open(seq, room, self._seats.next_row)
            self._policy.admit(seq)
            self._seats.take(seq, table, self._step, is_prefilling=True)
            self._policy.charge(seq.request)
            if count:
                budget.take(seq.request, self._add_chunk(chunks, seq, count))
            if only or not count:
                budget.left = 0  # later prompts do not overtake

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Apply a step's result: first the blocks, then one token after another.

        A sequence's token is the last part of it to change, so `rebuild` finds every sequence in
        the state before or after its step.

        Return the sequences that got a token, those of decodes before those of chunks. A sequence
        that ended has a ``finish_reason`` and no blocks.
        """
        self.manager.end_step()
        seqs = [*map(self._seats.rows.__getitem__, plan.decodes)]
        if seqs:
            self._emit(("decode", plan.decodes))
            self.manager.advance([seq.table for seq in seqs if seq.table is not None])
        token_ids, logprobs = [*result.token_ids], [*result.logprobs]
        for chunk, yielded in zip(plan.chunks, result.chunks, strict=True):
            seqs += self._take_in_chunk(chunk, yielded)
            token_ids += yielded.token_ids
            logprobs += yielded.logprobs
        for seq, token_id, row in zip(seqs, token_ids, logprobs, strict=True):
            if row is not None:
                seq.logprobs.append(row)
            seq.token_ids.append(token_id)
            if token_id in seq.end_token_ids or len(seq.token_ids) >= seq.max_tokens:
                ending = seq.ending
                if ending is not None:
                    self.finish(seq, *ending)
        for row_id, run in result.forced.items():
            self._append_forced(row_id, run)
        return seqs

    def _append_forced(self, row: int, run: tuple[int, ...]) -> None:
        """Append tokens that must follow the new one. They are computed in the next step."""
        seq = self._seats.rows[row]
        assert seq is not None, "nothing is forced after the end"
        self._emit(("force", seq.seq_id, len(run)))
        seq.request.metrics.num_forced_tokens += len(run)
        seq.token_ids.extend(run)
        if (ending := seq.ending) is not None:
            self.finish(seq, *ending)

    def _take_in_chunk(self, chunk: Chunk, yielded: ChunkResult) -> list[Sequence]:
        """Record that the chunk's tokens are stored. Return its choices, which are now running."""
        seq = self._seats.rows[chunk.row]
        assert seq.table is not None
        request = seq.request
        self._emit(("prefill", seq.seq_id, chunk.start, len(chunk.token_ids), chunk.choices))
        self.manager.commit(seq.table, chunk.end)
        (seq.logprobs if seq.num_generated else request.prompt_logprobs).extend(yielded.scored)
        chosen = [request.sequences[choice] for choice in chunk.choices]
        if chosen:
            self._seats.end_prefill(seq)
            if seq is request.leader:
                self._fork(seq, chosen)
        return chosen

    def _fork(self, first: Sequence, chosen: Items[Sequence]) -> None:
        """Start the chosen choices on the first one's blocks. The others wait."""
        assert first.table is not None
        for sibling in first.request.sequences:
            if sibling is first or sibling.finish_reason is not None:
                continue
            if sibling not in chosen:
                self._wait(sibling, first)
                continue
            row = self._seats.next_row
            self._emit(("fork", sibling.seq_id, first.seq_id, row))
            table = self.manager.fork(first.table, sibling.seq_id, row, sibling.token_ids)
            self._seats.take(sibling, table, self._step, is_prefilling=False)

    def _wait(self, seq: Sequence, parent: Sequence) -> None:
        """Queue a choice that computes the prompt itself, like its sibling."""
        self._emit(("wait", seq.seq_id, parent.seq_id))
        self._policy.enqueue(seq)

    # Leaving, which is legal in every state.

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one choice and release its blocks. Its siblings continue."""
        if seq.finish_reason is not None:
            return
        seq.stop_reason = stop_reason
        seq.finish_reason = reason
        self._policy.charge(seq.request)
        if seq.table is not None:
            self.manager.close_table(self._seats.leave(seq))
        elif self._policy.dequeue(seq):
            self._drop_host(seq)
        else:
            return  # another choice computes its prompt
        heir = seq.request.leader
        if heir is not None:
            self._wait(heir, seq)
        self._emit(("finish", seq.seq_id, reason))

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End every unfinished choice of a request."""
        for seq in reversed(request.sequences):  # so that none becomes the leader in turn
            self.finish(seq, reason)

    def owner_of(self, row: int) -> Request | None:
        """Return the request whose sequence is in a row."""
        seq = self._seats.rows.get(row)
        return None if seq is None else seq.request

    def preempt(self, seq: Sequence, by: Sequence | None) -> None:
        """Preempt a running sequence to make room for ``by``. It keeps its tokens and waits.

        Without ``by`` the step was abandoned, so the blocks are not worth swapping out.
        """
        metrics, table, mode = seq.request.metrics, self._seats.leave(seq), "recompute"
        metrics.num_preemptions += 1
        seq.num_lost = table.num_tokens
        if by and self._config.preemption_mode == "swap" and seq.num_lost:
            seq.host = self.manager.swap_out(table)
            mode = "swap" if seq.host else "recompute: host pool full"
        if seq.host is not None:
            metrics.num_swaps += 1
            seq.num_lost = 0
        self.manager.close_table(table)
        self._policy.enqueue(seq)
        self._preempted.append(seq)
        rule = self._policy.victim_rule if by else "all: the step was abandoned"
        self._emit(("preempt", seq.seq_id, by and by.seq_id, mode, rule, seq.num_lost))

    def preempt_all(self) -> None:
        """Discard the contents of all tables, which an abandoned step may have left incomplete.

        Sequences that it swapped in or out are recomputed, because the moves may not have been
        made.
        """
        self.manager.end_step(has_moved=False)
        for seq in self._preempted:
            seq.num_lost = seq.host.num_tokens if seq.host else seq.num_lost
            self._drop_host(seq)
        while self.running:
            self.preempt(self.running[-1], by=None)

    def _drop_host(self, seq: Sequence) -> None:
        if seq.host is not None:
            self.manager.drop_host(seq.host)
            seq.host = None

    # Starting again.

    def rebuild(self, requests: Collection[Request]) -> None:
        """Start again from nothing but the tokens of ``requests``, given in order of arrival.

        Use it after an exception at any line, when any state can be half-changed. The blocks are a
        cache. Every unfinished sequence waits as if it had been preempted, and one whose last token
        ends it is finished. If `rebuild` is interrupted, it can be called again.
        """
        self.manager.reset()
        self._clear()
        for request in requests:
            for seq in request.restore():
                self._policy.enqueue(seq)
