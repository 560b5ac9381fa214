"""Choose the sizes of the products that the plan `tiled` makes.

A product is (group of rows, K) @ (K, width of a tile). Its size decides which BLAS kernel computes
it, how often that kernel is called, and for some kernels how a row is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.samples import samples
from mie.ops_cpu.threads.blas import Blas

KERNEL_ROWS = {64: 4, 32: 6}
"""The widths of a tile that the probe may choose, with the rows that a kernel computes at a time.

The kernels keep 4 x 64 or 6 x 32 sums in AVX-512 registers.
"""
DEFAULT_WIDTH = 64
"""Columns of a tile unless the probe found another width to be faster."""
WIDTHS = 32, 48, 64, 96, 128
"""The widths of all layouts."""
REFERENCE_GROUP = 4
"""Rows of the products whose bits all others must have."""
MAX_ROWS = 512
"""Maximum number of rows of a call. More rows take several calls, which read the weights again."""
MAX_GROUP = 24
"""Maximum number of rows of a product. More save no calls worth counting."""
SMALL_PRODUCT = 100**3
"""Maximum M · N · K for which OpenBLAS uses its small-matrix kernels.

The source is interface/gemm.c and kernel/x86_64/sgemm_small_kernel_permit_skylakex.c. A longer K is
cut, and the parts are added.
"""
MOST_INPUTS = 2048
"""Maximum K of a product, so that a tile and the rows fit into 1 MiB of L2 cache."""
CALL_PRODUCTS = 1 << 14
"""Multiplications that take as long as a call of the kernel."""
MAX_CUTS = 1 << 12
"""Number of row cuts, and of task lists, that are remembered."""
REST = 0.7
"""Time of a kernel's remaining rows, relative to the rows that it computes at a time."""


def parts_of(num_inputs: int) -> list[tuple[int, int]]:
    """Return the fewest ranges of K whose products are small, of equal size except the last.

    They do not depend on the width, because the order of a sum must not.
    """
    size = ceil_div(num_inputs, ceil_div(num_inputs, MOST_INPUTS))
    return [(first, min(first + size, num_inputs)) for first in range(0, num_inputs, size)]


class RowCut(NamedTuple):
    """How the rows of a product are cut into calls, and each call's rows into groups."""

    calls: list[tuple[slice, int, int]]
    """The rows of each call, the rows of a group, and the number of groups."""
    num_padded: int
    """The number of rows with padding. A call may pad into the rows of the next one."""


def cut_rows(num_rows: int, costs: Mapping[int, float]) -> RowCut:
    """Return the fastest cut, from the time that each possible group takes."""
    calls = []
    for start in range(0, max(1, num_rows), MAX_ROWS):
        count = min(MAX_ROWS, num_rows - start)
        group = min(costs, key=lambda each: ceil_div(count, each) * costs[each])
        calls.append((slice(start, start + count), group, ceil_div(count, group)))
    num_padded = max(rows.start + group * number for rows, group, number in calls)
    return RowCut(calls, num_padded)


class Geometry:
    """The products of one dtype, and what trials found about their bits."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._groups: dict[tuple[int, int], list[int]] = {}
        self._cuts: dict[tuple[int, int, int], RowCut] = {}

    def is_possible(self, num_inputs: int, width: int) -> bool:
        """Return whether tiles of this width give the same bits as the default."""
        return self._is_equal(num_inputs, width, REFERENCE_GROUP)

    def groups(self, num_inputs: int, width: int) -> list[int]:
        """Return the groups whose products have the bits of the reference, as a trial finds.

        They are even, because a kernel computes two rows in the time of one. A single row is
        multiplied by another kernel.
        """
        if (num_inputs, width) not in self._groups:
            others = (group for group in range(2, MAX_GROUP + 1, 2) if group != REFERENCE_GROUP)
            equal = [group for group in others if self._is_equal(num_inputs, width, group)]
            self._groups[num_inputs, width] = [REFERENCE_GROUP, *equal]
        return self._groups[num_inputs, width]

    def cut(self, num_rows: int, num_inputs: int, width: int) -> RowCut:
        """Return how to multiply this many rows. A row has the same bits in any group."""
        key = num_rows, num_inputs, width
        if key not in self._cuts:
            if len(self._cuts) >= MAX_CUTS:
                self._cuts.clear()
            groups = self.groups(num_inputs, width)
            costs = {group: _cost(group, num_inputs, width) for group in groups}
            self._cuts[key] = cut_rows(num_rows, costs)
        return self._cuts[key]

    def _is_equal(self, num_inputs: int, width: int, group: int) -> bool:
        """Return whether these products are small, and have the bits of the reference."""
        sizes = {last - first for first, last in parts_of(num_inputs)}
        if group * width * max(sizes) > SMALL_PRODUCT:
            return False
        with Blas().threads(1):  # as in a step
            return all(self._are_same_bits(size, width, group) for size in sizes)

    def _are_same_bits(self, num_inputs: int, width: int, group: int) -> bool:
        x = samples(group * REFERENCE_GROUP, num_inputs).astype(self._dtype)
        weight = samples(num_inputs, DEFAULT_WIDTH).astype(self._dtype)
        product = _product(x, weight, group, width)
        return bool((product == _product(x, weight, REFERENCE_GROUP, DEFAULT_WIDTH)).all())


def _cost(group: int, num_inputs: int, width: int) -> float:
    """Return the time of a group, in rows: what its rows take, and a call of the kernel."""
    at_a_time = KERNEL_ROWS[width]
    number, rest = divmod(group, at_a_time)
    kernel_call = CALL_PRODUCTS / (min(num_inputs, MOST_INPUTS) * width)
    return (number + (REST if rest else 0)) * at_a_time + kernel_call


def _product(x: Floats, weight: Floats, group: int, width: int) -> Floats:
    tiles = weight.reshape(len(weight), -1, width).transpose(1, 0, 2).copy()
    product: Floats = np.matmul(x.reshape(-1, group, len(weight)), tiles[:, None])
    rows: Floats = product.transpose(1, 2, 0, 3).reshape(len(x), -1)
    return rows
