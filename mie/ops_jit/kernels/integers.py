"""Multiply rows that are rounded to 8 bits by panels of codes, with exact sums of integers.

`mie.ops.weights.integer` defines the product. A segment is 16 or 32 inputs that share a scale
in the row and in the weights. The integer sum of a segment is exact in any order. A chain of
multiply-adds over the segments then gives the output, in one order for every tile and CPU.

A segment of a rounded row is its codes in a format's order, the scale, minus the sum of the codes
times the bias that makes a format's codes unsigned, and the sum of the codes as float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops_jit.kernels.dots import Dot
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.panels import (
    Columns,
    Vectors,
    ceil_div,
    headers_of,
    least,
    loop,
    over_groups,
    prefetch,
)
from mie.ops_jit.kernels.products import emit_shapes, places_of_rows
from mie.ops_jit.kernels.vectors import (
    F32,
    I8,
    I32,
    I64,
    Emitted,
    broadcast,
    call_kernel_at,
    fused,
    int64,
    kernel_function,
    lanes,
    load_lanes,
    plain,
    pointer,
    splat,
    splat_like,
)
from mie.ops_jit.layout import segment_words


@intrinsic
def call_multiply_int8(
    _, kernel, x, x_stride, w, w_stride, ahead, segments, out, rows, panels
) -> Emitted:
    """Call a kernel of `multiply_int8` at an address."""
    return plain(types.void, [int64] * 10, call_kernel_at)


def _emit_tile(
    b: ir.IRBuilder, rows: int, width: int, fmt: Format, dot: Dot,
    x: Any, x_stride: Any, w: Any, ahead: Any, segments: Any, lane: Any, out: Any,
) -> None:  # fmt: skip
    """Emit the code of one tile. It begins at ``lane`` of a panel."""
    per_group = fmt.group // fmt.segment
    firsts = [b.add(lane, I64(dot.lanes * c)) for c in range(width)]
    columns = Columns([w], firsts, dot.lanes)
    row_places = places_of_rows(b, x_stride, rows, width)
    segment_bytes = 4 * segment_words(fmt.segment)
    step_inputs = max(fmt.inputs_of_load, 4 * dot.row_words)
    num_steps = fmt.segment // step_inputs
    num_words = fmt.words * step_inputs // fmt.inputs_of_load
    signs = dot.bias * (0x01010101 if fmt.inputs == 4 else 0x11111111)
    signs *= not fmt.has_sextets  # which are stored with the bias
    zeros = splat(I32, 0, dot.lanes)

    def everywhere(place: ir.Value, at: int, kind: ir.Type, count: int) -> Vectors:
        """Return neighbouring words of a row, each in all lanes."""
        if dot.row_words == 1:
            places = [pointer(b, b.add(place, I64(at + 4 * i)), kind) for i in range(count)]
            return [broadcast(b, b.load(each, align=4), dot.lanes) for each in places]
        own = load_lanes(b, b.add(place, I64(at)), kind, count)
        return [b.shuffle_vector(own, own, splat(I32, i, dot.lanes)) for i in range(count)]

    def quads(words: Iterable[Vectors]) -> Iterator[Vectors]:
        """Yield the codes of four inputs of each output, as bytes."""
        for own in words:
            if signs:
                own = [b.xor(each, splat_like(each, I32, signs)) for each in own]
            for half in range(fmt.inputs // 4):
                yield [_bytes_of(b, each, half, fmt) for each in own]

    def dots(words: Iterable[Vectors], places: Vectors, sums: Vectors) -> Vectors:
        """Add the products of words of each output."""
        totals, left, at = [*sums], quads(words), 0
        while ready := [*itertools.islice(left, dot.row_words)]:
            for r, place in enumerate(places):
                numbers = everywhere(place, at, I32, dot.row_words)
                for codes, number in zip(ready, numbers, strict=True):
                    for i, own in enumerate(codes, start=r * width):
                        totals[i] = dot.add(b, totals[i], own, number)
            at += 4 * dot.row_words
        return totals

    def segment(codes: Vectors, headers: Any, index: ir.Value, state: Vectors) -> Vectors:
        base = b.add(x, b.mul(index, I64(segment_bytes)))
        places = [*row_places(base)]
        firsts = [
            everywhere(each, fmt.segment + 4, I32, 1)[0] if dot.bias else zeros for each in places
        ]
        first_sums = firsts if dot.end is None else [zeros] * rows
        sums: Vectors = [each for each in first_sums for _ in range(width)]

        def rows_at(at: ir.Value) -> Vectors:
            if dot.unrolls:
                return [b.add(each, at) for each in places]
            return [*row_places(b.add(base, at))]

        def step(number: ir.Value, sums: Vectors) -> Vectors:
            """Use the words of codes that are loaded together."""
            begin, first = (b.mul(number, I64(size)) for size in (64 * num_words, step_inputs))
            at = columns.places(b, [b.add(each, begin) for each in codes], 4)

            def word(i: ir.Value) -> Vectors:
                return [fmt.load(b, b.add(each, b.shl(i, I64(6))), dot.lanes) for each in at]

            def dots_from(i: ir.Value, words: Iterable[Vectors], sums: Vectors) -> Vectors:
                return dots(words, rows_at(b.add(first, b.mul(i, I64(fmt.inputs)))), sums)

            words = (word(I64(i)) for i in range(num_words))
            last = (
                [fmt.load_last(b, each, dot.lanes) for each in at] for _ in range(fmt.has_sextets)
            )
            if dot.unrolls or num_words == 1:
                return dots_from(I64(0), itertools.chain(words, last), sums)
            sums = loop(b, I64(num_words), lambda i, sums: dots_from(i, [word(i)], sums), sums)
            return dots_from(I64(num_words), last, sums)

        if dot.unrolls or num_steps == 1:
            for number in range(num_steps):
                sums = step(I64(number), sums)
        else:
            sums = loop(b, I64(num_steps), step, sums)
        loaded = [[load() for load in each] for each in headers]
        totals = []
        for r, place in enumerate(places):
            _, scale, _, sum_of_codes = everywhere(place, fmt.segment - 4, F32, 4)
            for c, (weight, *offset) in enumerate(loaded):
                total = sums[r * width + c]
                if dot.end is not None:
                    total = dot.end(b, total, firsts[r])
                term = b.fmul(b.sitofp(total, lanes(F32, dot.lanes)), weight)
                if offset:
                    term = fused(b, sum_of_codes, *offset, term)
                totals.append(fused(b, term, scale, state[r * width + c]))
        return totals

    def group(number: ir.Value, own: Vectors, index: ir.Value, state: Vectors) -> Vectors:
        headers, codes = headers_of(b, fmt, columns, own, index, ahead)
        size = fmt.code_bytes // per_group
        begin = b.mul(number, I64(per_group))

        def step(i: ir.Value, state: Vectors) -> Vectors:
            own = [b.add(each, b.mul(i, I64(size))) for each in codes]
            prefetch(b, own, ahead, size // 64)
            return segment(own, headers, b.add(begin, i), state)

        if per_group == 1:
            return step(I64(0), state)
        return loop(b, least(b, b.sub(segments, begin), I64(per_group)), step, state)

    none = [splat(F32, 0.0, dot.lanes)] * (rows * width)
    totals = iter(over_groups(b, fmt, [w], ceil_div(b, segments, per_group), none, group))
    for r in range(rows):
        for c in range(width):
            to = b.add(out, I64(256 * r + 4 * dot.lanes * c))
            b.store(next(totals), pointer(b, to, lanes(F32, dot.lanes)), align=4)


def _bytes_of(b: ir.IRBuilder, words: ir.Value, half: int, fmt: Format) -> ir.Value:
    """Return bytes of words: every other nibble, or all bytes."""
    if fmt.inputs == 4:
        return words
    if half and words.type.count == 4:  # NEON shifts bytes
        own = b.bitcast(words, lanes(I8, 16))
        return b.bitcast(b.lshr(own, splat_like(own, I8, 4)), words.type)
    if half:
        words = b.lshr(words, splat_like(words, I32, 4))
    return b.and_(words, splat_like(words, I32, 0x0F0F0F0F))


def multiply_int8(fmt: Format, dot: Dot) -> Callable[..., None]:
    """Return the kernel that multiplies rounded rows by any number of panels.

    It is called as kernel(x, x_stride, w, w_stride, ahead, segments, out, rows, panels), with
    strides in bytes from row to row and from panel to panel. It prefetches codes ``ahead`` bytes
    on. ``out`` is [rows, 64].
    """
    most, widths, tile_lanes = len(dot.widths), (0, *dot.widths), dot.lanes

    def emit(b: ir.IRBuilder, rows: ir.Value, width: ir.Value, *values: ir.Value) -> None:
        shapes = [*enumerate(dot.widths, start=1)]
        emit_shapes(b, shapes, rows, width, lambda *shape: _emit_tile(b, *shape, fmt, dot, *values))

    @intrinsic
    def tile(_, rows, width, x, x_stride, w, ahead, segments, lane, out) -> Emitted:
        return plain(types.void, [int64] * 9, emit)

    @kernel_function
    def kernel(x, x_stride, w, w_stride, ahead, segments, out, rows, panels):
        r, left = 0, (rows + most - 1) // most
        while left > 0:  # the panels stay in the cache while the rows pass
            height = (rows - r + left - 1) // left
            width = widths[height]
            for panel in range(panels):
                for lane in range(0, 16, width * tile_lanes):
                    tile(
                        height, width, x + r * x_stride, x_stride, w + panel * w_stride, ahead,
                        segments, lane, out + r * 256 + panel * 64 + lane * 4,
                    )  # fmt: skip
            r, left = r + height, left - 1

    return kernel
