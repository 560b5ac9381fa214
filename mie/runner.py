"""Runs a step's plan on a backend: the only place where host lists become arrays.

It keeps one row for each running sequence (its block table, its tokens, its sampling) and applies
the plan's changes to it, so that a step costs what changed and not what is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mie.model.decoder import Decoder
from mie.ops.backend import Array, StepBatch
from mie.ops.sampling import RowControls
from mie.sched.plan import Chunk, NewRow, StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, before any edit of the logits or temperature."""

    token_ids: list[int]
    """The chosen token first, then the most likely ones."""
    logprobs: list[float]
    rank: int
    """Of the chosen token; the most likely has rank 1."""


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """What one chunk of the plan yielded."""

    token_ids: list[int]
    """One for each of the chunk's choices."""
    logprobs: list[TokenLogprobs]
    """As many, if the request asked for them, else none."""
    prompt_logprobs: list[TokenLogprobs]
    """One for each of the chunk's scored prompt positions."""


class _Row:
    """What the runner remembers of one running sequence."""

    def __init__(self, new: NewRow) -> None:
        self.token_ids = list(new.token_ids)
        self.num_prompt = new.num_prompt
        self.params = new.params
        self.banned_ids = np.asarray(new.banned_ids, np.int64)
        self.draw_key = new.draw_key
        bias = new.params.logit_bias
        self.bias = (np.array(list(bias)), np.array(list(bias.values()))) if bias else None
        allowed = new.params.allowed_token_ids
        self.allowed_ids = None if allowed is None else np.unique(allowed)

    def controls(self, choice: int) -> RowControls:
        """How the token after the row's last one is chosen."""
        params = self.params
        num_generated = len(self.token_ids) - self.num_prompt
        forced = params.trace_decode_token_ids or ()
        seen_ids = output_ids = output_counts = None
        if params.repetition_penalty != 1.0:
            seen_ids = np.unique(self.token_ids)
        if num_generated and (params.presence_penalty or params.frequency_penalty):
            generated = self.token_ids[self.num_prompt :]
            output_ids, output_counts = np.unique(generated, return_counts=True)
        is_banned = num_generated < params.min_tokens and self.banned_ids.size > 0
        return RowControls(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=self._uniform(choice) if params.temperature > 0 else 0.0,
            bias=self.bias,
            allowed_ids=self.allowed_ids,
            banned_ids=self.banned_ids if is_banned else None,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seen_ids=seen_ids,
            output_ids=output_ids,
            output_counts=output_counts,
            forced_id=forced[num_generated] if num_generated < len(forced) else None,
        )

    def _uniform(self, choice: int) -> float:
        """The random number of this position: Philox (Salmon et al., 2011) keyed by (seed, choice),
        counted by (position, stream). It depends on nothing but the request."""
        seed, stream = self.draw_key
        generator = np.random.Philox(
            key=np.array([seed % 2**64, choice], np.uint64),
            counter=np.array([len(self.token_ids), stream, 0, 0], np.uint64),
        )
        return float(int(generator.random_raw()) >> 11) * 2.0**-53


class ModelRunner:
    """A decoder, its KV cache and the rows of the running sequences."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
    ) -> None:
        self.decoder = decoder
        self.backend = decoder.backend
        self.block_size = block_size
        self._kv_cache = self.backend.new_kv_cache(decoder.kv_cache_shape(num_blocks, block_size))
        self._block_tables: Ints = np.zeros((max_num_seqs, max_blocks_per_seq), np.int64)
        self._rows: list[_Row | None] = [None] * max_num_seqs

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Compute the plan's tokens and sample: one result for each of its chunks."""
        copies = [copy for chunk in plan.chunks for copy in chunk.copies]
        if copies:
            self.backend.copy_blocks(self._kv_cache, *zip(*copies, strict=True))
        for chunk in plan.chunks:
            self._apply(chunk)
        batch = self._pack(plan.chunks)
        logits = self.backend.run_step(self._forward, batch)
        return self._results(plan.chunks, logits)

    def _forward(self, batch: StepBatch) -> Array:
        return self.decoder.forward(batch, self._kv_cache)

    def _apply(self, chunk: Chunk) -> None:
        if chunk.new_row is not None:
            self._rows[chunk.row] = _Row(chunk.new_row)
        table = self._block_tables[chunk.row]
        for index, block_id in chunk.block_updates:
            table[index] = block_id

    def _pack(self, chunks: Sequence[Chunk]) -> StepBatch:
        """The chunks as one ragged batch, in the order of the plan."""
        num_queries = np.array([len(chunk.token_ids) for chunk in chunks])
        seq_lens = np.array([chunk.end for chunk in chunks])
        rows = np.array([chunk.row for chunk in chunks])
        cu_seqlens_q = np.concatenate([[0], np.cumsum(num_queries)])
        total = int(cu_seqlens_q[-1])
        token_ids = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int64, total)
        # Query i of a sequence stands at seq_len - n + i; the shift is constant in each sequence.
        positions = np.arange(total) + np.repeat(seq_lens - cu_seqlens_q[1:], num_queries)
        block_index, offset = np.divmod(positions, self.block_size)
        blocks = self._block_tables[np.repeat(rows, num_queries), block_index]
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=blocks * self.block_size + offset,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_tables=self._block_tables[rows, :max_blocks],
            logits_rows=np.array(_logits_rows(chunks, cu_seqlens_q.tolist()), np.int64),
        )

    def _results(self, chunks: Sequence[Chunk], logits: Array) -> list[ChunkResult]:
        controls, sampled_rows = [], []
        row = 0
        for chunk in chunks:
            row += chunk.scored[1] - chunk.scored[0]
            for choice in chunk.choices:
                controls.append(self._row(chunk).controls(choice))
                sampled_rows.append(row)
                row += 1
        # Without prompt log-probabilities every row is sampled from, and none need be copied.
        sampled = logits if len(controls) == len(logits) else logits[sampled_rows]
        token_ids = iter(self.backend.sample(sampled, controls) if controls else [])
        results, row = [], 0
        for chunk in chunks:
            state, params = self._row(chunk), self._row(chunk).params
            scored = range(*chunk.scored)
            prompt = [
                self._logprobs(
                    logits, row + i, state.token_ids[position + 1], params.prompt_logprobs
                )
                for i, position in enumerate(scored)
            ]
            row += len(scored)
            chosen = [next(token_ids) for _ in chunk.choices]
            logprobs = [
                self._logprobs(logits, row + i, token_id, params.logprobs)
                for i, token_id in enumerate(chosen)
                if params.logprobs is not None
            ]
            row += len(chosen)
            state.token_ids.extend(chosen[:1])
            results.append(ChunkResult(token_ids=chosen, logprobs=logprobs, prompt_logprobs=prompt))
        return results

    def _row(self, chunk: Chunk) -> _Row:
        row = self._rows[chunk.row]
        assert row is not None
        return row

    def _logprobs(
        self, logits: Array, row: int, token_id: int, num_top: int | None
    ) -> TokenLogprobs:
        assert num_top is not None
        ids, logprobs, rank = self.backend.top_logprobs(logits, row, token_id, num_top)
        return TokenLogprobs(token_ids=ids, logprobs=logprobs, rank=rank)


def _logits_rows(chunks: Sequence[Chunk], starts: Sequence[int]) -> list[int]:
    """The rows whose logits are wanted: each chunk's scored positions, then its last row once for
    each choice that samples from it."""
    rows: list[int] = []
    for chunk, start in zip(chunks, starts, strict=False):
        rows.extend(start + position - chunk.start for position in range(*chunk.scored))
        rows.extend([start + len(chunk.token_ids) - 1] * len(chunk.choices))
    return rows
