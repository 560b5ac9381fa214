"""Multiply rows by panels of weights: the product that matrices and attention share.

A panel holds K inputs of 16 outputs, as [K, 16]. An output is one chain of fused multiply-adds over
k = 0 … K - 1, kept in one lane of a register. So its bits depend on its row and its weights only:
not on the other rows, on the number of threads, or on the shape of the tile that computed it.

A tile of R rows by C panels keeps R x C vectors of sums in registers. For each k it loads C vectors
of weights, broadcasts R numbers of x, and does R x C fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.base.arithmetic import ceil_div
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.panels import Columns, Vectors, over_inputs
from mie.ops_jit.kernels.vectors import (
    F32,
    I64,
    Emitted,
    broadcast,
    call_kernel_at,
    fused,
    int64,
    kernel_function,
    lanes,
    opaque,
    plain,
    pointer,
    splat,
)
from mie.ops_jit.layout import LANES, PANELS


@intrinsic
def call_multiply(
    _, kernel, x, x_stride, w, w_stride, k_stride, ahead, k, out, out_stride, rows, panels, resume
) -> Emitted:
    """Call a kernel of `multiply` at an address."""
    return plain(types.void, [int64] * 13, call_kernel_at)


class Tiles(NamedTuple):
    """The tiles that a CPU's registers hold, with others left for weights and x.

    A column of a tile is ``lanes`` outputs of a panel.
    """

    lanes: int
    widths: tuple[int, ...]
    """The number of columns of a tile of 1, 2, 3 … rows."""
    keeps_offsets: bool = True
    """Whether registers hold the offsets of codes that are read in place."""

    @property
    def columns_of_panel(self) -> int:
        """The number of columns of a panel."""
        return LANES // self.lanes


TILES = {
    512: Tiles(16, (4,) * 6),
    256: Tiles(8, (8, 4, 2, 2, 2, 2)),
    128: Tiles(16, (2, 2, 1, 1, 1)),
}
"""By the bits of a register: AVX-512 has 32, AVX2 has 16, and NEON has 32.

Multiply-adds of NEON take weights from registers only.
"""
BYTE_TILES = {
    512: Tiles(16, (4, 4, 4, 4, 2, 2, 2, 2, *(1,) * 8)),
    256: Tiles(8, (4, 4, 2, 2, 2, 2, 1, 1)),
    128: Tiles(16, (1,) * 4),
}
"""They leave registers for scales and offsets."""
WORD_TILES = {
    512: Tiles(16, (4, 4, 4, 4, 2, 2, *(1,) * 10)),
    256: Tiles(8, (4, 2, 2, 2, 1, 1, 1, 1)),
    128: Tiles(16, (1,) * 4),
}
"""They leave registers for words of codes or a mask, too."""
IN_PLACE_TILES = {**WORD_TILES, 256: Tiles(8, (4, 2, 2, 2, 2, 1, 1, 1), keeps_offsets=False)}
"""Codes are read in place, and offsets can be, too."""

FEW_ROWS = {512: 16, 256: 8, 128: 8}
"""Most rows for which quantised weights are widened in registers, for each tile again."""


def tiles_of(fmt: Format, vector_bits: int) -> Tiles:
    """Return the tiles of a format for registers of this width."""
    if not fmt.headers:
        return TILES[vector_bits]
    if fmt.inputs == 1:
        return BYTE_TILES[vector_bits]
    return (IN_PLACE_TILES if fmt.is_in_place and fmt.scale_bits > 8 else WORD_TILES)[vector_bits]


def _emit_tile(
    b: ir.IRBuilder, rows: int, width: int, fmt: Format, tiles: Tiles,
    x: Any, x_stride: Any, w: Any, w_stride: Any, k_stride: Any, ahead: Any, count: Any,
    lane: Any, out: Any, out_stride: Any, resume: Any,
) -> None:  # fmt: skip
    """Emit the code of one tile: the first sums, the loop over inputs, and the stores.

    A tile of less than a panel begins at ``lane`` of it.
    """
    lanes_, of_panel = tiles.lanes, tiles.columns_of_panel
    panels = ceil_div(width, of_panel)
    row_places = places_of_rows(b, x_stride, rows, width)
    ws = [b.add(w, b.mul(w_stride, I64(c))) for c in range(panels)]
    firsts = [I64(lanes_ * c) for c in range(of_panel)] if width >= of_panel else [lane]
    kind = lanes(F32, lanes_)
    outs = [
        pointer(b, b.add(out, b.add(b.mul(out_stride, I64(r)), I64(4 * lanes_ * c))), kind)
        for r in range(rows)
        for c in range(width)
    ]

    def use(k: ir.Value, weights: Vectors, sums: Vectors) -> Vectors:
        """Add the products of input k."""
        totals: list[ir.Value] = []
        for r, address in enumerate(row_places(b.add(x, b.shl(k, I64(2))))):
            number = broadcast(b, b.load(pointer(b, address, F32), align=4), lanes_)
            own = sums[r * width : (r + 1) * width]
            totals += [fused(b, number, *pair) for pair in zip(weights, own, strict=True)]
        return totals

    distance = ahead
    if panels > 1:
        # Several streams of loads keep memory busy by themselves, unless much is computed for each
        # byte. Then each stream prefetches half as far as a single one.
        computes_much = fmt.headers > 0 or (rows > 1 and fmt.itemsize < 4)
        distance = b.lshr(ahead, I64(1)) if computes_much else None
    first = _first_sums(b, outs, kind, resume)
    columns = Columns(ws, firsts, lanes_)
    totals = over_inputs(
        b, fmt, columns, k_stride, distance, count, first, use, tiles.keeps_offsets
    )
    for total, to in zip(totals, outs, strict=True):
        b.store(total, to, align=4)


def places_of_rows(
    b: ir.IRBuilder, x_stride: ir.Value, rows: int, width: int
) -> Callable[[ir.Value], Iterator[ir.Value]]:
    """Return a function that yields the places of a tile's rows, from the place of the first on.

    Where registers are left, x86 adds two, four or eight times an odd stride to the first place.
    LLVM would add the stride row by row, at the cost of an instruction for each.
    """
    is_small = 1 < rows <= 16 // width
    strides = [b.mul(x_stride, I64(r)) for r in range(rows)]
    odd = {r: opaque(b, strides[r]) for r in range(1, rows, 2) if is_small}

    def places(first: ir.Value) -> Iterator[ir.Value]:
        if not is_small:
            yield from (b.add(first, stride) for stride in strides)
            return
        base = opaque(b, first)
        yield base
        for r in range(1, rows):
            twos = (r & -r).bit_length() - 1
            yield b.add(base, b.shl(odd[r >> twos], I64(twos)))

    return places


def emit_shapes(
    b: ir.IRBuilder, shapes: Collection[tuple[int, int]], rows: ir.Value, width: ir.Value,
    emit_tile: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Branch to the code of a tile's shape."""
    after, other = b.append_basic_block("done"), b.append_basic_block("other")
    switch = b.switch(b.add(b.mul(rows, I64(16)), width), other)
    b.position_at_end(other)
    b.unreachable()
    for shape in sorted(shapes):
        block = b.append_basic_block("tile_{}_{}".format(*shape))
        switch.add_case(I64(shape[0] * 16 + shape[1]), block)
        b.position_at_end(block)
        emit_tile(*shape)
        b.branch(after)
    b.position_at_end(after)


def _first_sums(
    b: ir.IRBuilder, outs: Sequence[ir.Value], kind: ir.VectorType, resume: ir.Value
) -> Vectors:
    """Return the numbers in ``outs``, or zeros."""
    fresh, resumed, begin = (b.append_basic_block(name) for name in ("fresh", "resumed", "begin"))
    b.cbranch(b.icmp_signed("==", resume, I64(0)), fresh, resumed)
    b.position_at_end(resumed)
    old = [b.load(out, align=4) for out in outs]
    b.branch(begin)
    b.position_at_end(fresh)
    b.branch(begin)
    b.position_at_end(begin)
    sums = [b.phi(kind) for _ in old]
    for total, number in zip(sums, old, strict=True):
        total.add_incoming(number, resumed)
        total.add_incoming(splat(F32, 0.0, kind.count), fresh)
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
    most, of_panel, lanes_ = len(tiles.widths), tiles.columns_of_panel, tiles.lanes
    widths = (0, *tiles.widths)
    last = (0, *(min(width, of_panel) for width in widths[1:]))  # of the panels that are left
    shapes = {(rows, each[rows]) for rows in range(1, most + 1) for each in (widths, last)}

    def emit(b: ir.IRBuilder, rows: ir.Value, width: ir.Value, *values: ir.Value) -> None:
        emit_shapes(
            b, shapes, rows, width, lambda *shape: _emit_tile(b, *shape, fmt, tiles, *values)
        )

    @intrinsic
    def tile(
        _, rows, width, x, x_stride, w, w_stride, k_stride, ahead, k, lane, out, out_stride, resume
    ) -> Emitted:
        return plain(types.void, [int64] * 13, emit)

    @kernel_function
    def kernel(x, x_stride, w, w_stride, k_stride, ahead, k, out, out_stride, rows, panels, resume):
        p = 0
        while p < panels:
            columns = min(panels - p, PANELS) * of_panel
            r, left = 0, (rows + most - 1) // most
            while left > 0:  # the group's panels stay in the cache while the rows pass
                height = (rows - r + left - 1) // left
                c = 0
                while c < columns:
                    width = widths[height] if c + widths[height] <= columns else last[height]
                    tile(
                        height, width, x + r * x_stride, x_stride,
                        w + (p + c // of_panel) * w_stride, w_stride, k_stride, ahead, k,
                        c % of_panel * lanes_, out + r * out_stride + p * 64 + c * lanes_ * 4,
                        out_stride, resume,
                    )  # fmt: skip
                    c += width
                r, left = r + height, left - 1
            p += PANELS

    return kernel
