"""Multiply rows by panels of weights: the product that matrices and attention share.

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
from mie.ops_jit.kernels.panels import Vectors, over_inputs
from mie.ops_jit.kernels.vectors import (
    F32,
    I64,
    VECTOR,
    Emitted,
    broadcast,
    call_kernel_at,
    fused,
    int64,
    kernel_function,
    plain,
    pointer,
    splat,
)
from mie.ops_jit.layout import PANELS


@intrinsic
def call_multiply(
    _, kernel, x, x_stride, w, w_stride, k_stride, ahead, k, out, out_stride, rows, panels, resume
) -> Emitted:
    """Call a kernel of `multiply` at an address."""
    return plain(types.void, [int64] * 13, call_kernel_at)


class Tiles(NamedTuple):
    """The largest tiles that a CPU's registers hold, with others left for weights and x."""

    sums: int
    """Vectors of sums, if there are several panels."""
    rows: int
    panels: int
    words: int = 1
    """Words of a block for which there is code, if codes are read in place."""

    def width(self, rows: int) -> int:
        """Return how many panels a tile of ``rows`` has."""
        fitting = (each for each in (4, 2) if each <= self.panels and rows * each <= self.sums)
        return next(fitting, 1)


TILES = {512: Tiles(24, 6, 4), 256: Tiles(5, 5, 4), 128: Tiles(5, 5, 2)}
"""By the bits of a register: AVX-512 has 32, AVX2 has 16, and NEON has 32.

Multiply-adds of NEON take weights from registers only.
"""
QUANTISED_TILES = {512: Tiles(16, 8, 4), 256: Tiles(2, 4, 2), 128: Tiles(1, 4, 1)}
"""They leave registers for scales, offsets and codes."""
WORD_TILES = {512: Tiles(12, 8, 4), 256: Tiles(1, 4, 1, words=4), 128: Tiles(1, 4, 1)}
"""They leave registers for offsets too."""


def tiles_of(fmt: Format, vector_bits: int) -> Tiles:
    """Return the largest tiles of a format for registers of this width."""
    if not fmt.headers:
        return TILES[vector_bits]
    has_most = fmt.headers > 1 and fmt.inputs > 1
    return (WORD_TILES if has_most else QUANTISED_TILES)[vector_bits]


def _emit_tile(
    b: ir.IRBuilder, rows: int, panels: int, fmt: Format,
    x: Any, x_stride: Any, w: Any, w_stride: Any, k_stride: Any, ahead: Any, count: Any,
    out: Any, out_stride: Any, resume: Any, written_out: int,
) -> None:  # fmt: skip
    """Emit the code of one tile: the first sums, the loop over inputs, and the stores."""
    xs = [b.add(x, b.mul(x_stride, I64(r))) for r in range(rows)]
    ws = [b.add(w, b.mul(w_stride, I64(c))) for c in range(panels)]
    outs = [
        pointer(b, b.add(out, b.add(b.mul(out_stride, I64(r)), I64(64 * c))), VECTOR)
        for r in range(rows)
        for c in range(panels)
    ]

    def use(k: ir.Value, weights: Vectors, sums: Vectors) -> Vectors:
        """Add the products of input k."""
        totals: list[ir.Value] = []
        for r, each in enumerate(xs):
            address = b.add(each, b.shl(k, I64(2)))
            number = broadcast(b, b.load(pointer(b, address, F32), align=4))
            own = sums[r * panels : (r + 1) * panels]
            totals += [fused(b, number, *pair) for pair in zip(weights, own, strict=True)]
        return totals

    distance = ahead
    if panels > 1:
        # Several streams of loads keep memory busy by themselves, unless much is computed for each
        # byte. Then each stream prefetches half as far as a single one.
        computes_much = fmt.headers > 0 or (rows > 1 and fmt.itemsize < 4)
        distance = b.lshr(ahead, I64(1)) if computes_much else None
    first = _first_sums(b, outs, resume)
    totals = over_inputs(b, fmt, ws, k_stride, distance, count, first, use, written_out)
    for total, to in zip(totals, outs, strict=True):
        b.store(total, to, align=4)


def _first_sums(b: ir.IRBuilder, outs: Sequence[ir.Value], resume: ir.Value) -> Vectors:
    """Return the numbers in ``outs``, or zeros."""
    fresh, resumed, begin = (b.append_basic_block(name) for name in ("fresh", "resumed", "begin"))
    b.cbranch(b.icmp_signed("==", resume, I64(0)), fresh, resumed)
    b.position_at_end(resumed)
    old = [b.load(out, align=4) for out in outs]
    b.branch(begin)
    b.position_at_end(fresh)
    b.branch(begin)
    b.position_at_end(begin)
    sums = [b.phi(VECTOR) for _ in old]
    for total, number in zip(sums, old, strict=True):
        total.add_incoming(number, resumed)
        total.add_incoming(splat(F32, 0.0), fresh)
    return sums


def multiply(fmt: Format, tiles: Tiles) -> Callable[..., None]:
    """Return the kernel that multiplies any number of rows by any number of panels.

    It is called as kernel(x, x_stride, w, w_stride, k_stride, ahead, K, out, out_stride, rows,
    panels, resume), with strides in bytes from row to row, from panel to panel and from load to
    load. Tiles of one panel prefetch the weights ``ahead`` bytes on. Tiles of several panels
    prefetch half as far where weights are quantised, or where they have 16 bits and several rows
    share them.
    0 is for weights that are not contiguous.
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
            _emit_tile(b, height, width, fmt, *values, tiles.words)
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
