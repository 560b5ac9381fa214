"""Multiply rows by a matrix in panels, and finish the sums while they are in the cache.

A tile of work is a group of four panels and a block of rows.
"""

from __future__ import annotations

from collections.abc import Callable

from mie.ops_jit.kernels.calls import call_multiply
from mie.ops_jit.kernels.elementwise import silu
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.products import PANELS
from mie.ops_jit.kernels.vectors import (
    kernel_function,
    load,
    load_first,
    store,
    store_first,
    word,
)
from mie.ops_jit.layout import BLOCK_ROWS, K_BLOCK

SUMS_BYTES = BLOCK_ROWS * PANELS * 64


def panel_product(fmt: Format) -> Callable[..., None]:
    """Return a function that multiplies rows by up to four panels of a matrix, from any panel on.

    ``multiply`` is the address of the kernel `products.multiply`. The sums [rows, 64] are written
    to the address ``sums``.
    """
    itemsize = fmt.itemsize

    @kernel_function
    def product(multiply, x, w, k, rows, first, panels, sums):
        done = 0
        while done < panels:  # once, unless they lie in two groups
            panel = first + done
            some = min(panels - done, PANELS - panel % PANELS)
            base = w + (panel // PANELS * k * PANELS + panel % PANELS) * 16 * itemsize
            for start in range(0, k, K_BLOCK):
                call_multiply(
                    multiply, x + start * 4, k * 4, base + start * 64 * itemsize, 16 * itemsize,
                    64 * itemsize, min(K_BLOCK, k - start), sums + done * 64, 256, rows, some,
                    min(start, 1),
                )  # fmt: skip
            done += some

    return product


def linear(fmt: Format) -> Callable[..., None]:
    """Return the kernel that multiplies by a matrix of this format."""
    product = panel_product(fmt)

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Write x W + bias + residual.

        Arguments: x, W, out, K, N, bias, residual, the word with T, and the kernel that
        multiplies.
        """
        x, w, out, k, n = (
            word(args, 0), word(args, 1), word(args, 2), word(args, 3), word(args, 4),
        )  # fmt: skip
        bias, residual, total = word(args, 5), word(args, 6), word(step, word(args, 7))
        blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
        group, first = tile // blocks, tile % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, total - first)
        column = group * 16 * PANELS
        panels = min(PANELS, (n - column + 15) // 16)
        product(word(args, 8), x + first * k * 4, w, k, rows, group * PANELS, panels, scratch)
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
    product = panel_product(fmt)

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Write silu(x gate) * (x up) [T, F], with F a multiple of 16.

        Arguments: x, W, out, K, F, bias, the word with T, and the kernel that multiplies.
        """
        x, w, out, k, dim = (
            word(args, 0), word(args, 1), word(args, 2), word(args, 3), word(args, 4),
        )  # fmt: skip
        bias, total = word(args, 5), word(step, word(args, 6))
        blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
        group, first = tile // blocks, tile % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, total - first)
        column = group * 16 * PANELS
        panels = min(PANELS, (dim - column) // 16)
        multiply, at = word(args, 7), x + first * k * 4
        up = scratch + SUMS_BYTES
        product(multiply, at, w, k, rows, group * PANELS, panels, scratch)
        product(multiply, at, w, k, rows, dim // 16 + group * PANELS, panels, up)
        for row in range(rows):
            for panel in range(panels):
                here, i = row * 256 + panel * 64, column + 16 * panel
                gates, ups = load(scratch + here), load(up + here)
                if bias != 0:
                    gates, ups = gates + load(bias + 4 * i), ups + load(bias + 4 * (dim + i))
                store(out + ((first + row) * dim + i) * 4, silu(gates, ups))

    return kernel
