"""Simulate the model: take a step's plan, advance the clock, and return synthetic tokens."""

from __future__ import annotations

from mie.sched.plan import Chunk, StepPlan
from mie.sched.result import ChunkResult, StepResult
from mie.sim.clock import SimClock
from mie.sim.costs import Costs, StepWork, causal_pairs
from mie.sim.tokens import text_key, text_token


class SimRunner:
    """A `mie.engine.runner.ModelRunner` without a model.

    A choice's tokens depend only on its request and their positions, so scheduling never changes
    its text. Sampling controls are ignored: an answer has ``max_tokens`` tokens, and there are no
    log-probabilities.
    """

    is_ahead = False

    def __init__(
        self, costs: Costs, clock: SimClock, *, block_size: int, max_num_seqs: int, vocab_size: int
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._num_stored = [0] * max_num_seqs  # by row, as are the next two
        self._text_keys = [0] * max_num_seqs
        self._draw_keys = [(0, 0)] * max_num_seqs

    def run(self, plan: StepPlan) -> StepResult:
        """Advance the clock by the plan's cost."""
        for new in plan.new_rows:
            self._num_stored[new.row] = new.num_computed
            self._draw_keys[new.row] = new.draw_key
            self._text_keys[new.row] = text_key(*new.draw_key, new.choice)
        num_context, decoded = self._decode(plan)
        chunks = [self._prefill(chunk) for chunk in plan.chunks]
        self._clock.advance(self._costs.step_ns(self._work(plan, num_context, chunks)))
        return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)

    def _decode(self, plan: StepPlan) -> tuple[int, list[int]]:
        """Return the context of the decodes, and their next tokens.

        This is the only loop over all rows, so it inlines `text_token`: a step of 256 sequences
        must not cost more than its scheduling.
        """
        stored, keys, vocab_size = self._num_stored, self._text_keys, self._vocab_size
        num_context, decoded = 0, []
        for row in plan.decodes:
            stored[row] = position = stored[row] + 1
            num_context += position
            decoded.append((keys[row] * (position + 1) >> 20) % vocab_size)
        return num_context, decoded

    def _prefill(self, chunk: Chunk) -> ChunkResult:
        self._num_stored[chunk.row] = chunk.end
        keys = [text_key(*self._draw_keys[chunk.row], choice) for choice in chunk.choices]
        return ChunkResult(
            token_ids=[text_token(key, chunk.end, self._vocab_size) for key in keys],
            logprobs=[None] * len(keys),
            scored=[],
        )

    def _work(self, plan: StepPlan, num_context: int, results: list[ChunkResult]) -> StepWork:
        chunks, moves = plan.chunks, plan.moves
        return StepWork(
            num_tokens=plan.num_tokens,
            num_sampled=len(plan.decodes) + sum(len(result.token_ids) for result in results),
            num_pairs=sum(causal_pairs(chunk.start, chunk.end) for chunk in chunks),
            num_context=num_context + sum(chunk.end for chunk in chunks),
            num_seqs=len(plan.decodes) + len(chunks),
            num_chunks=len(chunks),
            num_copied=len(moves.copies) * self._block_size,
            num_swapped=(len(moves.imports) + len(moves.exports)) * self._block_size,
        )
