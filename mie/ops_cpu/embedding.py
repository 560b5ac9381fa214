"""Hold the embedding table, which the output head may share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops_cpu.allocator import WeightAllocator
from mie.ops_cpu.linear.geometry import WIDTHS
from mie.ops_cpu.linear.layout import Layout
from mie.ops_cpu.linear.widen import stored, widen


class Embedding:
    """Rows [V, D], or tiles [ceil(V / W), D, W] of the head [D, V] in the same memory."""

    def __init__(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        dtype: np.dtype[Any],
        weight_dtype: str = "auto",
        weights: WeightAllocator | None = None,
    ) -> None:
        self.shape = shape
        self.memory: NDArray[Any] = np.empty(0)
        self._dtype = dtype
        self._tiles: NDArray[Any] | None = None
        self._layout: Layout | None = None
        num_rows, num_columns = shape
        row = 0
        for block in blocks:
            block = stored(block, weight_dtype, dtype)
            if row == 0:
                padded = max(ceil_div(num_rows, each) * each for each in WIDTHS), num_columns
                self.memory = (weights or WeightAllocator()).empty(padded, block.dtype)
                self.memory[num_rows:] = 0
            self.memory[row : row + len(block)] = block
            row += len(block)

    @property
    def rows(self) -> NDArray[Any]:
        """The rows [V, D]."""
        assert self._tiles is None, "the rows became tiles"
        return self.memory[: self.shape[0]]

    def as_tiles(self, layout: Layout) -> NDArray[Any]:
        """Convert to the tiles of the head, in place. The rows of a tile become its columns."""
        if self._tiles is None:
            num_columns, width = self.shape[1], layout.width
            rows = self.memory[: ceil_div(self.shape[0], width) * width]
            self._tiles = rows.reshape(-1, num_columns, width)
            for tile, own in zip(self._tiles, rows.reshape(-1, width, num_columns), strict=True):
                layout.put(own.copy(), tile, 0)
            self._layout = layout
        return self._tiles

    def take(self, token_ids: Ints) -> Floats:
        """Return [T, D]: `ops.linear.embed`."""
        if self._tiles is None or self._layout is None:
            taken = self.memory.take(token_ids, 0)
        else:
            taken = self._layout.take(self._tiles, token_ids)
        return (
            taken
            if taken.dtype == self._dtype
            else widen(taken, np.empty(taken.shape, self._dtype))
        )
