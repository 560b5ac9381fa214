"""Compute products with low-rank changes in NumPy, one adapter's rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mie.ops.adapters.low_rank import AdapterOperators, LowRank, SlotShape, low_rank
from mie.ops.arrays import Floats, Ints
from mie.ops.linear import in_groups

if TYPE_CHECKING:
    from mie.ops.numpy_backend import Matrix, NumpyLinear


class NumpyAdapters(AdapterOperators):
    """The operators of adapters, in the dtype of the backend."""

    def __init__(self, dtype: np.dtype[Any], group_size: int | None) -> None:
        """With ``group_size``, every product has so many rows, as in ``batch_invariant``."""
        self.dtype, self.group_size = dtype, group_size
        self.slots: Ints = np.zeros(0, np.int64)
        """The slot of each token of the running step."""

    def slot_bytes(self, shape: SlotShape) -> int:
        num_numbers = sum(shape.num_inputs + count for count in shape.counts)
        return shape.num_slots * shape.max_rank * num_numbers * self.dtype.itemsize

    def step_bytes(self, shapes: Sequence[SlotShape], num_tokens: int) -> int:
        widest = max(shape.num_inputs + 2 * sum(shape.counts) + shape.max_rank for shape in shapes)
        return num_tokens * widest * self.dtype.itemsize

    def with_slots(self, weight: NumpyLinear, shape: SlotShape) -> NumpyLinear:
        return weight._replace(weight=AdaptedMatrix(self, weight.weight, shape))

    def put(self, weight: NumpyLinear, slot: int, changes: Sequence[LowRank | None]) -> None:
        weight.weight.put(slot, changes)


class AdaptedMatrix:
    """A matrix [K, N] of floats or a packed one, and its changes by slot."""

    def __init__(self, adapters: NumpyAdapters, base: Matrix, shape: SlotShape) -> None:
        self._adapters, self._base = adapters, base
        ends = np.cumsum(shape.counts).tolist()
        self._columns = [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]
        self._changes: dict[int, Sequence[LowRank | None]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of outputs and inputs, as of a packed matrix."""
        shape: tuple[int, ...] = self._base.shape
        return shape[::-1] if isinstance(self._base, np.ndarray) else shape

    def put(self, slot: int, changes: Sequence[LowRank | None]) -> None:
        """Replace the contents of a slot."""
        dtype = self._adapters.dtype
        self._changes[slot] = [
            each and LowRank(a=each.a.astype(dtype), b=each.b.astype(dtype), scale=each.scale)
            for each in changes
        ]

    def product(self, x: Floats) -> Floats:
        """Return the product with x [T, K], or [G, rows, K], where the last rows are padding."""
        base = self._base
        plain = isinstance(base, np.ndarray)
        y: Floats = x @ base.astype(x.dtype, copy=False) if plain else base.product(x)
        rows, results = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        slots = self._adapters.slots
        for slot in np.unique(slots[slots > 0]).tolist():
            own = np.flatnonzero(slots == slot)
            for columns, change in zip(self._columns, self._changes[slot], strict=True):
                if change is not None:
                    results[own, columns] += self._change(rows[own], change)
        return results.reshape(y.shape)

    def _change(self, x: Floats, change: LowRank) -> Floats:
        if self._adapters.group_size is None:
            return low_rank(x, change)
        grouped = low_rank(in_groups(x, self._adapters.group_size), change)
        return grouped.reshape(-1, grouped.shape[-1])[: len(x)]
