"""Record the operators of sparse layers: routing, and products of each expert's rows.

Which rows an expert has is known only in a step. So a kernel sorts them, cuts them into items, and
writes the number of items to the step's header, from which the products' numbers of tiles follow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.errors import UnsupportedModelError
from mie.ops.arrays import Floats
from mie.ops.layers.expert_operators import ACTIVATIONS, Activation, ExpertWeights
from mie.ops.numpy_backend import NumpyBackend
from mie.ops_jit import layout
from mie.ops_jit.kernel_cache import Kernels
from mie.ops_jit.layout import LANES, NUM_EXPERT_ITEMS, NUM_PAIRS, NUM_TOKENS, ROW_TILE, SUMS_BYTES
from mie.ops_jit.memory import Matrix, Panels, address
from mie.ops_jit.program import Program, Value, operator

WHOLE_STEP = 1 << 40
"""Rows of the one tile of a kernel that must see all tokens."""


class ExpertMatrices:
    """The matrices [N, K] of a layer's experts, with lists of their addresses."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices
        self.shape, self.segments = matrices[0].shape, matrices[0].segments
        formats = {tuple(panels.format for panels in each.segments) for each in matrices}
        if len(formats) > 1:
            raise UnsupportedModelError(
                f"experts of a layer in several formats ({sorted(formats)}) are not supported "
                "by the jit backend (use weight_dtype='float32', or backend='numpy')"
            )
        segments = zip(*(each.segments for each in matrices), strict=True)
        self.addresses = [_addresses([panels.memory for panels in own]) for own in segments]
        biases = [each.bias for each in matrices if each.bias is not None]
        self.biases = _addresses(biases) if biases else None


def _addresses(arrays: Sequence[Any]) -> Any:
    return np.array([address(array) for array in arrays], np.int64)


class ExpertOperators(NumpyBackend):
    """The part of `JitBackend` that is about experts."""

    _kernels: Kernels
    _recording: Program | None

    @property
    def _program(self) -> Program:
        """The program that is being recorded."""
        assert self._recording is not None
        return self._recording

    def _products(self, panels: Panels) -> tuple[int, int]:
        """Return the kernels that multiply by panels, and by panels that were widened."""
        return self._kernels[f"multiply[{panels.format}]"], self._kernels["multiply[float32]"]

    def load_experts(self, matrices: Sequence[Matrix]) -> ExpertMatrices:
        """Return the matrices of a layer's experts as one weight.

        Raises:
            UnsupportedModelError: they have several formats.
        """
        return ExpertMatrices(matrices)

    @operator
    def route(self, x: Value, weights: ExpertWeights) -> Value:
        """Record `ops.experts.route`, or `route_by_sigmoid`."""
        program, k = self._program, weights.num_chosen
        logits: Any = self.linear(x, weights.router)  # type: ignore[arg-type]  # records a Value
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
    def experts(
        self, x: Value, routed: Value | Floats, weights: ExpertWeights, residual: Value | Floats
    ) -> Value:
        """Record `ops.experts.experts`."""
        program, k, width = self._program, weights.num_chosen, x.storage.width
        choices, added = program.maybe_given(routed), program.maybe_given(residual)
        program.choose(k)
        program.need_scratch(8 * (weights.number + 1))
        pairs = program.value(NUM_PAIRS, 2 * layout.PAIR_WORDS)
        items = program.value(NUM_PAIRS, 2 * layout.EXPERT_ITEM_WORDS)
        arguments = choices, pairs, items, weights.number, k, NUM_TOKENS
        program.emit("sort_pairs", NUM_TOKENS, WHOLE_STEP, 1, *arguments)
        rows = program.value(NUM_PAIRS, width)
        program.emit("take_pairs", NUM_PAIRS, ROW_TILE, 1, x, pairs, rows, width, NUM_PAIRS)
        inner = self._expert_gate_up(rows, weights.gate_up, items, weights.activation)
        results = self._expert_linear(inner, weights.down, items)
        out = program.value(NUM_TOKENS, width)
        program.emit(
            "add_pairs", NUM_TOKENS, ROW_TILE, 1,
            results, choices, pairs, added, out, width, k, NUM_TOKENS,
        )  # fmt: skip
        return out

    def _expert_gate_up(
        self, x: Value, weight: ExpertMatrices, items: Value, activation: Activation
    ) -> Value:
        """Multiply by the matrices of gate and up, and activate."""
        program, width = self._program, weight.shape[0] // 2
        panels, *others = weight.segments
        out = program.value(NUM_PAIRS, width)
        kind = ACTIVATIONS.index(activation)
        if others or width % LANES:
            gate_up = self._expert_linear(x, weight, items)
            program.emit("gate_mul", NUM_PAIRS, ROW_TILE, 1, gate_up, out, width, NUM_PAIRS, kind)
            return out
        program.need_scratch(2 * SUMS_BYTES + panels.widened_bytes)
        num_groups = ceil_div(width, LANES * layout.PANELS)
        program.emit(
            f"gate_up[{panels.format}]", NUM_EXPERT_ITEMS, 1, num_groups,
            x, weight.addresses[0], out, weight.shape[1], width, weight.biases, 0,
            *self._products(panels), kind, items,
        )  # fmt: skip
        return out

    def _expert_linear(self, x: Value, weight: ExpertMatrices, items: Value) -> Value:
        """Multiply each expert's rows by its matrix."""
        program, (num_outputs, num_inputs) = self._program, weight.shape
        out, first = program.value(NUM_PAIRS, num_outputs), 0
        for panels, addresses in zip(weight.segments, weight.addresses, strict=True):
            program.need_scratch(SUMS_BYTES + panels.widened_bytes)
            program.emit(
                f"linear[{panels.format}]", NUM_EXPERT_ITEMS, 1, panels.num_groups,
                x, addresses, out, num_inputs, panels.shape[0], weight.biases, None, 0,
                *self._products(panels), num_outputs, first, items,
            )  # fmt: skip
            first += panels.shape[0]
        return out
