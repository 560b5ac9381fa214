"""Lay out a matrix in groups of four panels, which the products read in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_jit.memory import zeros

WIDTH = 64
"""Outputs of a group, which are four panels of 16."""


class Panels:
    """A matrix [N, K] as groups [N / 64, K, 64] of one dtype, and its bias [N] in float32.

    N is padded with zeros to whole groups. An embedding table is kept like this too, so that the
    output head can share its memory.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        dtype: np.dtype[Any] | None,
        bias: NDArray[Any] | None = None,
    ) -> None:
        """Convert blocks of whole rows, one at a time. ``dtype`` None keeps the blocks' own."""
        self.shape = shape
        self.bias: Floats | None = None if bias is None else bias.astype(np.float32)
        num_rows, num_columns = shape
        memory: NDArray[Any] | None = None
        row = 0
        for block in blocks:
            if memory is None:
                dims = ceil_div(num_rows, WIDTH), num_columns, WIDTH
                memory = zeros(dims, dtype or block.dtype, huge=True)
            elif dtype is None and block.dtype != memory.dtype:
                memory = memory.astype(np.float32)  # parts of different dtypes
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
        """The number of groups."""
        return len(self.memory)


def _put(groups: NDArray[Any], row: int, block: NDArray[Any]) -> None:
    """Write rows [n, K] of the matrix, from number ``row`` on, as columns of groups."""
    done = 0
    while done < len(block):
        group, column = divmod(row + done, WIDTH)
        some = block[done : done + WIDTH - column]
        groups[group, :, column : column + len(some)] = some.T
        done += len(some)
