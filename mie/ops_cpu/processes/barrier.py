"""Let processes wait for each other without a system call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mie.ops_cpu.allocator import CACHE_LINE, shared_zeros
from mie.ops_cpu.threads.spin import SpinLock


class Barrier:
    """A dissemination barrier (Hensgen, Finkel and Manber, 1988).

    In round k, process i signals process i + 2^k and then waits for i - 2^k. So n processes need
    log2(n) rounds, and no process waits for n others.
    """

    def __init__(self, number: int) -> None:
        """Take shared memory for this many processes, before they are forked."""
        distances = [1 << k for k in range((number - 1).bit_length())]
        # A process may be one meeting ahead of the others, so meetings take turns with two sets.
        memory = shared_zeros((2, len(distances), number, CACHE_LINE), np.uint8)
        self._locks = [
            [[SpinLock(line.ctypes.data) for line in lines] for lines in rounds]
            for rounds in memory
        ]
        self._memory, self._distances, self._number = memory, distances, number
        self._turn = 0
        self.join(0)

    def join(self, rank: int) -> None:
        """Set which of the processes this one is."""
        self._steps = [
            [
                (locks[(rank + distance) % self._number], locks[rank])
                for distance, locks in zip(self._distances, rounds, strict=True)
            ]
            for rounds in self._locks
        ]

    def meet(self, num_tries: int, wait_longer: Callable[[SpinLock], object]) -> None:
        """Wait until all processes are here. Call wait_longer(lock) after ``num_tries`` tries."""
        for other, own in self._steps[self._turn]:
            other.release()
            if not own.acquire(num_tries):
                wait_longer(own)
        self._turn = 1 - self._turn
