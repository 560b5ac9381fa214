"""Compute tables of rotations as far as steps need them.

A context of 131,072 tokens has 64 MB of rotations. Most requests use the first few thousand.
"""

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, zeros
from mie.ops.rope import FloatOrFloats, fill_rope_table

POSITIONS = 256
"""Positions that are computed together."""


class Rotations:
    """The tables of a model. All have the rotations of the first ``num_filled`` positions."""

    def __init__(self) -> None:
        self.num_filled = POSITIONS
        self._tables: list[tuple[Floats, NDArray[np.float64], FloatOrFloats]] = []

    def new_table(
        self, inv_freq: NDArray[np.float64], scaling: FloatOrFloats, num_positions: int
    ) -> Floats:
        """Return a table as of `mie.ops.rope.rope_table`, with zeros from ``num_filled`` on."""
        table = zeros((num_positions, 2, inv_freq.size), np.float32)
        fill_rope_table(table, inv_freq, scaling, 0, self.num_filled)
        self._tables.append((table, inv_freq, scaling))
        return table

    def fill(self, num_positions: int) -> None:
        """Compute the rotations of the first ``num_positions`` positions, and of some more."""
        if num_positions > self.num_filled:
            end = ceil_div(num_positions, POSITIONS) * POSITIONS
            for table, inv_freq, scaling in self._tables:
                fill_rope_table(table, inv_freq, scaling, self.num_filled, end)
            self.num_filled = end
