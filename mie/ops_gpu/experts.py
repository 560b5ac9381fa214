"""Implement the operators of sparse layers: choose experts, sort rows by expert, and multiply them.

The host does not wait for the routing. The launches depend on the number of tokens alone, and fit
every choice of experts (kernels/route.cu). So a step of decodes is captured like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.errors import UnsupportedModelError
from mie.ops.activation import ACTIVATIONS
from mie.ops.backend import Array, Backend
from mie.ops.layers.operators import ExpertOperators, ExpertWeights, unchanged
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, kernel_type
from mie.ops_gpu.few_rows import OUTPUT_TILE, shape_of
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.products import Products
from mie.ops_gpu.queue import Queue
from mie.ops_gpu.weights import TILE, CupyLinear, Matrix, QuantisedMatrix

FEW_ROWS, MANY_ROWS = 8, 32
"""Rows of a block, if experts have few tokens, or many (kernels/integer.cuh has the same)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertMatrices:
    """The matrices [N, K] of a layer's experts, one after the other."""

    matrix: Matrix  # [E, N, K], or one of [N, K] whose codes and scales are those of all experts
    bias: Array | None  # [E, N]
    shape: tuple[int, int]

    @property
    def arrays(self) -> list[Array | None]:
        """The kernels' arguments."""
        m = self.matrix
        own = m.arrays if isinstance(m, QuantisedMatrix) else (m, None, None)
        return [*own, self.bias]

    @property
    def shift(self) -> int:
        """The logarithm of the inputs that share a scale."""
        return self.matrix.shift if isinstance(self.matrix, QuantisedMatrix) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedRows:
    """The rows of a step's tokens, sorted by expert: kernels/route.cu."""

    rows: Array  # [T k, D]
    places: Array  # [T k]
    tiles: Array  # [most, 3]
    tile_rows: int


class CupyExperts(ExpertOperators):
    """The operators of sparse layers."""

    def __init__(
        self, backend: Backend, launcher: Launcher, queue: Queue, products: Products, empty: Empty
    ) -> None:
        self.backend, self.whole = backend, unchanged
        self._launcher, self._queue = launcher, queue
        self._products, self._empty = products, empty

    def load(
        self, *, gate_up: Sequence[CupyLinear], down: Sequence[CupyLinear], **others: Any
    ) -> ExpertWeights:
        with self._queue:
            both = self._joined(gate_up), self._joined(down)
        return ExpertWeights(gate_up=both[0], down=both[1], **others)

    def _joined(self, matrices: Sequence[CupyLinear]) -> ExpertMatrices:
        parts = [part for matrix in matrices for part in matrix.parts]
        forms = {part.form if isinstance(part, QuantisedMatrix) else None for part in parts}
        if len(forms) > 1 or len(parts) > len(matrices):
            names = sorted(str(form or "16 or 32 bits") for form in forms)
            raise UnsupportedModelError(
                f"a layer's experts have weights in several forms ({', '.join(names)}); the "
                f"{self.backend.name} backend takes one (choose backend numpy)"
            )
        stack, first = self._launcher.xp.stack, parts[0]

        def joined(name: str) -> Array:
            return stack([getattr(part, name) for part in parts])

        matrix: Matrix
        if isinstance(first, QuantisedMatrix):
            matrix = replace(
                first,
                codes=joined("codes"),
                scales=joined("scales"),
                units=None if first.units is None else joined("units"),
            )
        else:
            matrix = stack(parts)
        biases = [each.bias for each in matrices if each.bias is not None]
        return ExpertMatrices(
            matrix=matrix, bias=stack(biases) if biases else None, shape=first.shape
        )

    def route(self, x: Array, weights: ExpertWeights) -> Array:
        logits = self.backend.linear(x, weights.router)
        (num_tokens, num_experts), num_chosen, warps = logits.shape, weights.num_chosen, 4
        routed = self._empty("routed", (num_tokens, 2, num_chosen), np.dtype(np.float32))
        numbers = (num_tokens, num_experts, num_chosen, int(weights.is_normalised))
        parameters = kernel_type(logits) + ("" if weights.bias is None else ", true")
        kernel = self._launcher.kernel("route.cu", f"route_tokens<{parameters}>")
        args = (logits, weights.bias, routed, *map(np.int32, numbers))
        kernel((ceil_div(num_tokens, warps),), (32 * warps,), args)
        return routed

    def compute(self, x: Array, routed: Array, weights: ExpertWeights, residual: Array) -> Array:
        w, element = weights, kernel_type(x)
        few = element == "float" or routed.shape[0] * w.num_chosen <= FEW_ROWS * w.number
        at = self.sorted_rows(x, routed, w.number, FEW_ROWS if few else MANY_ROWS)
        h = self._gated(at, w)
        h = self.whole(h, w.down.shape[1])
        results = self.multiply("linear", at, h, w.down, "expert results", w.down.shape[0])
        results = self.whole(results, residual.shape[1])
        num_tokens, dim = residual.shape
        threads = block_threads(dim)
        add = self._launcher.kernel("route.cu", f"add_experts<{element}>")
        sizes = np.int32(w.num_chosen), np.int32(dim)
        grid, args = (num_tokens, ceil_div(dim, threads)), (results, routed, at.places, residual)
        add(grid, (threads,), (*args, *sizes))
        return residual

    def sorted_rows(self, x: Array, routed: Array, number: int, tile_rows: int) -> SortedRows:
        """Return the rows [T k, D] of tokens x [T, D] in the order of their experts."""
        num_tokens, _, num_chosen = routed.shape
        num_rows, integer = num_tokens * num_chosen, np.dtype(np.int32)
        most = most_tiles(num_rows, number, tile_rows)
        tokens = self._empty("tokens of experts", (num_rows,), integer)
        places = self._empty("places of experts", (num_rows,), integer)
        tiles = self._empty("tiles of experts", (most, 3), integer)
        numbers = map(np.int32, (num_tokens, num_chosen, tile_rows, most))
        args = (routed, tokens, places, tiles, *numbers)
        sort = self._launcher.kernel("route.cu", "sort_rows")
        sort((number,), (block_threads(num_rows),), args, shared_bytes=4 * number)
        rows = self._products.gather("expert rows", x, tokens, x.dtype)
        return SortedRows(rows=rows, places=places, tiles=tiles, tile_rows=tile_rows)

    def _gated(self, at: SortedRows, weights: ExpertWeights) -> Array:
        """Return the gated activations [T k, F]."""
        matrices, activation = weights.gate_up, weights.activation
        dim = matrices.shape[0] // 2
        # A tile of a quantised matrix has outputs of one half. Integer products are not gated.
        is_uneven = isinstance(matrices.matrix, QuantisedMatrix) and dim % TILE
        if is_uneven or self._products.rounds(matrices.matrix):
            both = self.multiply("linear", at, at.rows, matrices, "expert gates", 2 * dim)
            return self.backend.activate(both, activation)
        kind = ACTIVATIONS.index(activation)
        return self.multiply("gated", at, at.rows, matrices, "expert gates", dim, kind)

    def multiply(
        self,
        name: str,
        at: SortedRows,
        x: Array,
        matrices: ExpertMatrices,
        out_name: str,
        *sizes: int,
    ) -> Array:
        """Launch a kernel of expert_rows.cu. The first of ``sizes`` is the width of the result."""
        outputs, depth = matrices.shape
        out = self._empty(out_name, (len(x), sizes[0]), x.dtype)
        matrix = matrices.matrix
        if isinstance(matrix, QuantisedMatrix) and self._products.rounds(matrix):
            rows, is_few = self._products.integer.round(x), at.tile_rows == FEW_ROWS
            self._products.integer.experts(
                rows, matrix, matrices.bias, at.tiles, out, is_few=is_few
            )
            return out
        is_vector = depth * x.dtype.itemsize % 16 == 0
        shape = shape_of(kernel_type(x), matrix, at.tile_rows, is_vector=is_vector, has_norm=None)
        kernel = self._launcher.kernel("expert_rows.cu", f"experts_{name}{shape.parameters}")
        num_tiles = 2 * ceil_div(sizes[0], TILE) if name == "gated" else ceil_div(outputs, TILE)
        grid = (len(at.tiles), ceil_div(num_tiles * TILE, OUTPUT_TILE))
        numbers = map(np.int32, (depth, matrices.shift, *sizes))
        args: tuple[Any, ...] = (x, *matrices.arrays, at.tiles, out, *numbers)
        kernel(grid, (shape.threads(depth),), args, shared_bytes=shape.streamed_bytes(depth))
        return out


def most_tiles(num_rows: int, number: int, tile_rows: int) -> int:
    """Return the most tiles that rows of any experts fill. An expert's last tile may be short."""
    return (num_rows + min(number, num_rows) * (tile_rows - 1)) // tile_rows
