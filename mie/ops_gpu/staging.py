"""Copy a step's numbers to the device through pinned memory, without waiting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.backend import Array
from mie.ops_gpu.arrays import next_power_of_two
from mie.ops_gpu.queue import Queue, no_wait

NUM_BUFFERS = 2
"""Number of buffers: the host writes one while the device reads the other."""


class Staging:
    """Buffers of pinned memory, used one after another.

    A buffer is rewritten when its last copy is done. That was two uploads ago, and the step before
    the last one has been waited for.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._buffers = [np.zeros(0, np.uint8) for _ in range(NUM_BUFFERS)]
        self._waits = [no_wait] * NUM_BUFFERS
        self._turn = 0

    def upload(self, parts: Sequence[NDArray[Any]], *devices: Array) -> None:
        """Queue copies of the concatenated parts [...] to ``devices``. They are filled in order.

        All ``devices`` have one dtype, and the parts are converted to it.
        """
        turn = self._turn
        self._turn = (turn + 1) % NUM_BUFFERS
        self._waits[turn]()
        num_bytes = sum(device.nbytes for device in devices)
        if self._buffers[turn].size < num_bytes:
            self._grow(next_power_of_two(num_bytes))
        host = self._buffers[turn][:num_bytes].view(devices[0].dtype)
        np.concatenate(parts, out=host, casting="unsafe")
        start = 0
        for device in devices:
            part = host[start : start + device.size]
            self._queue.upload(part.reshape(device.shape), device)
            start += device.size
        self._waits[turn] = self._queue.mark()

    def _grow(self, num_bytes: int) -> None:
        """Grow all buffers at once, so that the next steps need no more."""
        for turn, wait in enumerate(self._waits):
            wait()
            self._buffers[turn] = self._queue.host_memory(num_bytes)
