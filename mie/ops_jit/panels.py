"""Lay out a matrix as panels, which the products read in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_jit.memory import zeros

LANES = 16
GROUP = 4
"""Panels of a group (`kernels.products.PANELS`)."""


def padded_rows(num_rows: int) -> int:
    """Return how many rows the panels of a matrix hold, which are whole groups."""
    return ceil_div(num_rows, LANES * GROUP) * LANES * GROUP


class Panels:
    """A matrix [N, K] as panels [N / 16, K, 16] of one dtype, and its bias [N] in float32.

    N is padded with zeros to whole groups of four panels. An embedding table is kept like this too,
    so that the output head can share its memory.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        dtype: np.dtype[Any] | None,
        bias: NDArray[Any] | None = None,
    ) -> None:
        """Convert blocks of whole rows, one at a time.

        They become ``dtype``. None keeps 16 bits as they are, and all others become float32.
        """
        self.shape = shape
        self.bias: Floats | None = None if bias is None else bias.astype(np.float32)
        num_rows, num_columns = shape
        num_panels = padded_rows(num_rows) // LANES
        memory: NDArray[Any] | None = None
        row = 0
        for block in blocks:
            kept = dtype or (block.dtype if block.dtype.itemsize == 2 else np.dtype(np.float32))
            if memory is None:
                memory = zeros((num_panels, num_columns, LANES), kept, huge=True)
            elif kept != memory.dtype and memory.dtype != np.float32:  # parts of different dtypes
                narrow, memory = memory, zeros(memory.shape, np.float32, huge=True)
                memory[...] = narrow
            _put(memory, row, block)
            row += len(block)
        assert memory is not None, "a matrix has rows"
        self.memory = memory

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.memory.dtype

    @property
    def num_groups(self) -> int:
        """The number of groups of four panels."""
        return len(self.memory) // GROUP


def _put(panels: NDArray[Any], row: int, block: NDArray[Any]) -> None:
    """Write rows [n, K] of the matrix, from number ``row`` on."""
    end = row + len(block)
    first, last = ceil_div(row, LANES), end // LANES
    if first < last:
        whole = block[first * LANES - row : last * LANES - row]
        panels[first:last] = whole.reshape(last - first, LANES, -1).swapaxes(1, 2)
    edges = [*range(row, min(first * LANES, end)), *range(max(last * LANES, row), end)]
    for each in dict.fromkeys(edges):
        panels[each // LANES, :, each % LANES] = block[each - row]
