"""Kernels of adapters: a row's products with the A and the B of its own adapter.

A row is computed alone and in a fixed order, so its bits depend on no other row. A pair of the
step's list is a token and its slot. Tokens without an adapter are not in the list.
"""

import numpy as np

from mie.ops_jit.kernels.vectors import (
    everywhere,
    fma,
    kernel_function,
    load,
    load_first,
    number,
    set_number,
    store_first,
    sum_of,
    word,
    words,
)
from mie.ops_jit.layout import ADAPTED, ADAPTED_TILE, EXPAND_SHARES, NUM_ADAPTED, SLOT_WORDS


@kernel_function
def dot(x, y, count):
    """Return the sum of the products of ``count`` numbers."""
    zero = everywhere(np.float32(0))
    first, second, whole = zero, zero, count - count % 32
    for i in range(0, whole, 32):
        first = fma(load(x + 4 * i), load(y + 4 * i), first)
        second = fma(load(x + 4 * i + 64), load(y + 4 * i + 64), second)
    for i in range(whole, count, 16):
        first = fma(load_first(x + 4 * i, count - i), load_first(y + 4 * i, count - i), first)
    return sum_of(first + second)


@kernel_function
def shrink_rows(args, step, tile, scratch):
    """Write x A^T of the adapted rows and one part of a matrix.

    Arguments: x [T, K], A [slots, parts, R, K], the ranks [slots, parts], out [T, parts, R], K, R,
    the number of parts.
    """
    x, a, ranks, out, num_inputs, max_rank, num_parts = words(args, 7)
    part, first = tile % num_parts, tile // num_parts * ADAPTED_TILE
    pairs = word(step, ADAPTED)
    for pair in range(first, min(word(step, NUM_ADAPTED), first + ADAPTED_TILE)):
        token, slot = word(pairs, pair * SLOT_WORDS), word(pairs, pair * SLOT_WORDS + 1)
        own = a + (slot * num_parts + part) * max_rank * num_inputs * 4
        to = out + (token * num_parts + part) * max_rank * 4
        for rank in range(word(ranks, slot * num_parts + part)):
            row = own + rank * num_inputs * 4
            set_number(to, rank, dot(x + token * num_inputs * 4, row, num_inputs))


@kernel_function
def expand_rows(args, step, tile, scratch):
    """Add a share of h B^T to the adapted rows of a product. B has the scale.

    Arguments: h [T, parts, R], B [slots, panels, R, 16], the ranks [slots, parts], the panels
    [panels, 3] (first output, number of outputs, part), out [T, N], N, R, the numbers of parts and
    of panels.
    """
    h, b, ranks, panels, out, width, max_rank, num_parts, num_panels = words(args, 9)
    share, first = tile % EXPAND_SHARES, tile // EXPAND_SHARES * ADAPTED_TILE
    pairs = word(step, ADAPTED)
    begin, end = share * num_panels // EXPAND_SHARES, (share + 1) * num_panels // EXPAND_SHARES
    for pair in range(first, min(word(step, NUM_ADAPTED), first + ADAPTED_TILE)):
        token, slot = word(pairs, pair * SLOT_WORDS), word(pairs, pair * SLOT_WORDS + 1)
        for panel in range(begin, end):
            column, count = word(panels, 3 * panel), word(panels, 3 * panel + 1)
            part = word(panels, 3 * panel + 2)
            rank = word(ranks, slot * num_parts + part)
            if rank == 0:
                continue
            inputs = h + (token * num_parts + part) * max_rank * 4
            own = b + (slot * num_panels + panel) * max_rank * 64
            total = everywhere(np.float32(0))
            for i in range(rank):
                total = fma(everywhere(number(inputs, i)), load(own + 64 * i), total)
            at = out + (token * width + column) * 4
            store_first(at, load_first(at, count) + total, count)
