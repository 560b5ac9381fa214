"""The way of a step's numbers to the device: through pinned memory, without waiting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.backend import Array
from mie.ops_gpu.arrays import next_power_of_two
from mie.ops_gpu.queue import Queue

NUM_BUFFERS = 2
"""The device may still read one step's numbers while the host writes the next one's."""


class Staging:
    """Buffers of pinned memory, used in turn. One is written anew when its last copy was done: two
    uploads later, which is after the step before was waited for."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._buffers = [np.zeros(0, np.uint8) for _ in range(NUM_BUFFERS)]
        self._marks = [queue.new_mark() for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def upload(self, parts: Sequence[NDArray[Any]], device: Array) -> None:
        """Queue a copy of the parts [...], one after another, to ``device`` [n] in its dtype."""
        turn = self._turn
        self._turn = (turn + 1) % NUM_BUFFERS
        self._marks[turn].wait()
        if self._buffers[turn].size < device.nbytes:
            self._grow(next_power_of_two(device.nbytes))
        host = self._buffers[turn][: device.nbytes].view(device.dtype)
        np.concatenate(parts, out=host, casting="unsafe")
        self._queue.upload(host, device)
        self._marks[turn].record()

    def _grow(self, num_bytes: int) -> None:
        """All buffers at once, so that the next steps need no more."""
        for turn, mark in enumerate(self._marks):
            mark.wait()
            self._buffers[turn] = self._queue.host_memory(num_bytes)
