"""What the launches need to know of the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mie.host import available_bytes
from mie.ops.backend import Memory


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A device's multiprocessors, and the shared memory that the blocks on one of them have."""

    num_multiprocessors: int
    shared_bytes: int

    def resident_blocks(self, block_shared_bytes: int, most_per_multiprocessor: int) -> int:
        """Blocks that the chip holds at once, given what each takes of shared memory."""
        fit = self.shared_bytes // (block_shared_bytes + 1024)  # CUDA keeps 1 KB of each for itself
        return self.num_multiprocessors * max(1, min(fit, most_per_multiprocessor))


def current_chip(cupy: Any) -> Chip:
    """CuPy's current device."""
    attributes = cupy.cuda.Device().attributes
    return Chip(
        num_multiprocessors=attributes["MultiProcessorCount"],
        shared_bytes=attributes["MaxSharedMemoryPerMultiprocessor"],
    )


def device_memory(xp: Any, share: float) -> Memory:
    """What the arrays of ``xp`` may take.

    Of a GPU with memory of its own so much that ``share`` of it is in use in the end. One that
    shares the host's (a Jetson) counts the page cache as taken, although the system gives that back
    when it is wanted: there it is the host that knows.
    """
    is_emulated = xp is np
    if is_emulated or xp.cuda.Device().attributes["Integrated"]:
        return Memory(available_bytes=available_bytes(), is_shared=True)
    free, total = xp.cuda.runtime.memGetInfo()
    free += xp.get_default_memory_pool().free_bytes()
    return Memory(available_bytes=max(0, int(free - (1 - share) * total)), is_shared=False)
