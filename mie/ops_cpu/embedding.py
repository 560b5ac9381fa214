"""Hold the embedding table, which the output head may share."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Ints
from mie.ops_cpu.linear import columns_of
from mie.ops_cpu.products import WIDTH
from mie.ops_cpu.weights import aligned_empty, stored_dtype


class Embedding:
    """Rows [V, D], or tiles [ceil(V / 64), D, 64] of the head [D, V] in the same memory."""

    def __init__(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        dtype: np.dtype[Any],
        weight_dtype: str = "auto",
    ) -> None:
        self.shape = shape
        self.memory: NDArray[Any] = np.empty(0)
        self._tiles: NDArray[Any] | None = None
        num_rows, num_columns = shape
        row = 0
        for block in blocks:
            stored = stored_dtype(block, weight_dtype, dtype)
            if row == 0:
                padded = ceil_div(num_rows, WIDTH) * WIDTH, num_columns
                self.memory = aligned_empty(padded, stored)
                self.memory[num_rows:] = 0
            self.memory[row : row + len(block)] = block
            row += len(block)

    @property
    def rows(self) -> NDArray[Any]:
        """The rows [V, D]."""
        assert self._tiles is None, "the rows became tiles"
        return self.memory[: self.shape[0]]

    def as_tiles(self) -> NDArray[Any]:
        """Convert to the tiles of the head, in place. The rows of a tile become its columns."""
        if self._tiles is None:
            num_columns = self.shape[1]
            self._tiles = self.memory.reshape(-1, num_columns, WIDTH)
            rows = self.memory.reshape(-1, WIDTH, num_columns)
            for tile, own in zip(self._tiles, rows, strict=True):
                tile[...] = own.copy().T
        return self._tiles

    def take(self, token_ids: Ints) -> NDArray[Any]:
        """Return [T, D] in the dtype of the memory: `ops.linear.embed`."""
        if self._tiles is None:
            taken = self.memory.take(token_ids, 0)
        else:
            taken = columns_of(self._tiles, token_ids)
        return taken
