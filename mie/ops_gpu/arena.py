"""Where the results of a step's operators lie: in the same memory, step after step."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mie.ops.backend import Array
from mie.ops_gpu.arrays import next_power_of_two

Empty = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
"""Room for something that has a name, as an array of that shape and dtype."""


def fresh(xp: Any) -> Empty:
    """New arrays, whatever the name."""

    def empty(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return xp.empty(shape, dtype)

    return empty


class Arena:
    """One buffer for each name, kept and overwritten when the name is used again.

    A buffer grows until it has seen the largest step. After that nothing is allocated, and the
    steps of one size find their results at the same addresses, as a captured one has to.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._buffers: dict[tuple[str, np.dtype[Any]], Array] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array whose contents are whatever they were."""
        size, key = math.prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            rows = next_power_of_two(shape[0])  # few sizes on the way to the largest
            buffer = self._xp.empty(rows * math.prod(shape[1:]), dtype)
            self._buffers[key] = buffer
        return buffer[:size].reshape(shape)

    @property
    def buffers(self) -> tuple[Array, ...]:
        """Those of now. A captured step keeps its own, so that they outlive their replacement."""
        return tuple(self._buffers.values())
