"""What the launches need to know of the device."""

from dataclasses import dataclass
from typing import Any


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
