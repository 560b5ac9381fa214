"""Multiply rows by a matrix in panels, and finish the sums while they are in the cache.

A tile of work is a group of four panels and a block of rows.
"""

from __future__ import annotations

from collections.abc import Callable

from mie.ops_jit.kernels.elementwise import gated
from mie.ops_jit.kernels.formats import Format
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
from mie.ops_jit.layout import BLOCK_ROWS, K_BLOCK, PANELS, SUMS_BYTES

AHEAD = 4096
"""Bytes from the weights in use to those that are prefetched."""


def group_product(fmt: Format) -> Callable[..., None]:
    """Return a function that multiplies rows by a group of panels.

    ``multiply`` is the address of the kernel `products.multiply`. The sums [rows, 64] are written
    to the address ``sums``.
    """
    itemsize = fmt.itemsize

    @kernel_function
    def product(multiply, x, w, k, rows, panels, sums):
        for first in range(0, k, K_BLOCK):
            count = min(K_BLOCK, k - first)
            call_multiply(
                multiply, x + first * 4, k * 4, w + first * 16 * itemsize, k * 16 * itemsize,
                16 * itemsize, AHEAD, count, sums, 256, rows, panels, min(first, 1),
            )  # fmt: skip

    return product


def linear(fmt: Format) -> Callable[..., None]:
    """Return the kernel that multiplies by a matrix of this format."""
    product, itemsize = group_product(fmt), fmt.itemsize

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Write x W + bias + residual.

        Arguments: x, W, out, K, N, bias, residual, the word with T, and the kernel that
        multiplies.
        """
        x, w, out, k, n, bias, residual, rows_word, multiply = words(args, 9)
        total = word(step, rows_word)
        blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
        group, first = tile // blocks, tile % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, total - first)
        column = group * 16 * PANELS
        panels = min(PANELS, (n - column + 15) // 16)
        at, weights = x + first * k * 4, w + column * k * itemsize
        product(multiply, at, weights, k, rows, panels, scratch)
        for row in range(rows):
            for panel in range(panels):
                at = column + 16 * panel
                count = n - at
                offset = ((first + row) * n + at) * 4
                v = load(scratch + row * 256 + panel * 64)
                if bias != 0:
                    v = v + load_first(bias + 4 * at, count)
                if residual != 0:
                    v = v + load_first(residual + offset, count)
                if count >= 16:
                    store(out + offset, v)
                else:
                    store_first(out + offset, v, count)

    return kernel


def gate_up(fmt: Format) -> Callable[..., None]:
    """Return the kernel that multiplies by the gate's and the other half, and activates."""
    product, itemsize = group_product(fmt), fmt.itemsize

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Write activation(x gate) * (x up) [T, F], with F a multiple of 16.

        Arguments: x, W, out, K, F, bias, the word with T, the kernel that multiplies, and whether
        to activate by GELU.
        """
        x, w, out, k, dim, bias, rows_word, multiply, is_gelu = words(args, 9)
        total = word(step, rows_word)
        blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
        group, first = tile // blocks, tile % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, total - first)
        column = group * 16 * PANELS
        panels = min(PANELS, (dim - column) // 16)
        at, at_up = x + first * k * 4, w + (dim + column) * k * itemsize
        up = scratch + SUMS_BYTES
        product(multiply, at, w + column * k * itemsize, k, rows, panels, scratch)
        product(multiply, at, at_up, k, rows, panels, up)
        for row in range(rows):
            for panel in range(panels):
                here, i = row * 256 + panel * 64, column + 16 * panel
                gates, ups = load(scratch + here), load(up + here)
                if bias != 0:
                    gates, ups = gates + load(bias + 4 * i), ups + load(bias + 4 * (dim + i))
                store(out + ((first + row) * dim + i) * 4, gated(gates, ups, is_gelu))

    return kernel
