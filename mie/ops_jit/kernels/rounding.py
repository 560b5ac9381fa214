"""Round rows to 8 bits for products of integers.

`mie.ops.weights.integer` defines the codes and scales, and `integers` describes a rounded row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops.weights.integer import ACTIVATION_GROUP
from mie.ops_jit.kernels.dots import Dot
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.vectors import (
    F32,
    I8,
    I32,
    I64,
    VECTOR,
    Emitted,
    broadcast,
    call,
    int64,
    kernel_function,
    lanes,
    load,
    load_first,
    plain,
    pointer,
    splat,
    vector,
    word,
    words,
)
from mie.ops_jit.layout import ROUNDED_GROUPS, ROW_TILE, segment_words

INFINITY = 0x7F800000
SMALLEST = int(np.float32(2.0**-100).view(np.int32))
"""Bits of the smallest magnitude that a group's largest number has, unless all codes are zero."""


def _rounder(fmt: Format, dot: Dot) -> Any:
    """Return a function for kernels that writes the segments of 32 numbers of a row."""
    size, num_segments = fmt.segment, ACTIVATION_GROUP // fmt.segment

    def emit(b: ir.IRBuilder, low: ir.Value, high: ir.Value, out: ir.Value) -> None:
        """Compare magnitudes as integers, where infinities and NaNs are the largest."""
        sizes = [b.and_(b.bitcast(x, lanes(I32)), splat(I32, 0x7FFFFFFF)) for x in (low, high)]
        both = b.select(b.icmp_unsigned(">", *sizes), *sizes)
        top = call(b, "llvm.vector.reduce.umax.v16i32", I32, [both])
        largest, is_finite = b.bitcast(top, F32), b.icmp_unsigned("<", top, I32(INFINITY))
        has_codes = b.and_(is_finite, b.icmp_unsigned(">=", top, I32(SMALLEST)))
        scale = b.fdiv(largest, F32(127.0))
        divisor = broadcast(b, b.select(has_codes, scale, F32(1.0)))
        mask = broadcast(b, has_codes)
        codes = []
        for x in (low, high):
            number = call(b, "llvm.rint.v16f32", VECTOR, [b.fdiv(x, divisor)])
            codes.append(b.fptosi(b.select(mask, number, splat(F32, 0.0)), lanes(I32)))
        scale = b.select(has_codes, scale, b.select(is_finite, F32(0.0), largest))
        narrow = [b.trunc(each, lanes(I8)) for each in codes]
        for number in range(num_segments):
            own = codes[number] if num_segments > 1 else b.add(*codes)
            total = call(b, "llvm.vector.reduce.add.v16i32", I32, [own])
            order = [I32(size * number + each) for each in fmt.order]
            mixed = b.shuffle_vector(*narrow, ir.Constant(lanes(I32, size), order))
            at = b.add(out, I64(4 * segment_words(size) * number))
            b.store(mixed, pointer(b, at, mixed.type), align=4)
            values = scale, b.mul(total, I32(-dot.bias)), b.sitofp(total, F32)
            for place, value in enumerate(values):
                to = pointer(b, b.add(at, I64(size + 4 * place)), value.type)
                b.store(value, to, align=4)

    @intrinsic
    def round_group(_: Any, low: Any, high: Any, out: Any) -> Emitted:
        return plain(types.void, [vector, vector, int64], emit)

    return round_group


def round_rows(fmt: Format, dot: Dot) -> Callable[..., None]:
    """Return the kernel that rounds rows for products with this format."""
    round_group = _rounder(fmt, dot)
    group_bytes = ACTIVATION_GROUP // fmt.segment * segment_words(fmt.segment) * 4

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Round a part of some rows.

        Arguments: x [T, K], out, K, the word with T, the number of parts of a row.
        """
        x, out, k, rows_word, parts = words(args, 5)
        groups = (k + ACTIVATION_GROUP - 1) // ACTIVATION_GROUP
        first, begin = tile // parts * ROW_TILE, tile % parts * ROUNDED_GROUPS
        end = min(groups, begin + ROUNDED_GROUPS)
        for row in range(first, min(word(step, rows_word), first + ROW_TILE)):
            for group in range(begin, end):
                left = k - group * ACTIVATION_GROUP
                at = x + (row * k + group * ACTIVATION_GROUP) * 4
                to = out + (row * groups + group) * group_bytes
                if left >= ACTIVATION_GROUP:
                    round_group(load(at), load(at + 64), to)
                else:
                    round_group(load_first(at, left), load_first(at + 64, left - 16), to)

    return kernel
