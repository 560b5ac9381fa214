"""Describe the properties of the device that launches depend on."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mie.base.resources import available_bytes
from mie.ops.backend import Memory


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A device's number of multiprocessors, and the shared memory of each."""

    num_multiprocessors: int
    shared_bytes: int

    def resident_blocks(self, block_shared_bytes: int, most_per_multiprocessor: int) -> int:
        """Return how many blocks the chip holds at once, given the shared memory of each."""
        fit = self.blocks_within(block_shared_bytes)
        return self.num_multiprocessors * max(1, min(fit, most_per_multiprocessor))

    def blocks_within(self, block_shared_bytes: int) -> int:
        """Return how many blocks fit the shared memory of a multiprocessor."""
        return self.shared_bytes // (block_shared_bytes + 1024)  # CUDA reserves 1 KB of each block


EMULATED_CHIP = Chip(num_multiprocessors=3, shared_bytes=228 << 10)
"""A small chip, so that even small steps have more sequences than blocks."""


def current_chip(cupy: Any) -> Chip:
    """Return the chip of CuPy's current device."""
    attributes = cupy.cuda.Device().attributes
    return Chip(
        num_multiprocessors=attributes["MultiProcessorCount"],
        shared_bytes=attributes["MaxSharedMemoryPerMultiprocessor"],
    )


def device_memory(xp: Any, share: float) -> Memory:
    """Return the memory that the arrays of ``xp`` may take.

    A GPU with its own memory may be filled up to ``share``, counting other processes. A GPU that
    shares the host's memory (a Jetson) counts the page cache as used, although the system frees it
    on demand. There the host's figure of what is free is used.
    """
    if xp is np:  # the emulator
        return Memory(available_bytes=available_bytes(), is_shared=True)
    free, total = xp.cuda.runtime.memGetInfo()
    is_shared = bool(xp.cuda.Device().attributes["Integrated"])
    free = available_bytes() if is_shared else free
    free += xp.get_default_memory_pool().free_bytes()
    return Memory(available_bytes=max(0, int(free - (1 - share) * total)), is_shared=is_shared)
