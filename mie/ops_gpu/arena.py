"""Reuse the memory of the operators' results from step to step."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mie.ops.backend import Array
from mie.ops_gpu.arrays import next_power_of_two

Empty = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
"""A function that returns an uninitialised array of a shape and dtype under a name."""

MAX_VIEWS = 1 << 10
"""Number of shaped views that are kept. The layers of a step share theirs."""


OF_SEQUENCES = ("attention", "convolved", "recurrence")
"""Results whose rows are written for sequences.

Rows of padding that no sequence has begin as zeros, because what memory holds may not be finite.
"""


def fresh(xp: Any) -> Empty:
    """Return a function that allocates new arrays and ignores the name."""

    def empty(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return xp.empty(shape, dtype)

    return empty


class Arena:
    """One buffer for each name, overwritten when the name is used again.

    A buffer grows until it has seen the largest step. After that nothing is allocated, and steps of
    one size find their results at the same addresses, as a captured step needs.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._buffers: dict[tuple[str, np.dtype[Any]], Array] = {}
        self._views: dict[tuple[str, np.dtype[Any], tuple[int, ...]], Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialised array."""
        view = self._views.get((name, dtype, shape))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[name, dtype, shape] = self._view(name, shape, dtype)
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        size, key = math.prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            rows = next_power_of_two(shape[0])  # few sizes until the largest
            allocate = self._xp.zeros if name in OF_SEQUENCES else self._xp.empty
            buffer = allocate(rows * math.prod(shape[1:]), dtype)
            self._buffers[key] = buffer
            self._views.clear()  # they keep the old buffer's memory
        return buffer[:size].reshape(shape)

    @property
    def num_bytes(self) -> dict[str, int]:
        """The bytes of the current buffers by name."""
        sizes: dict[str, int] = {}
        for (name, _), buffer in self._buffers.items():
            sizes[name] = sizes.get(name, 0) + int(buffer.nbytes)
        return sizes

    @property
    def buffers(self) -> tuple[Array, ...]:
        """The current buffers. A captured step keeps its own, so they survive being replaced."""
        return tuple(self._buffers.values())


class Counters:
    """Zeros for blocks to count themselves with. Every launch leaves them zero.

    Captured steps keep smaller ones than the last. Each buffer is at least twice as large as the
    buffer before.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._zeros: list[Array] = []

    def zeros(self, size: int) -> Array:
        """Return at least ``size`` zeros."""
        if not self._zeros or self._zeros[-1].size < size:
            self._zeros.append(self._xp.zeros(next_power_of_two(size), np.int32))
        return self._zeros[-1]
