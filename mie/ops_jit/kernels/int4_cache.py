"""Write and read a cache of 4-bit codes, as `mie.ops.weights.int4_cache` defines it.

A block of a head has B / 2 x Dh bytes of codes, and [2, G, B] float16 numbers: the scales and the
offsets of G groups. The keys of 16 positions are words of eight channels [Dh / 8, 16], the first
channel in the lowest nibble. Values, and keys if B is not a multiple of 16, have 8 bytes for 16
channels, each with one of the first 8 channels in the low nibble and one of the last 8 in the high.

Attention widens 16 positions at a time to the float32 numbers of the definition, still rotated. It
rotates the queries instead of the keys, and the sums of a part instead of the values.
"""

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops.weights.int4_cache import GROUP, LARGEST_CODE, ROTATION_IN, ROTATION_OUT
from mie.ops_jit.kernels.attention import attention_of
from mie.ops_jit.kernels.elementwise import place_of, rope_write_of
from mie.ops_jit.kernels.formats import FORMATS
from mie.ops_jit.kernels.products import call_multiply
from mie.ops_jit.kernels.vectors import (
    F32,
    I8,
    I32,
    VECTOR,
    Emitted,
    everywhere,
    fma,
    fused,
    int64,
    kernel_function,
    lanes,
    larger,
    largest_of,
    load,
    load_lanes,
    number,
    plain,
    pointer,
    set_number,
    smaller,
    splat,
    store,
    sum_of,
    vector,
    within,
    word,
)
from mie.ops_jit.layout import LANES

ZERO, NAN, INFINITY = np.float32(0), np.float32(np.nan), np.float32(np.inf)
LARGEST = np.float32(LARGEST_CODE)
BEFORE, AFTER = np.float32(ROTATION_IN), np.float32(ROTATION_OUT)
load_halves, store_halves = FORMATS["float16"].loader(), FORMATS["float16"].storer()
copy_half, store_bytes = FORMATS["float16"].copier(), FORMATS["int8"].storer()


@intrinsic
def half(_, address) -> Emitted:
    """Load a float16 number."""

    def emit(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
        return b.fpext(b.load(pointer(b, at, ir.HalfType()), align=2), F32)

    return plain(types.float32, [int64], emit)


@intrinsic
def join_nibbles(_, low, high, target) -> Emitted:
    """Write a byte with the nibbles of the bytes at two addresses."""

    def emit(b: ir.IRBuilder, low: ir.Value, high: ir.Value, target: ir.Value) -> None:
        first, second = (b.load(pointer(b, at, I8), align=1) for at in (low, high))
        b.store(b.or_(first, b.shl(second, I8(4))), pointer(b, target, I8), align=1)

    return plain(types.void, [int64] * 3, emit)


@intrinsic
def nibbles(_, address) -> Emitted:
    """Load 16 codes of 8 bytes: the low nibbles, and then the high ones."""

    def emit(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
        pairs = b.zext(load_lanes(b, at, I8, LANES // 2), lanes(I32, LANES // 2))
        high = b.lshr(pairs, splat(I32, 4, LANES // 2))
        order = ir.Constant(lanes(I32), [I32(lane) for lane in range(LANES)])
        codes = b.and_(b.shuffle_vector(pairs, high, order), splat(I32, LARGEST_CODE))
        return b.sitofp(codes, VECTOR)

    return plain(vector, [int64], emit)


@intrinsic
def widen_words(_, address, scales, offsets, out) -> Emitted:
    """Widen the codes of 8 channels of 16 positions to float32 [8, 16]."""

    def emit(b: ir.IRBuilder, at: ir.Value, scales: ir.Value, offsets: ir.Value, out: ir.Value):
        codes = load_lanes(b, at, I32)
        for channel in range(8):
            shifted = b.lshr(codes, splat(I32, 4 * channel))
            code = b.sitofp(b.and_(shifted, splat(I32, LARGEST_CODE)), VECTOR)
            target = pointer(b, b.add(out, out.type(64 * channel)), VECTOR)
            b.store(fused(b, code, scales, offsets), target, align=4)

    return plain(types.void, [int64, vector, vector, int64], emit)


@intrinsic
def mixed(_, x) -> Emitted:
    """Multiply by Hadamard's matrix of order 16, pass by pass."""

    def emit(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        undefined = ir.Constant(VECTOR, ir.Undefined)
        for distance in (1, 2, 4, 8):
            order = ir.Constant(lanes(I32), [I32(lane ^ distance) for lane in range(LANES)])
            other = b.shuffle_vector(x, undefined, order)
            signs = [F32(-1.0 if lane & distance else 1.0) for lane in range(LANES)]
            x = b.fadd(other, b.fmul(x, ir.Constant(VECTOR, signs)))
        return x

    return plain(vector, [vector], emit)


@kernel_function
def mix(x, dim, factor):
    """Multiply the whole groups of a vector by a factor and Hadamard's matrix of order 32."""
    by = everywhere(factor)
    for start in range(0, dim // GROUP * GROUP, GROUP):
        own = x + 4 * start
        first, second = mixed(load(own) * by), mixed(load(own + 64) * by)
        store(own, first + second)
        store(own + 64, first - second)


@kernel_function
def write(x, spare, dim, elements, scales, place, offset, block_size, is_panel):
    """Write a vector x [padded Dh], which is overwritten, to an offset of a block."""
    padded, groups = (dim + 15) // 16 * 16, (dim + GROUP - 1) // GROUP
    codes, factors = elements + place * block_size * padded // 2, spare + 4 * padded
    target = scales + (place * 2 * groups * block_size + offset) * 2
    mix(x, dim, BEFORE)
    for group in range(groups):
        own, size = x + group * GROUP * 4, min(GROUP, dim - group * GROUP)
        top = everywhere(-INFINITY)
        bottom, check = top, everywhere(ZERO)  # of the negated numbers; 0 without infinity or NaN
        for i in range(0, size, 16):
            v = load(own + 4 * i)
            negated = everywhere(ZERO) - v
            top = larger(within(v, 0, size - i, -INFINITY), top)
            bottom = larger(within(negated, 0, size - i, -INFINITY), bottom)
            check = check + (v - v)
        highest, lowest = largest_of(top), ZERO - largest_of(bottom)
        store_halves(everywhere((highest + largest_of(bottom)) / LARGEST), factors)
        store_halves(everywhere(lowest), factors + 32)
        scale, shift = half(factors), half(factors + 32)
        if sum_of(check) + (scale - scale) + (shift - shift) != 0:
            scale = NAN
            store_halves(everywhere(NAN), factors)
            store_halves(everywhere(NAN), factors + 32)
        copy_half(factors, target + group * block_size * 2)
        copy_half(factors + 32, target + (groups + group) * block_size * 2)
        for i in range(0, size, 16):
            v = everywhere(ZERO)
            if scale > 0:
                v = (load(own + 4 * i) - everywhere(shift)) / everywhere(scale)
                v = smaller(larger(v, everywhere(ZERO)), everywhere(LARGEST))
                v = within(v, 0, size - i, ZERO)
            store_bytes(v, spare + group * GROUP + i)
    if is_panel:
        panel = codes + offset // 16 * padded * 8 + offset % 16 * 4
        for pair in range(padded // 2):
            at = panel + pair // 4 * 64 + pair % 4
            join_nibbles(spare + 2 * pair, spare + 2 * pair + 1, at)
    else:
        row = codes + offset * padded // 2
        for pair in range(padded // 2):
            at = spare + pair // 8 * 16 + pair % 8
            join_nibbles(at, at + 8, row + pair)


@kernel_function
def widen_16(codes, factors, step, padded, i):
    """Return 16 channels of a position's codes, from ``i`` on.

    The factors of neighbouring groups are ``step`` bytes apart.
    """
    at = factors + i // GROUP * step
    scale, shift = half(at), half(at + (padded + GROUP - 1) // GROUP * step)
    return fma(nibbles(codes + i // 2), everywhere(scale), everywhere(shift))


@kernel_function
def widen_panel(codes, factors, step, padded, panel):
    """Widen the keys of 16 positions to float32 [Dh, 16]."""
    groups = (padded + GROUP - 1) // GROUP
    for group in range(groups):
        at = factors + group * step
        scales, shifts = load_halves(at), load_halves(at + groups * step)
        for channel in range(group * GROUP, min((group + 1) * GROUP, padded), 8):
            widen_words(codes + channel * 8, scales, shifts, panel + channel * 64)


@kernel_function
def places(args, table, head, position, padded, codes, factors):
    """Return a position's codes and factors, and how many positions end its block."""
    block_size = word(args, 10)
    block, offset = position // block_size, position % block_size
    place = place_of(word(table, block), head, word(args, 6))
    own = codes + (place * block_size + offset) * padded // 2
    groups = (padded + GROUP - 1) // GROUP
    return own, factors + (place * 2 * groups * block_size + offset) * 2, block_size - offset


@kernel_function
def score(args, table, head, q, dim, rows, start, end, scores, packed):
    """Write the products of queries and the keys start … end - 1 [rows, 64], not yet scaled."""
    padded, panel, step = (dim + 15) // 16 * 16, packed + 64, word(args, 10) * 2
    all_keys, all_factors = word(args, 1), word(args, 3)
    for group in range(start, end, 16):
        if step % 32 == 0:
            keys, factors, _ = places(args, table, head, group, padded, all_keys, all_factors)
            widen_panel(keys, factors, step, padded, panel)
        else:  # gather the group's keys into a panel
            for i in range(min(16, end - group)):
                at = group + i
                keys, factors, _ = places(args, table, head, at, padded, all_keys, all_factors)
                for d in range(0, padded, 16):
                    store(packed, widen_16(keys, factors, step, padded, d))
                    for j in range(min(16, dim - d)):
                        set_number(panel, (d + j) * 16 + i, number(packed, j))
        out = scores + (group - start) * 4
        call_multiply(word(args, 14), q, dim * 4, panel, 0, 64, 0, dim, out, 256, rows, 1, 0)


@kernel_function
def add_values(args, table, head, rows, start, begin, end, scores, states, state_bytes, padded):
    """Add the weighted values begin … end - 1 to the states."""
    panel, step, left = scores + rows * 256 + 64, word(args, 10) * 2, 0
    values, factors = word(args, 2), word(args, 4)
    for first in range(begin, end, 16):
        count = min(16, end - first)
        for i in range(count):
            if left == 0:
                values, factors, left = places(
                    args, table, head, first + i, padded, word(args, 2), word(args, 4)
                )
            for d in range(0, padded, 16):
                store(panel + (i * padded + d) * 4, widen_16(values, factors, step, padded, d))
            values, factors, left = values + padded // 2, factors + 2, left - 1
        call_multiply(
            word(args, 14), scores + (first - start) * 4, 256, panel, 64, padded * 4, 0, count,
            states + 64, state_bytes, rows, padded // 16, 1,
        )  # fmt: skip


@kernel_function
def turn(x, stride, rows, dim):
    """Rotate the vectors of rows."""
    for row in range(rows):
        mix(x + row * stride, dim, AFTER)


def rope_write() -> Callable[..., None]:
    """Return the kernel that rotates queries and keys, and writes the cache."""
    return rope_write_of(write)


def attend() -> Callable[..., None]:
    """Return the kernel that attends to the cache."""
    return attention_of(score, add_values, turn)
