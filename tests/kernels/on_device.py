"""The emulator's tests on a GPU: what they ask of the emulator, they can ask of the hardware.

With MIE_GPU_TESTS=1 every test of test_emulator.py that takes a launcher runs through CuPy too.
These are the golden vectors of the PTX wrappers: ldmatrix, movmatrix, mma, cp.async, conversions.
So do those of test_kernels.py and test_sampling.py, the kernels of the engine against the NumPy
operators, and of test_graphs.py, whole engines with and without graphs. test_cublas.py multiplies.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from mie.ops_gpu.launcher import CupyLauncher

IS_WANTED = bool(os.environ.get("MIE_GPU_TESTS"))


class DeviceLauncher:
    """A launcher that takes NumPy arrays to the device, and what the kernel wrote back."""

    def __init__(self) -> None:
        self._launcher = CupyLauncher()
        self.xp = np

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> Any:
        kernel, cupy = self._launcher.kernel(file, name, options), self._launcher.xp

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
            on_device = [cupy.asarray(_plain(arg)) if _is_memory(arg) else arg for arg in args]
            kernel(grid, block, tuple(on_device), shared_bytes)
            for arg, device in zip(args, on_device, strict=True):
                if _is_memory(arg):
                    _plain(arg)[...] = cupy.asnumpy(device)

        return launch

    def mark_uninitialised(self, array: np.ndarray) -> None:
        """Fill it with ones in every bit, which is a NaN of every float dtype."""
        array.view(np.uint8).fill(0xFF)


@functools.cache
def device_launcher() -> DeviceLauncher:
    """Return one for a process, so that it opens every kernel once."""
    return DeviceLauncher()


def _is_memory(arg: Any) -> bool:
    """Not a number, nor a struct that is passed by value."""
    return isinstance(arg, np.ndarray) and arg.dtype.fields is None


def _plain(array: np.ndarray) -> np.ndarray:
    """Return the same memory in a dtype that every CuPy has."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array
