"""Choose product shapes that give a row the same bits, however many rows there are.

A tile is multiplied by a group of rows: (rows of a group, K) @ (K, 64). BLAS selects a kernel by
the shape, and kernels may add in another order. So a trial on fixed numbers finds the group sizes
whose results equal those of the reference bit for bit. It reads no clock: the answer depends on the
CPU's features and the BLAS only.
"""

from itertools import pairwise
from typing import Any, Literal

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.blas import Blas

WIDTH = 64
"""Columns of a tile: four AVX-512 registers of float32."""
REFERENCE = 8
"""Rows of the group whose bits all others must have, and of most groups."""
SMALLER = (2, 4)
"""Rows of the other groups. A single row is multiplied by another kernel."""
LARGEST_PRODUCT = 100**3
"""Maximum rows · K · columns for which OpenBLAS has small-matrix kernels with AVX-512.

The source is interface/gemm.c and kernel/x86_64/sgemm_small_kernel_permit_skylakex.c.
"""
LONGEST_PART = LARGEST_PRODUCT // (REFERENCE * WIDTH)
"""Maximum K of a product. A longer K is cut, and the parts are added."""


def parts_of(num_inputs: int) -> list[tuple[int, int]]:
    """Return the fewest ranges of K that are at most `LONGEST_PART`, of nearly equal length."""
    number = ceil_div(num_inputs, LONGEST_PART)
    bounds = [num_inputs * i // number for i in range(number + 1)]
    return list(pairwise(bounds))


class Groups:
    """Cuts rows into groups, for products in one dtype.

    ``is_turned`` tiles are transposes of contiguous rows (64, K).
    """

    def __init__(self, dtype: np.dtype[Any], *, is_turned: bool = False) -> None:
        self.dtype = dtype
        self._order: Literal["C", "F"] = "F" if is_turned else "C"
        self._sizes: dict[int, list[int]] = {}

    def cut(self, num_rows: int, num_inputs: int) -> tuple[int, int]:
        """Return the number of groups for this many rows, and the rows of each with padding.

        There is one group, or the groups have 4 rows or more and the least padding.
        """
        sizes = self.sizes(num_inputs)
        for size in sizes:
            if num_rows <= size:
                return 1, size
        size = min(reversed(sizes[-2:]), key=lambda size: ceil_div(num_rows, size) * size)
        return ceil_div(num_rows, size), size

    def sizes(self, num_inputs: int) -> list[int]:
        """Return the group sizes that give the same bits, rising."""
        if num_inputs not in self._sizes:
            with Blas().threads(1):  # as in a step
                exact = [size for size in SMALLER if self._is_exact(size, num_inputs)]
            self._sizes[num_inputs] = [*exact, REFERENCE]
        return self._sizes[num_inputs]

    def _is_exact(self, size: int, num_inputs: int) -> bool:
        lengths = {last - first for first, last in parts_of(num_inputs)}
        return all(self._are_same_bits(size, length) for length in lengths)

    def _are_same_bits(self, size: int, length: int) -> bool:
        x = _samples(size * REFERENCE, length).astype(self.dtype)
        tile = _samples(length, WIDTH).astype(self.dtype, order=self._order)
        products = (x.reshape(-1, rows, length) @ tile for rows in (size, REFERENCE))
        first, second = (product.reshape(-1, WIDTH) for product in products)
        return bool((first == second).all())


def _samples(num_rows: int, num_columns: int) -> Floats:
    """Return float64 numbers between -1 and 1 with all digits of float32."""
    counts = np.arange(num_rows * num_columns, dtype=np.uint32)
    counts *= np.uint32(2654435761)  # Knuth's multiplicative hash
    numbers: Floats = (counts / 2.0**31 - 1).reshape(num_rows, num_columns)
    return numbers
