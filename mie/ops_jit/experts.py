"""Record the operators of sparse layers: routing, and products of each expert's rows.

Which rows an expert has is known only in a step. So a kernel sorts them, cuts them into items, and
writes the number of items to the step's header, from which the products' numbers of tiles follow.
"""

from collections.abc import Sequence
from typing import Any

from mie.ops.arrays import Floats
from mie.ops.backend import Backend
from mie.ops.layers.operators import ExpertOperators, ExpertWeights, unchanged
from mie.ops_jit import layout
from mie.ops_jit.layout import NUM_PAIRS, NUM_TOKENS, ROW_TILE
from mie.ops_jit.memory import ExpertMatrices, JitMatrix
from mie.ops_jit.products import multiply, multiply_gated
from mie.ops_jit.program import Value
from mie.ops_jit.recorder import Recorder, operator

WHOLE_STEP = 1 << 40
"""Rows of the only tile of a kernel that must see all tokens."""


class JitExperts(ExpertOperators):
    """The operators of sparse layers."""

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.backend, self.recorder, self.whole = backend, recorder, unchanged

    def load(
        self, *, gate_up: Sequence[JitMatrix], down: Sequence[JitMatrix], **others: Any
    ) -> ExpertWeights:
        """Return the weights of a layer.

        Raises:
            UnsupportedModelError: the experts' matrices have several formats.
        """
        return ExpertWeights(gate_up=ExpertMatrices(gate_up), down=ExpertMatrices(down), **others)

    @operator
    def route(self, x: Value, weights: ExpertWeights) -> Value:
        """Record `ops.experts.route`, or `route_by_sigmoid`."""
        program, k = self.recorder.program, weights.num_chosen
        logits = self.backend.linear(x, weights.router)
        out = program.value(NUM_TOKENS, 2, k)
        if weights.bias is not None:
            program.need_scratch(8 * weights.number)
            by_sigmoid = logits, weights.bias, out, weights.number, k, NUM_TOKENS
            program.emit("route_by_sigmoid", NUM_TOKENS, ROW_TILE, 1, *by_sigmoid)
            return out
        arguments = logits, out, weights.number, k, int(weights.is_normalised), NUM_TOKENS
        program.emit("route", NUM_TOKENS, ROW_TILE, 1, *arguments)
        return out

    @operator
    def compute(
        self, x: Value, routed: Value | Floats, weights: ExpertWeights, residual: Value | Floats
    ) -> Value:
        """Record `ops.experts.experts`."""
        program, k, width = self.recorder.program, weights.num_chosen, x.storage.width
        choices, added = program.maybe_given(routed), program.maybe_given(residual)
        program.choose(k)
        program.need_scratch(8 * (weights.number + 1))
        pairs = program.value(NUM_PAIRS, 2 * layout.PAIR_WORDS)
        items = program.value(NUM_PAIRS, 2 * layout.EXPERT_ITEM_WORDS)
        arguments = choices, pairs, items, weights.number, k, NUM_TOKENS
        program.emit("sort_pairs", NUM_TOKENS, WHOLE_STEP, 1, *arguments)
        rows = program.value(NUM_PAIRS, width)
        program.emit("take_pairs", NUM_PAIRS, ROW_TILE, 1, x, pairs, rows, width, NUM_PAIRS)
        gated = multiply_gated(self.recorder, rows, weights.gate_up, weights.activation, items)
        gated = self.whole(gated, weights.down.shape[1])
        results = multiply(self.recorder, gated, weights.down, items=items)
        results = self.whole(results, width)
        out = program.value(NUM_TOKENS, width)
        program.emit(
            "add_pairs", NUM_TOKENS, ROW_TILE, 1,
            results, choices, pairs, added, out, width, k, NUM_TOKENS,
        )  # fmt: skip
        return out
