"""Multiply rows by a matrix in panels, and finish the sums while they are in the cache.

A tile of work is a group of four panels and a block of rows.
"""

from __future__ import annotations

from collections.abc import Callable

from mie.ops_jit.kernels.elementwise import silu
from mie.ops_jit.kernels.formats import FORMATS, Format
from mie.ops_jit.kernels.products import PANELS, multiplier
from mie.ops_jit.kernels.vectors import (
    kernel_function,
    load,
    load_first,
    store,
    store_first,
    word,
)
from mie.ops_jit.layout import BLOCK_ROWS, K_BLOCK, WIDENED_ROWS

SUMS_BYTES = BLOCK_ROWS * PANELS * 64


def group_product(fmt: Format, registers: int) -> Callable[..., None]:
    """Return a function that multiplies rows by a group of panels: f(x, w, K, rows, panels, …).

    The sums [rows, 64] are written to the address ``sums``. ``wide`` is memory for widened weights.
    """
    multiply, itemsize = multiplier(fmt, registers), fmt.itemsize
    is_wide = itemsize == 4
    multiply_wide = multiply if is_wide else multiplier(FORMATS["float32"], registers)
    widened = fmt.loader()

    @kernel_function
    def product(x, w, k, rows, panels, sums, wide):  # type: ignore[no-untyped-def]
        panel_bytes = k * 16 * itemsize
        for first in range(0, k, K_BLOCK):
            count = min(K_BLOCK, k - first)
            at, resume = w + first * 16 * itemsize, min(first, 1)
            if is_wide or rows < WIDENED_ROWS:
                multiply(
                    x + first * 4, k * 4, at, panel_bytes, count, sums, 256, rows, panels, resume
                )
                continue
            for panel in range(panels):
                for i in range(count):
                    v = widened(at + panel * panel_bytes + i * 16 * itemsize)
                    store(wide + (panel * count + i) * 64, v)
            multiply_wide(
                x + first * 4, k * 4, wide, count * 64, count, sums, 256, rows, panels, resume
            )

    return product


def linear(fmt: Format, registers: int) -> Callable[..., None]:
    """Return the kernel that multiplies by a matrix of this format."""
    product, itemsize = group_product(fmt, registers), fmt.itemsize

    @kernel_function
    def kernel(args, step, tile, scratch):  # type: ignore[no-untyped-def]
        """Write x W + bias + residual. Arguments: x, W, out, K, N, bias, residual, T's word."""
        x, w, out, k, n = (
            word(args, 0), word(args, 1), word(args, 2), word(args, 3), word(args, 4),
        )  # fmt: skip
        bias, residual, total = word(args, 5), word(args, 6), word(step, word(args, 7))
        blocks = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
        group, first = tile // blocks, tile % blocks * BLOCK_ROWS
        rows = min(BLOCK_ROWS, total - first)
        column = group * 16 * PANELS
        panels = min(PANELS, (n - column + 15) // 16)
        product(
            x + first * k * 4, w + column * k * itemsize, k, rows, panels, scratch,
            scratch + SUMS_BYTES,
        )  # fmt: skip
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


def gate_up(fmt: Format, registers: int) -> Callable[..., None]:
    """Return the kernel that multiplies by the gate's and the other half, and activates."""
    product, itemsize = group_product(fmt, registers), fmt.itemsize

    @kernel_function
    def kernel(args, step, tile, scratch):  # type: ignore[no-untyped-def]
        """Write silu(x gate) * (x up) [T, F]. Arguments: x, W, out, K, F, bias, T's word.

        F is a multiple of 16.
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
        at, wide = x + first * k * 4, scratch + 2 * SUMS_BYTES
        product(at, w + column * k * itemsize, k, rows, panels, scratch, wide)
        up = scratch + SUMS_BYTES
        product(at, w + (dim + column) * k * itemsize, k, rows, panels, up, wide)
        for row in range(rows):
            for panel in range(panels):
                here, i = row * 256 + panel * 64, column + 16 * panel
                gates, ups = load(scratch + here), load(up + here)
                if bias != 0:
                    gates, ups = gates + load(bias + 4 * i), ups + load(bias + 4 * (dim + i))
                store(out + ((first + row) * dim + i) * 4, silu(gates, ups))

    return kernel
