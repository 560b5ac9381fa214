"""Multiply rows by panels of weights: the one product that matrices and attention use.

A panel holds K inputs of 16 outputs, as [K, 16]. An output is one chain of fused multiply-adds over
k = 0 … K - 1, kept in one lane of a register. So its bits depend on its row and its weights only:
not on the other rows, on the number of threads, or on the shape of the tile that computed it.

A tile of R rows by C panels keeps R x C vectors of sums in registers. For each k it loads C vectors
of weights, broadcasts R numbers of x, and does R x C fused multiply-adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops_jit.kernels.formats import Format, Widen, weights_of
from mie.ops_jit.kernels.vectors import (
    F32,
    I32,
    I64,
    VECTOR,
    Emitted,
    broadcast,
    call_kernel_at,
    emit_prefetch,
    fused,
    int64,
    kernel_function,
    load_lanes,
    opaque,
    plain,
    pointer,
    splat,
)
from mie.ops_jit.layout import INPUTS_OF_WORD, PANELS, words_of_block


@intrinsic
def call_multiply(
    _, kernel, x, x_stride, w, w_stride, k_stride, ahead, k, out, out_stride, rows, panels, resume
) -> Emitted:
    """Call a kernel of `multiply` at an address."""
    return plain(types.void, [int64] * 13, call_kernel_at)


Vectors = Sequence[ir.Value]


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
    totals = _over_inputs(b, fmt, ws, k_stride, distance, count, first, use, written_out)
    for total, to in zip(totals, outs, strict=True):
        b.store(total, to, align=4)


def _over_inputs(
    b: ir.IRBuilder, fmt: Format, panels: Sequence[ir.Value], stride: Any, ahead: Any, count: Any,
    state: Vectors, use: Callable[[ir.Value, Vectors, Vectors], Vectors], written_out: int = 1,
) -> Vectors:  # fmt: skip
    """Emit state = use(k, weights, state) for the inputs k of panels. Return the last state.

    There is a vector of weights for each panel. ``stride`` is from load to load.
    ``written_out`` is the number of words of a block for which there is code, if that has words.
    """

    def over_loads(
        begin: ir.Value, number: ir.Value, places: Sequence[ir.Value], headers: Sequence[Vectors],
        state: Vectors,
    ) -> Vectors:  # fmt: skip
        """Go over inputs that share scales, from ``begin`` on."""

        def widened(codes: Vectors) -> Vectors:
            return [
                weights_of(b, fmt.widen(b, each), header)
                for each, header in zip(codes, headers, strict=True)
            ]

        def step(i: ir.Value, state: Vectors) -> Vectors:
            at = [b.add(each, b.mul(i, stride)) for each in places]
            _prefetch(b, at, ahead)
            loaded = [load_lanes(b, each, fmt.element) for each in at]
            if fmt.after is None:
                return use(b.add(begin, i), widened(loaded), state)
            after, count = fmt.after, len(state)
            first = b.mul(i, I64(fmt.inputs))

            def step_of_words(j: ir.Value, both: Vectors) -> Vectors:
                words, k = both[count:], b.add(begin, b.add(first, j))
                return [*use(k, widened(words), both[:count]), *(after(b, each) for each in words)]

            left = _smaller(b, b.sub(number, first), I64(fmt.inputs))
            return _loop(b, left, step_of_words, [*state, *loaded])[:count]

        return _loop(b, _ceil_div(b, number, fmt.inputs), step, state)

    if not fmt.headers:
        return over_loads(I64(0), count, panels, [()] * len(panels), state)

    def step(group: ir.Value, state: Vectors) -> Vectors:
        own = [b.add(each, b.mul(group, I64(fmt.group_bytes))) for each in panels]
        begin = b.mul(group, I64(fmt.group))
        number = _smaller(b, b.sub(count, begin), I64(fmt.group))
        _prefetch(b, own, ahead, fmt.headers)
        if fmt.inputs > 1 and fmt.after is None:
            return _over_words(b, fmt, own, ahead, written_out, begin, number, state, use)
        headers = [
            [load_lanes(b, b.add(each, I64(64 * i)), F32) for i in range(fmt.headers)]
            for each in own
        ]
        places = [b.add(each, I64(64 * fmt.headers)) for each in own]
        return over_loads(begin, number, places, headers, state)

    return _loop(b, _ceil_div(b, count, fmt.group), step, state)


def _over_words(
    b: ir.IRBuilder, fmt: Format, groups: Sequence[ir.Value], ahead: Any, written_out: int,
    begin: ir.Value, number: ir.Value, state: Vectors,
    use: Callable[[ir.Value, Vectors, Vectors], Vectors],
) -> Vectors:  # fmt: skip
    """Go over the inputs of groups with words of codes, from ``begin`` on.

    A nibble k is read in place, times 2**4k, and its scale is divided by that. Both are exact. No
    CPU has registers for all words of a block, so each nibble reads them from the cache again.
    """
    words, last = words_of_block(fmt.group), INPUTS_OF_WORD - 1
    size, together = INPUTS_OF_WORD * words, min(written_out, words)

    def scales() -> Vectors:
        return [load_lanes(b, opaque(b, each), F32) for each in groups]

    def weights(codes: Vectors, scales: Vectors) -> Vectors:
        numbers = [fmt.widen(b, each) for each in codes]
        return [fused(b, *each) for each in zip(numbers, scales, offsets, strict=True)]

    def block(i: ir.Value, state: Vectors) -> Vectors:
        first, at = b.add(begin, b.mul(i, I64(size))), b.mul(i, I64(64 * words))
        places = [b.add(each, at) for each in codes]
        _prefetch(b, places, ahead, words)

        def nibble(k: ir.Value, state: Vectors, scales: Vectors, cut: Widen) -> Vectors:
            def step(i: ir.Value, state: Vectors) -> Vectors:
                i = b.mul(i, I64(together))
                own = [opaque(b, b.add(each, b.shl(i, I64(6)))) for each in places]
                begin = b.add(first, b.add(b.mul(k, I64(words)), i))
                for j in range(together):
                    each_word = [load_lanes(b, b.add(each, I64(64 * j)), I32) for each in own]
                    values = weights([cut(b, each) for each in each_word], scales)
                    state = use(b.add(begin, I64(j)), values, state)
                return state

            return _loop(b, I64(words // together), step, state)

        def step(k: ir.Value, state: Vectors) -> Vectors:
            number = b.trunc(k, I32)
            mask = broadcast(b, b.shl(I32(15), b.shl(number, I32(2))))
            power = b.sub(I32(127 << 23), b.shl(number, I32(25)))  # the bits of 2**-4k
            factor = broadcast(b, b.bitcast(power, F32))
            small = [b.fmul(each, factor) for each in scales()]
            return nibble(k, state, small, lambda b, each: b.and_(each, mask))

        # The highest nibble would be the sign of the word.
        state = _loop(b, I64(last), step, state)
        shift = splat(I32, 4 * last)
        return nibble(I64(last), state, scales(), lambda b, each: b.lshr(each, shift))

    def rest(i: ir.Value, state: Vectors) -> Vectors:
        """Use an input of a block that ends early."""
        at = b.shl(b.add(b.mul(whole, I64(words)), b.urem(i, I64(words))), I64(6))
        shift = broadcast(b, b.trunc(b.shl(b.udiv(i, I64(words)), I64(2)), I32))
        shifted = [b.lshr(load_lanes(b, b.add(each, at), I32), shift) for each in codes]
        values = weights([b.and_(each, splat(I32, 15)) for each in shifted], scales())
        return use(b.add(begin, b.add(b.mul(whole, I64(size)), i)), values, state)

    offsets = [load_lanes(b, b.add(each, I64(64)), F32) for each in groups]
    codes = [b.add(each, I64(64 * fmt.headers)) for each in groups]
    whole = b.udiv(number, I64(size))
    state = _loop(b, whole, block, state)
    return _loop(b, b.sub(number, b.mul(whole, I64(size))), rest, state)


def _prefetch(
    b: ir.IRBuilder, addresses: Sequence[ir.Value], ahead: ir.Value | None, lines: int = 1
) -> None:
    """Prefetch cache lines from ``ahead`` bytes after each address on. None prefetches nothing."""
    if ahead is not None:
        for each, line in itertools.product(addresses, range(lines)):
            emit_prefetch(b, b.add(b.add(each, ahead), I64(64 * line)))


def _smaller(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


def _ceil_div(b: ir.IRBuilder, x: ir.Value, divisor: int) -> ir.Value:
    return b.udiv(b.add(x, I64(divisor - 1)), I64(divisor))


def widener(fmt: Format) -> Any:
    """Return a function for kernels that widens inputs of a panel to float32 [count, 16]."""

    @intrinsic
    def widen_panel(_: Any, panel: Any, count: Any, out: Any) -> Emitted:
        def emit(b: ir.IRBuilder, panel: ir.Value, count: ir.Value, out: ir.Value) -> None:
            def use(k: ir.Value, weights: Vectors, state: Vectors) -> Vectors:
                b.store(weights[0], pointer(b, b.add(out, b.shl(k, I64(6))), VECTOR), align=4)
                return state

            _over_inputs(b, fmt, [panel], I64(16 * fmt.itemsize), None, count, [], use)

        return plain(types.void, [int64] * 3, emit)

    return widen_panel


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


def _loop(
    b: ir.IRBuilder, count: ir.Value, step: Callable[[ir.Value, Vectors], Vectors], state: Vectors
) -> Vectors:
    """Return the state after ``count`` steps."""
    before = b.block
    head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    k = b.phi(I64)
    kept = [b.phi(each.type) for each in state]
    for phi, first in zip([k, *kept], [I64(0), *state], strict=True):
        phi.add_incoming(first, before)
    b.cbranch(b.icmp_signed("<", k, count), body, after)
    b.position_at_end(body)
    moved = [b.add(k, I64(1)), *step(k, kept)]
    for phi, total in zip([k, *kept], moved, strict=True):
        phi.add_incoming(total, b.block)
    b.branch(head).set_metadata("llvm.loop", _not_unrolled(b.module))
    b.position_at_end(after)
    return kept


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
