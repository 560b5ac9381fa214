"""Attend to the paged cache, with the same product as matrices.

Keys are scored in groups of 16 positions (panels [Dh, 16]), and values are panels of 16 dimensions.
The softmax is online (Milakov and Gimelshein, 2018, arXiv:1805.02867): it advances by 64 positions,
and `PART` positions at a time are merged into the result. All of these begin at multiples of their
size. So a query's result depends on its position only, not on how its prompt was cut or which
thread computed it.
"""

from collections.abc import Callable

import numpy as np

from mie.ops_jit import layout
from mie.ops_jit.kernels.elementwise import capped, place_of
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.products import call_multiply
from mie.ops_jit.kernels.vectors import (
    everywhere,
    exp,
    first_of,
    fma,
    fma1,
    kernel_function,
    larger,
    largest_of,
    load,
    load_first,
    number,
    set_number,
    store,
    store_first,
    sum_of,
    within,
    word,
    words,
)
from mie.ops_jit.layout import KEY_TILE, PART, RUN

LOWEST = np.float32(-3e38)
"""The largest score so far where there is none. It is finite, so that differences are numbers."""
HIDDEN = np.float32(-np.inf)
ZERO, ONE = np.float32(0), np.float32(1)


@kernel_function
def exp1(x):
    """Return e**x of a number, in all lanes."""
    return exp(everywhere(x))


@kernel_function
def merge_part(whole, part, dim):
    """Merge the state of a part into the state of the parts before it.

    A state is the largest score, the sum of weights, and after 64 bytes the weighted sum of values
    [dim].
    """
    before, after = number(whole, 0), number(part, 0)
    top = max(before, after)
    old, new = exp1(before - top), exp1(after - top)
    set_number(whole, 0, top)
    set_number(whole, 1, fma1(number(whole, 1), first_of(old), number(part, 1) * first_of(new)))
    for i in range(64, 64 + 4 * dim, 64):
        store(whole + i, fma(load(whole + i), old, load(part + i) * new))


@kernel_function
def clear(state, dim):
    """Write the state of no positions."""
    set_number(state, 0, LOWEST)
    set_number(state, 1, ZERO)
    for i in range(64, 64 + 4 * dim, 64):
        store(state + i, everywhere(ZERO))


@kernel_function
def begin_head(state, dim, sinks, head):
    """Write the state of no positions, or of a head's sink with the value zero."""
    clear(state, dim)
    if sinks != 0:
        set_number(state, 0, number(sinks, head))
        set_number(state, 1, ONE)


@kernel_function
def finish(state, out, dim):
    """Write the average of the values [dim]."""
    total = everywhere(number(state, 1))
    for i in range(0, dim, 16):
        store_first(out + 4 * i, load(state + 64 + 4 * i) / total, dim - i)


@kernel_function
def slot_of(args, table, head, position):
    """Return the place of a position among the slots of all heads."""
    block_size = word(args, 10)
    place = place_of(word(table, position // block_size), head, word(args, 6))
    return place * block_size + position % block_size


@kernel_function
def adjacent(args, table, position, end):
    """Return how far memory has the positions from this one on in order, at most ``end``."""
    block_size = word(args, 10)
    block = position // block_size + 1
    while block * block_size < end and word(table, block) % RUN != 0:
        if word(table, block) != word(table, block - 1) + 1:
            break
        block += 1
    return min(block * block_size, end)


@kernel_function
def weigh(own, state, dim, start, end, first, last, scale, cap):
    """Turn a row's scores of the keys start … end - 1 into weights, and advance its state.

    It sees the positions first … last - 1. A cap of 0 is none.
    """
    top = everywhere(LOWEST)
    factor = everywhere(scale)
    for group in range(start, end, 16):
        at = own + (group - start) * 4
        v = load(at) * factor
        if cap > 0:
            v = capped(v, cap)
        v = within(v, first - group, last - group, HIDDEN)
        store(at, v)
        top = larger(v, top)
    before = number(state, 0)
    highest = max(before, largest_of(top))
    total, shift = everywhere(ZERO), everywhere(highest)
    for group in range(start, end, 16):
        at = own + (group - start) * 4
        v = exp(load(at) - shift)
        store(at, v)
        total = total + v
    old = exp1(before - highest)
    set_number(state, 0, highest)
    set_number(state, 1, fma1(number(state, 1), first_of(old), sum_of(total)))
    if before != highest:
        for i in range(64, 64 + 4 * dim, 64):
            store(state + i, load(state + i) * old)


def attend(fmt: Format) -> Callable[..., None]:
    """Return the kernel that attends to a cache of this format."""
    itemsize, widened = fmt.itemsize, fmt.loader()
    has_scales = fmt.largest is not None

    @kernel_function
    def score(args, table, head, q, dim, rows, start, end, scores, packed):
        """Write the products of queries and the keys start … end - 1 [rows, 64], not yet scaled."""
        padded, keys, key_scales = (dim + 15) // 16 * 16, word(args, 1), word(args, 3)
        multiply, wide = words(args + 8 * 13, 2)
        for group in range(start, end, 16):
            out = scores + (group - start) * 4
            scales = packed
            if word(args, 10) % 16 == 0:
                slot = slot_of(args, table, head, group)
                scales, panel = key_scales + slot * 4, keys + slot * padded * itemsize
                call_multiply(
                    multiply, q, dim * 4, panel, 0, 16 * itemsize, 0, dim, out, 256, rows, 1, 0
                )
            else:  # gather the group's keys into a panel
                for i in range(min(16, end - group)):
                    at = slot_of(args, table, head, group + i)
                    for d in range(0, padded, 16):
                        store(packed, widened(keys + (at * padded + d) * itemsize))
                        for j in range(min(16, dim - d)):
                            set_number(packed + 64, (d + j) * 16 + i, number(packed, j))
                call_multiply(wide, q, dim * 4, packed + 64, 0, 64, 0, dim, out, 256, rows, 1, 0)
                if has_scales:
                    for i in range(min(16, end - group)):
                        at = slot_of(args, table, head, group + i)
                        set_number(packed, i, number(key_scales, at))
            if has_scales:
                scale = load_first(scales, end - group)
                for row in range(rows):
                    at = out + row * 256
                    store(at, load(at) * scale)

    @kernel_function
    def add_values(args, table, head, rows, start, begin, end, scores, states, state_bytes, padded):
        """Add the weighted values begin … end - 1 to the states."""
        values, position = word(args, 2), begin
        while position < end:
            count = adjacent(args, table, position, end) - position
            slot = slot_of(args, table, head, position)
            if has_scales:
                scales = word(args, 4) + slot * 4
                for row in range(rows):
                    at = scores + row * 256 + (position - start) * 4
                    for i in range(0, count, 16):
                        v = load_first(at + 4 * i, count - i)
                        v = v * load_first(scales + 4 * i, count - i)
                        store_first(at + 4 * i, v, count - i)
            panels = values + slot * padded * itemsize
            call_multiply(
                word(args, 13), scores + (position - start) * 4, 256, panels,
                16 * itemsize, padded * itemsize, 0, count, states + 64, state_bytes, rows,
                padded // 16, 1,
            )  # fmt: skip
            position += count

    @kernel_function
    def keep(x, stride, rows, dim):
        """Leave queries, and the sums of a part."""

    return attention_of(score, add_values, keep)


def attention_of(
    score: Callable[..., None], add_values: Callable[..., None], turn: Callable[..., None]
) -> Callable[..., None]:
    """Return the kernel that attends to a cache with these parts.

    ``turn`` brings queries to the axes of the keys, and the sums of a part back from the axes of
    the values.
    """

    @kernel_function
    def attend_part(
        args, table, head, q, dim, group, count, position, part, memory, states, state_bytes
    ):
        """Attend from ``count`` queries, the first at ``position``, to one part of the context.

        The states of its count x group rows are overwritten.
        """
        padded, window, scale = (dim + 15) // 16 * 16, word(args, 11), number(args + 8 * 12, 0)
        cap = number(args + 8 * 15, 0)
        rows = count * group
        scores, packed = memory, memory + rows * 256
        for row in range(rows):
            clear(states + row * state_bytes, padded)
        end = min((part + 1) * PART, position + count)
        seen = max(0, position - window + 1) if window > 0 else 0
        for start in range(part * PART, end, KEY_TILE):
            stop = min(start + KEY_TILE, end)
            if stop <= seen:
                continue
            score(args, table, head, q, dim, rows, start, stop, scores, packed)
            for row in range(rows):
                last = position + row // group + 1
                first = max(0, last - window) if window > 0 else 0
                own, state = scores + row * 256, states + row * state_bytes
                weigh(own, state, padded, start, stop, first, last, scale, cap)
            begin = max(start, seen)
            add_values(
                args, table, head, rows, start, begin, stop, scores, states, state_bytes, padded
            )
        turn(states + 64, state_bytes, rows, dim)

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Attend from the queries of an item to one KV head.

        Arguments: q, keys, values, their scales, out, the heads of all layers, Hq, Hkv, Dh, B, the
        window or 0, the scale, the kernels that multiply by the format and by float32, the soft cap
        or 0, the sinks or 0, and the group of the tables to read.
        """
        q, _, _, _, _, out, _, heads, kv_heads, dim, _, window = words(args, 12)
        padded, group = (dim + 15) // 16 * 16, heads // kv_heads
        state_bytes = 64 + 4 * padded
        item = word(step, layout.ITEMS) + tile // kv_heads * layout.ITEM_WORDS * 8
        head = tile % kv_heads
        sequence, query, count, part, slot = words(item, 5)
        begin, end = words(word(step, layout.STARTS) + sequence * 8, 2)
        position = word(word(step, layout.LENGTHS), sequence) - (end - begin) + query
        table_row = word(args, 17) * word(step, layout.NUM_SEQS) + sequence
        table = word(step, layout.TABLES) + table_row * word(step, layout.TABLE_WIDTH) * 8
        rows = count * group
        queries, states = scratch, scratch + rows * dim * 4 + 64
        wholes = states + rows * state_bytes
        memory = wholes + rows * state_bytes
        for i in range(count):
            source = q + ((begin + query + i) * heads + head * group) * dim * 4
            target = queries + i * group * dim * 4
            for j in range(0, group * dim, 16):
                store_first(
                    target + 4 * j, load_first(source + 4 * j, group * dim - j), group * dim - j
                )
        turn(queries, dim * 4, rows, dim)
        first, last = part, part
        if slot < 0:
            for row in range(rows):
                query_head = head * group + row % group
                begin_head(wholes + row * state_bytes, padded, word(args, 16), query_head)
            seen = max(0, position - window + 1) if window > 0 else 0
            first, last = seen // PART, (position + count - 1) // PART
        else:
            states = word(step, layout.PARTIALS) + (slot * heads + head * group) * state_bytes
        for each in range(first, last + 1):
            attend_part(
                args, table, head, queries, dim, group, count, position, each, memory, states,
                state_bytes,
            )  # fmt: skip
            if slot < 0:
                for row in range(rows):
                    merge_part(wholes + row * state_bytes, states + row * state_bytes, padded)
        if slot >= 0:
            return
        for row in range(rows):
            token = begin + query + row // group
            at = out + (token * heads + head * group + row % group) * dim * 4
            finish(wholes + row * state_bytes, at, dim)

    return kernel


@kernel_function
def merge(args, step, tile, scratch):
    """Merge the parts of a query. Arguments: out, Hq, Dh, the sinks or 0."""
    out, heads, dim, sinks = words(args, 4)
    padded = (dim + 15) // 16 * 16
    state_bytes = 64 + 4 * padded
    entry = word(step, layout.MERGES) + tile * 3 * 8
    token, first, count = words(entry, 3)
    for head in range(heads):
        begin_head(scratch, padded, sinks, head)
        for part in range(first, first + count):
            merge_part(
                scratch, word(step, layout.PARTIALS) + (part * heads + head) * state_bytes, padded
            )
        finish(scratch, out + (token * heads + head) * dim * 4, dim)
