"""Multiply rows by a matrix in panels, and finish the sums while they are in the cache.

A tile of work is a group of four panels and a block of rows.
"""

from collections.abc import Callable

from mie.ops.weights.integer import ACTIVATION_GROUP
from mie.ops_jit.kernels.elementwise import gated
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.integers import call_multiply_int8
from mie.ops_jit.kernels.panels import widener
from mie.ops_jit.kernels.products import call_multiply
from mie.ops_jit.kernels.vectors import (
    kernel_function,
    load,
    load_first,
    store,
    store_first,
    word,
    words,
)
from mie.ops_jit.layout import (
    BLOCK_ROWS,
    EXPERT_ITEM_WORDS,
    K_BLOCK,
    PANELS,
    SUMS_BYTES,
    segment_words,
)

AHEAD = 4096
"""How many bytes ahead a tile of one panel prefetches."""


def group_product(fmt: Format, few: int) -> Callable[..., None]:
    """Return a function that multiplies rows by the group of panels from an output on.

    The rows are those of x from ``first`` on. ``multiply`` and ``wide`` are the addresses of the
    kernels `products.multiply` of this format and of float32. The sums [rows, 64] are written to
    the address ``sums``. Quantised weights for many rows are widened once, to the address
    ``widened``.
    """
    group, group_bytes, load_bytes = fmt.together, fmt.bytes_together, fmt.load_bytes
    most = few if fmt.headers else BLOCK_ROWS
    widen = widener(fmt)

    @kernel_function
    def product(multiply, wide, x, first, w, k, output, rows, panels, sums, widened):
        stride = (k + group - 1) // group * group_bytes
        for begin in range(0, k, K_BLOCK):
            count = min(K_BLOCK, k - begin)
            weights = w + output // 16 * stride + begin // group * group_bytes
            numbers, resume = x + (first * k + begin) * 4, min(begin, 1)
            if rows <= most:
                call_multiply(
                    multiply, numbers, k * 4, weights, stride, load_bytes, AHEAD, count,
                    sums, 256, rows, panels, resume,
                )  # fmt: skip
            else:
                for panel in range(panels):
                    widen(weights + panel * stride, AHEAD, count, widened + panel * count * 64)
                call_multiply(
                    wide, numbers, k * 4, widened, count * 64, 64, 0, count,
                    sums, 256, rows, panels, resume,
                )  # fmt: skip

    return product


def rounded_group_product(fmt: Format) -> Callable[..., None]:
    """Return a function like that of `group_product`, for rows that are rounded to 8 bits.

    ``multiply`` is the address of the kernel `integers.multiply_int8` of this format.
    """
    group, group_bytes, segment = fmt.together, fmt.bytes_together, fmt.segment
    segment_bytes = 4 * segment_words(segment)
    segments_of_group = ACTIVATION_GROUP // segment

    @kernel_function
    def product(multiply, wide, x, first, w, k, output, rows, panels, sums, widened):
        stride = (k + group - 1) // group * group_bytes
        groups = (k + ACTIVATION_GROUP - 1) // ACTIVATION_GROUP
        row_bytes = groups * segments_of_group * segment_bytes
        call_multiply_int8(
            multiply, x + first * row_bytes, row_bytes, w + output // 16 * stride, stride, AHEAD,
            (k + segment - 1) // segment, sums, rows, panels,
        )  # fmt: skip

    return product


@kernel_function
def work_of(step, tile, rows_word, outputs, w, bias, items):
    """Return a tile's group of panels, first row and number of rows, and its matrix and bias.

    With items, these are of one expert each, and ``w`` and ``bias`` are lists of addresses.
    """
    if items != 0:
        groups = (outputs + 16 * PANELS - 1) // (16 * PANELS)
        item = items + tile // groups * EXPERT_ITEM_WORDS * 8
        expert, first, rows = words(item, 3)
        return tile % groups, first, rows, word(w, expert), word(bias, expert) if bias != 0 else 0
    total = word(step, rows_word)
    blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tile % blocks * BLOCK_ROWS
    return tile // blocks, first, min(BLOCK_ROWS, total - first), w, bias


def linear(product: Callable[..., None]) -> Callable[..., None]:
    """Return the kernel that multiplies by a matrix, with the product of a group of panels."""

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Write x W + bias + residual to N columns of ``out``, from column ``first`` on.

        Arguments: x, W, out, K, N, bias, residual, the word with T, the kernels that multiply, the
        width of out, first, and the items of experts or 0.
        """
        x, ws, out, k, n, biases, residual, rows_word, multiply, wide, width, left = words(args, 12)
        items = word(args, 12)
        group, first, rows, w, bias = work_of(step, tile, rows_word, n, ws, biases, items)
        column = group * 16 * PANELS
        panels = min(PANELS, (n - column + 15) // 16)
        widened = scratch + SUMS_BYTES
        product(multiply, wide, x, first, w, k, column, rows, panels, scratch, widened)
        for row in range(rows):
            for panel in range(panels):
                at = column + 16 * panel
                count = n - at
                offset = ((first + row) * width + left + at) * 4
                v = load(scratch + row * 256 + panel * 64)
                if bias != 0:
                    v = v + load_first(bias + 4 * (left + at), count)
                if residual != 0:
                    v = v + load_first(residual + offset, count)
                if count >= 16:
                    store(out + offset, v)
                else:
                    store_first(out + offset, v, count)

    return kernel


def gate_up(product: Callable[..., None]) -> Callable[..., None]:
    """Return the kernel that multiplies by the gate's and the other half, and activates."""

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Write activation(x gate) * (x up) [T, F], with F a multiple of 16.

        Arguments: x, W, out, K, F, bias, the word with T, the kernels that multiply, the
        activation, and the items of experts or 0.
        """
        x, ws, out, k, dim, biases, rows_word, multiply, wide, kind, items = words(args, 11)
        group, first, rows, w, bias = work_of(step, tile, rows_word, dim, ws, biases, items)
        column = group * 16 * PANELS
        panels = min(PANELS, (dim - column) // 16)
        up = scratch + SUMS_BYTES
        widened = up + SUMS_BYTES
        product(multiply, wide, x, first, w, k, column, rows, panels, scratch, widened)
        product(multiply, wide, x, first, w, k, dim + column, rows, panels, up, widened)
        for row in range(rows):
            for panel in range(panels):
                here, i = row * 256 + panel * 64, column + 16 * panel
                gates, ups = load(scratch + here), load(up + here)
                if bias != 0:
                    gates, ups = gates + load(bias + 4 * i), ups + load(bias + 4 * (dim + i))
                store(out + ((first + row) * dim + i) * 4, gated(gates, ups, kind))

    return kernel
