"""Run a step's plan on a backend. `ModelRunner.pack` turns the plan's lists into arrays.

The runner keeps one row for each running sequence (its block table, tokens and sampling) and
applies the plan's deltas to it. So the cost of a step depends on the changes, not on the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.engine.constraints.constraint import Constraints
from mie.engine.rows import Row, RowFault, take_forced
from mie.memory.table import Moves
from mie.model.decoder import Decoder
from mie.ops.backend import Array, Drawn, StepBatch
from mie.ops.sampling import GREEDY, RowControls
from mie.sched.plan import Chunk, NewRow, StepPlan
from mie.sched.result import ChunkResult, StepResult, TokenLogprobs

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Launched:
    """A launched step. Its results may not be known yet."""

    rows: tuple[int, ...]
    """The rows of its plan that decode, ascending, including sequences that have ended since."""
    logits: Array
    drawn: Drawn


class ModelRunner:
    """A decoder, its KV cache and the rows of the running sequences."""

    is_ahead = False

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: Array,
        host_cache: Array = None,
        *,
        block_size: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        constraints: Constraints | None = None,
        max_forced_run: int = 0,
        states: Array = None,
        num_groups: int = 1,
    ) -> None:
        """Set the parts. ``states`` are the states of recurrent layers, if the model has some.

        A row has ``num_groups`` block tables, like the decoder's layout.
        """
        self.decoder = decoder
        self.backend = decoder.backend
        self.block_size = block_size
        self._kv_cache, self._host_cache = kv_cache, host_cache
        self._states = states
        self._slots: Ints = np.zeros(max_num_seqs, np.int64)  # the slot of each row's states
        self.host_blocks: dict[int, bytes] = {}  # contents that replace blocks on the host
        self.host_states: dict[int, bytes] = {}  # by slot on the host
        self._forward = partial(decoder.forward, kv_cache=kv_cache, states=states)
        self._constraints = constraints
        self._max_forced_run = max_forced_run
        self._rows: dict[int, Row] = {}
        self._rows_with_history: set[int] = set()  # sampling depends on earlier tokens
        # Arrays by row, changed only by the deltas of plans.
        num_tables = num_groups * max_num_seqs
        self._block_tables: Ints = np.zeros((num_tables, max_blocks_per_seq), np.int64)
        # The first row of each group's tables.
        self._firsts: Ints = np.arange(0, num_tables, max_num_seqs)[:, None]
        self._num_stored: Ints = np.zeros(max_num_seqs, np.int64)
        self._last_tokens: Ints = np.zeros(max_num_seqs, np.int64)
        self._adapters: Ints = np.zeros(max_num_seqs, np.int64)  # the slot of each row's adapter

    def run(self, plan: StepPlan) -> StepResult:
        """Move blocks, compute the plan's tokens and sample."""
        self.prepare(plan)
        if plan.is_empty:
            return StepResult(token_ids=[], logprobs=[], chunks=[])
        return self.collect(plan, self.launch(plan))

    def prepare(self, plan: StepPlan) -> None:
        """Apply the plan's changes to rows, tables and blocks."""
        for new in plan.new_rows:
            self._add_row(new)
        moves = plan.moves
        for row, index, block_ids in moves.updates:
            self._block_tables[row, index : index + len(block_ids)] = block_ids
        if windows := moves.parts.get("windows"):
            for row, index, entry in windows.updates:
                self._block_tables[self._firsts[1:, 0] + row, index] = entry
        for _, host_id in moves.exports:
            self.host_blocks.pop(host_id, None)
        self._move(self._kv_cache, self._host_cache, moves.exports)
        imports = [pair for pair in moves.imports if not self._import(*pair)]
        self._move(self._host_cache, self._kv_cache, imports)
        self._move(self._kv_cache, self._kv_cache, moves.copies)
        if states := moves.parts.get("states"):
            self._move_states(states)

    def _add_row(self, new: NewRow) -> None:
        """Set the state of a row to a sequence that gets it."""
        row = Row(new, self._constraints, masks_early=not self.backend.is_asynchronous)
        self._rows[new.row] = row
        self._rows_with_history.discard(new.row)
        if not row.is_plain:
            self._rows_with_history.add(new.row)
        self._num_stored[new.row] = new.num_computed
        self._last_tokens[new.row] = new.token_ids[-1]
        self._adapters[new.row] = new.adapter

    def _move(self, source: Array, target: Array, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of ``source`` to blocks of ``target``."""
        if pairs:
            self.backend.move_blocks(source, target, *zip(*pairs, strict=True))

    def _import(self, host_id: int, block_id: int) -> bool:
        """Write contents that replace a block on the host. Return False if there are none."""
        data = self.host_blocks.pop(host_id, None)
        if data is not None:
            self.backend.import_block(self._kv_cache, block_id, data)
        return data is not None

    def _move_states(self, moves: Moves) -> None:
        recurrent = self.backend.recurrent
        for row, _, slots in moves.updates:
            self._slots[row] = slots[0]
        for slot, host_slot in moves.exports:
            self.host_states[host_slot] = recurrent.export_state(self._states, slot)
        if moves.copies:
            recurrent.copy_states(self._states, *zip(*moves.copies, strict=True))
        for host_slot, slot in moves.imports:
            data = self.host_states.pop(host_slot)
            recurrent.import_state(self._states, slot, data)

    # Launch: pack, forward, and the first half of sample.

    def launch(self, plan: StepPlan) -> Launched:
        """Pack a prepared step, and begin to compute it and to sample. `collect` waits for it."""
        logits = self.backend.run_step(self._forward, self.pack(plan))
        rows, edited = [*plan.decodes], self._rows_with_history
        controls = [self._controls(row) if row in edited else GREEDY for row in rows]
        for chunk in plan.chunks:
            own = self._chunk_controls(chunk)
            controls += own
            rows += [chunk.row] * len(own)
        # The rows that are sampled from come first, and rows of prompt log-probabilities follow.
        drawn = self._start_sample(rows, logits[: len(rows)], controls) if rows else None
        return Launched(rows=plan.decodes, logits=logits, drawn=drawn)

    def _chunk_controls(self, chunk: Chunk) -> list[RowControls]:
        """Return the controls of each choice of a chunk, and of the token after each draft."""
        own = [self._controls(chunk.row, choice) for choice in chunk.choices]
        # A row that reads its tokens draws after each draft in `_verified`.
        is_known = chunk.num_drafts and not self._rows[chunk.row].reads_tokens
        for i in range(1, chunk.num_drafts + 1):
            own.append(self._controls(chunk.row, num_pending=i) if is_known else GREEDY)
        return own

    def _controls(
        self, row: int, choice: int | None = None, *, num_pending: int = 0
    ) -> RowControls:
        """Return how a row's next token is chosen, or raise `RowFault`."""
        state = self._rows[row]
        try:
            return state.controls(state.choice if choice is None else choice, num_pending)
        except Exception as error:
            raise RowFault(row, error) from error

    def _start_sample(
        self, rows: Sequence[int], logits: Array, controls: Sequence[RowControls]
    ) -> Drawn:
        """Begin to sample a token for each of ``rows``. If that raises, find the row to blame.

        A row is to blame if it raises alone while a greedy draw from its logits does not.
        """
        try:
            return self.backend.start_sample(logits, controls)
        except Exception:
            for i, row in enumerate(rows):
                error = self._sampling_error(logits[i : i + 1], controls[i])
                if error and not self._sampling_error(logits[i : i + 1], GREEDY):
                    raise RowFault(row, error) from error
            raise

    def _sampling_error(self, logits: Array, controls: RowControls) -> Exception | None:
        try:
            self.backend.finish_sample(self.backend.start_sample(logits, [controls]))
        except Exception as error:
            return error
        return None

    def pack(self, plan: StepPlan) -> StepBatch:
        """Return the plan as one ragged batch: its decodes, then its chunks.

        The logits of each row that decodes come first, then the logits of each chunk's last token,
        once for each choice that samples from it, or those of the last token before drafts and of
        each draft. The scored positions of the chunks follow.
        """
        chunks, num_decodes = plan.chunks, len(plan.decodes)
        rows = np.array([*plan.decodes, *[chunk.row for chunk in chunks]], np.int64)
        token_ids, starts = self._last_tokens[rows], self._num_stored[rows]
        if not chunks:
            return self._decode_batch(rows, token_ids, starts)
        chunk_sizes = [len(chunk.token_ids) for chunk in chunks]
        counts = np.concatenate([np.ones(num_decodes, np.int64), chunk_sizes])
        ends = np.cumsum(counts)
        shifts = ends - counts - starts  # from a token's position to its row of the batch
        sampled = [
            np.arange(end - 1 - chunk.num_drafts, end).repeat(len(chunk.choices))
            for chunk, end in zip(chunks, ends[num_decodes:], strict=True)
        ]
        scored = [
            np.arange(*chunk.scored) + shift
            for chunk, shift in zip(chunks, shifts[num_decodes:], strict=True)
        ]
        positions = np.arange(ends[-1]) - np.repeat(shifts, counts)
        token_rows = np.repeat(rows, counts)
        # A sequence of the batch is a token that is computed apart, or a chunk.
        num_apart = num_decodes
        if self.backend.has_decode_kernels:  # tokens with drafts are decodes, and lead the chunks
            num_apart += sum([len(chunk.token_ids) for chunk in chunks if chunk.num_drafts])
        lasts = np.concatenate([np.arange(num_apart), ends[ends > num_apart] - 1])
        return self._batch(
            rows=token_rows[lasts],
            seq_lens=positions[lasts] + 1,
            token_rows=token_rows,
            token_ids=np.concatenate(
                [token_ids[:num_decodes], *[chunk.token_ids for chunk in chunks]]
            ),
            positions=positions,
            cu_seqlens_q=np.concatenate([[0], lasts + 1]),
            logits_rows=np.concatenate([np.arange(num_decodes), *sampled, *scored]),
            num_decodes=num_apart,
        )

    def _decode_batch(self, rows: Ints, token_ids: Ints, positions: Ints) -> StepBatch:
        """Return a batch with one token of each row."""
        each = np.arange(len(rows) + 1)
        seq_lens = positions + 1
        return self._batch(rows, seq_lens, rows, token_ids, positions, each, each[:-1], len(rows))

    def _batch(
        self,
        rows: Ints,
        seq_lens: Ints,
        token_rows: Ints,
        token_ids: Ints,
        positions: Ints,
        cu_seqlens_q: Ints,
        logits_rows: Ints,
        num_decodes: int,
    ) -> StepBatch:
        """Return a batch of the tokens of ``rows`` [S]; ``token_rows`` [T] is each token's row."""
        block_index, offset = np.divmod(positions, self.block_size)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=(
                self._block_tables[token_rows + self._firsts, block_index] * self.block_size
                + offset
            ).ravel(),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_tables=self._tables_of(
                (rows + self._firsts).ravel(), ceil_div(max(seq_lens.tolist()), self.block_size)
            ),
            num_groups=len(self._firsts),
            logits_rows=logits_rows,
            num_decodes=num_decodes,
            slots=None if self._states is None else self._slots[rows],
            fresh=None if self._states is None else seq_lens == np.diff(cu_seqlens_q),
            adapters=self._adapters[token_rows] if self.decoder.adapters else None,
        )

    def _tables_of(self, rows: Ints, num_blocks: int) -> Ints:
        """Return the start of the rows' tables, as a view if the rows are the first ones."""
        if rows.tolist() == [*range(len(rows))]:
            return self._block_tables[: len(rows), :num_blocks]
        return self._block_tables[rows, :num_blocks]

    # Collect: the second half of sample.

    def collect(self, plan: StepPlan, launched: Launched) -> StepResult:
        """Wait for a step and return its results in the order of its plan. The rows advance."""
        drawn, logits = launched.drawn, launched.logits
        token_ids = [] if drawn is None else self.backend.finish_sample(drawn)
        decoded, indices = token_ids[: len(launched.rows)], list(range(len(launched.rows)))
        if launched.rows != plan.decodes:  # some sequences have ended since the launch
            wanted = set(plan.decodes)
            indices = [i for i, row in enumerate(launched.rows) if row in wanted]
            decoded = [decoded[i] for i in indices]
        logprobs = [
            self._token_logprobs(row, logits, i, token_id)
            for i, row, token_id in zip(indices, plan.decodes, decoded, strict=True)
        ]
        chunks = self._chunk_results(plan.chunks, logits, token_ids, len(launched.rows))
        self.advance(plan, decoded, chunks)
        sampled = [*plan.decodes, *[chunk.row for chunk in plan.chunks if chunk.choices]]
        with_history = self._rows_with_history.intersection(sampled)
        forced = take_forced(self._rows, with_history, self._max_forced_run)
        for row, run in forced.items():
            self._last_tokens[row] = run[-1]
        return StepResult(token_ids=decoded, logprobs=logprobs, chunks=chunks, forced=forced)

    def advance(
        self, plan: StepPlan, decoded: Sequence[int], chunks: Sequence[ChunkResult]
    ) -> None:
        """Record the tokens that a step stored, and the tokens that its decodes sampled."""
        rows = np.array(plan.decodes, np.int64)
        self._num_stored[rows] += 1
        self._last_tokens[rows] = decoded
        if self._rows_with_history:
            for row, token_id in zip(plan.decodes, decoded, strict=True):
                if row in self._rows_with_history:
                    self._rows[row].token_ids.append(token_id)
        for chunk, yielded in zip(plan.chunks, chunks, strict=True):
            num_dropped = chunk.num_drafts and chunk.num_drafts + 1 - len(yielded.token_ids)
            is_reverted = num_dropped and self._states is not None
            self._num_stored[chunk.row] = chunk.start if is_reverted else chunk.end - num_dropped

    def _chunk_results(
        self, chunks: Sequence[Chunk], logits: Array, token_ids: Sequence[int], num_decodes: int
    ) -> list[ChunkResult]:
        """Return the results of the chunks. Their tokens follow the tokens of the decodes."""
        results, at, at_scored = [], num_decodes, len(token_ids)
        for chunk in chunks:
            row = self._rows[chunk.row]
            num_drawn = len(chunk.choices) + chunk.num_drafts
            chosen = list(token_ids[at : at + num_drawn])
            if chunk.num_drafts:
                chosen = self._verified(chunk, chosen, logits, at)
            first, end = (position + 1 for position in chunk.scored)
            logprobs = [
                self._token_logprobs(chunk.row, logits, i, token_id)
                for i, token_id in enumerate(chosen, at)
            ]
            scored = [
                self._logprobs(chunk.row, logits, i, token_id, row.num_top(first))
                for i, token_id in enumerate(row.token_ids[first:end], at_scored)
            ]
            at, at_scored = at + num_drawn, at_scored + len(scored)
            if chosen and not chunk.num_drafts:
                row.token_ids.append(chosen[0])  # the siblings' rows are announced later
            if chosen:
                self._last_tokens[chunk.row] = row.token_ids[-1]
            results.append(ChunkResult(token_ids=chosen, logprobs=logprobs, scored=scored))
        return results

    def _verified(self, chunk: Chunk, drawn: Sequence[int], logits: Array, at: int) -> list[int]:
        """Append the drafts that the row draws too, and the token after them, and return all.

        ``drawn`` are the tokens after the chunk's last token that is no draft, and after each
        draft. Where a row reads its tokens, only the first is final, because the row must have the
        others' histories first. An error at a later one is left to the next step, which begins
        with the same tokens as without drafts.
        """
        row, tokens = self._rows[chunk.row], []
        for i, token_id in enumerate(drawn):
            if i and row.reads_tokens:
                try:
                    control, own = self._controls(chunk.row), logits[at + i : at + i + 1]
                    [token_id] = self.backend.finish_sample(
                        self._start_sample([chunk.row], own, [control])
                    )
                except RowFault:
                    break
            tokens.append(token_id)
            row.token_ids.append(token_id)
            if i == chunk.num_drafts or token_id != chunk.drafts[i]:
                break
        return tokens

    def _token_logprobs(
        self, row: int, logits: Array, at: int, token_id: int
    ) -> TokenLogprobs | None:
        num_top = self._rows[row].params.logprobs
        return None if num_top is None else self._logprobs(row, logits, at, token_id, num_top)

    def _logprobs(
        self, row: int, logits: Array, at: int, token_id: int, num_top: int
    ) -> TokenLogprobs:
        """Return the log-probabilities of the logits at ``at``, or raise `RowFault`."""
        try:
            ids, logprobs, rank = self.backend.top_logprobs(logits, at, token_id, num_top)
        except Exception as error:
            raise RowFault(row, error) from error
        return TokenLogprobs(token_ids=ids, logprobs=logprobs, rank=rank)

    # A step that begins before the step before it is collected.

    def launch_ahead(self, rows: Sequence[int], before: Launched) -> Launched | None:
        """Begin the step after ``before``. ``before`` has no chunks and is not collected yet.

        It computes one more token for each of ``rows``. They must be rows of ``before``. Return
        None if the sampling of one needs more than is known, or if ``before``'s logits are still to
        be read.
        """
        # This includes the rows of sequences that end, because the next step overwrites their
        # logits.
        if not all(self._rows[row].may_run_ahead for row in before.rows):
            return None
        row_ids = np.array(rows, np.int64)
        batch = replace(
            self._decode_batch(row_ids, np.zeros_like(row_ids), self._num_stored[row_ids] + 1),
            drawn=before.drawn,
            drawn_rows=np.searchsorted(before.rows, row_ids),
        )
        logits = self.backend.run_step(self._forward, batch)
        controls = [self._controls(row, num_pending=1) for row in rows]
        drawn = self._start_sample(rows, logits, controls)
        return Launched(rows=tuple(rows), logits=logits, drawn=drawn)

    def discard(self, launched: Launched) -> None:
        """Wait for a step, and drop its results."""
        if launched.drawn is not None:
            self.backend.finish_sample(launched.drawn)
