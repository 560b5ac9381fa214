"""Multiply rows by panels of weights: the one product that matrices and attention use.

A panel holds K inputs of 16 outputs, as [K, 16]. An output is one chain of fused multiply-adds over
k = 0 … K - 1, kept in one lane of a register. So its bits depend on its row and its weights only:
not on the other rows, on the number of threads, or on the shape of the tile that computed it.

A tile of R rows by C panels keeps R x C vectors of sums in registers. For each k it loads C vectors
of weights, broadcasts R numbers of x, and does R x C fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.vectors import (
    F32,
    I64,
    VECTOR,
    Emitted,
    broadcast,
    emit_prefetch,
    fused,
    int64,
    kernel_function,
    plain,
    pointer,
    splat,
)

PANELS = 4
"""Panels of a group, which is the widest tile."""


class Tiles(NamedTuple):
    """The largest tiles that a CPU's registers hold, with others left for weights and x."""

    sums: int
    """Vectors of sums."""
    rows: int
    panels: int

    def width(self, rows: int) -> int:
        """Return how many panels a tile of ``rows`` has."""
        fitting = (each for each in (4, 2, 1) if each <= self.panels and rows * each <= self.sums)
        return next(fitting)


AVX512 = Tiles(24, 6, 4)
"""32 registers of one vector."""
AVX2 = Tiles(5, 5, 4)
"""16 registers of half a vector."""
NEON = Tiles(5, 5, 2)
"""32 registers of a quarter. Multiply-adds take weights from registers only."""


class _Tile:
    """Emits the code of one tile."""

    def __init__(self, b: ir.IRBuilder, rows: int, panels: int, fmt: Format, *values: Any) -> None:
        self.b, self.fmt = b, fmt
        x, x_stride, w, w_stride, self.k_stride, self.ahead, self.count = values[:7]
        out, out_stride, self.resume = values[7:]
        self.xs = [b.add(x, b.mul(x_stride, I64(r))) for r in range(rows)]
        self.ws = [b.add(w, b.mul(w_stride, I64(c))) for c in range(panels)]
        outs = [b.add(out, b.mul(out_stride, I64(r))) for r in range(rows)]
        self.outs = [
            pointer(b, b.add(each, I64(64 * c)), VECTOR) for each in outs for c in range(panels)
        ]

    def emit(self) -> None:
        """Emit everything: the first sums, the loop over inputs, and the stores."""
        for total, out in zip(self._loop(self._first_sums()), self.outs, strict=True):
            self.b.store(total, out, align=4)

    def _first_sums(self) -> list[ir.Value]:
        """Return the numbers in ``out``, or zeros."""
        b = self.b
        fresh, resumed, begin = (
            b.append_basic_block(name) for name in ("fresh", "resumed", "begin")
        )
        b.cbranch(b.icmp_signed("==", self.resume, I64(0)), fresh, resumed)
        b.position_at_end(resumed)
        old = [b.load(out, align=4) for out in self.outs]
        b.branch(begin)
        b.position_at_end(fresh)
        b.branch(begin)
        b.position_at_end(begin)
        sums = []
        for number in old:
            total = b.phi(VECTOR)
            total.add_incoming(number, resumed)
            total.add_incoming(splat(F32, 0.0), fresh)
            sums.append(total)
        return sums

    def _loop(self, sums: Sequence[ir.Value]) -> list[ir.Value]:
        """Add the products of all inputs."""
        b, before = self.b, self.b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        k = b.phi(I64)
        k.add_incoming(I64(0), before)
        kept = [b.phi(VECTOR) for _ in sums]
        for phi, total in zip(kept, sums, strict=True):
            phi.add_incoming(total, before)
        b.cbranch(b.icmp_signed("<", k, self.count), body, after)
        b.position_at_end(body)
        moved = self._step(k, kept)
        k.add_incoming(b.add(k, I64(1)), b.block)
        for phi, total in zip(kept, moved, strict=True):
            phi.add_incoming(total, b.block)
        b.branch(head).set_metadata("llvm.loop", _not_unrolled(b.module))
        b.position_at_end(after)
        return kept

    def _step(self, k: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
        """Add the products of input k."""
        b, w_offset, x_offset = self.b, self.b.mul(k, self.k_stride), self.b.shl(k, I64(2))
        weights = [self.fmt.widen(b, b.add(w, w_offset)) for w in self.ws]
        if len(self.ws) == 1:
            emit_prefetch(b, b.add(b.add(self.ws[0], w_offset), self.ahead))
        totals = []
        for r, x in enumerate(self.xs):
            number = broadcast(b, b.load(pointer(b, b.add(x, x_offset), F32), align=4))
            totals += [
                fused(b, number, weight, sums[r * len(weights) + c])
                for c, weight in enumerate(weights)
            ]
        return totals


def _not_unrolled(module: ir.Module) -> ir.MDValue:
    """Return the metadata of a loop that LLVM must leave as it is.

    It would unroll, and then keep more numbers than there are registers. The first operand of such
    a node is the node itself (LLVM's language reference, "llvm.loop").
    """
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.MDValue(module, (), name=str(len(module.metadata)))
    node.operands = (node, disable)
    return node


def multiply(fmt: Format, tiles: Tiles) -> Callable[..., None]:
    """Return the kernel that multiplies any number of rows by any number of panels.

    It is called as kernel(x, x_stride, w, w_stride, k_stride, ahead, K, out, out_stride, rows,
    panels, resume), with strides in bytes from row to row, from panel to panel and from input to
    input. Tiles of one panel prefetch the weights ``ahead`` bytes on, because one stream of loads
    does not keep memory busy. 0 is for weights that are not contiguous.
    ``out`` is [rows, 16 panels]. With ``resume`` 1, its chains go on from the numbers in ``out``,
    and with 0 they begin at zero.
    """
    most = tiles.rows
    widths = (0, *(tiles.width(rows) for rows in range(1, most + 1)))
    shapes = {(rows, panels) for rows in range(1, most + 1) for panels in (widths[rows], 1)}

    def emit(b: ir.IRBuilder, rows: ir.Value, panels: ir.Value, *values: ir.Value) -> None:
        """Branch to the code of the tile's shape."""
        after, other = b.append_basic_block("done"), b.append_basic_block("other")
        key = b.add(b.mul(rows, I64(8)), panels)
        switch = b.switch(key, other)
        b.position_at_end(other)
        b.unreachable()
        for height, width in sorted(shapes):
            block = b.append_basic_block(f"tile_{height}_{width}")
            switch.add_case(I64(height * 8 + width), block)
            b.position_at_end(block)
            _Tile(b, height, width, fmt, *values).emit()
            b.branch(after)
        b.position_at_end(after)

    @intrinsic
    def tile(
        _, rows, panels, x, x_stride, w, w_stride, k_stride, ahead, k, out, out_stride, resume
    ) -> Emitted:
        return plain(types.void, [int64] * 12, emit)

    @kernel_function
    def kernel(x, x_stride, w, w_stride, k_stride, ahead, k, out, out_stride, rows, panels, resume):
        p = 0
        while p < panels:
            group = min(panels - p, PANELS)
            r = 0
            while r < rows:  # the group's panels stay in the cache while the rows pass
                height = min(rows - r, most)
                q = 0
                while q < group:
                    width = widths[height] if q + widths[height] <= group else 1
                    tile(
                        height, width, x + r * x_stride, x_stride, w + (p + q) * w_stride,
                        w_stride, k_stride, ahead, k, out + r * out_stride + (p + q) * 64,
                        out_stride, resume,
                    )  # fmt: skip
                    q += width
                r += height
            p += group

    return kernel
