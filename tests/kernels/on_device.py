"""Run the emulator's tests on a GPU.

With MIE_GPU_TESTS=1 every test of test_emulator.py that takes a launcher also runs through CuPy.
These are the golden vectors of the PTX wrappers: ldmatrix, movmatrix, mma, cp.async, conversions.
test_kernels.py and test_sampling.py then compare the engine's kernels with the NumPy operators, and
test_graphs.py runs whole engines with and without graphs. test_cublas.py multiplies.
"""

import functools
import os
from typing import Any

import numpy as np

from mie.ops_gpu.launcher import CupyLauncher

IS_WANTED = bool(os.environ.get("MIE_GPU_TESTS"))


class DeviceLauncher:
    """A launcher that copies NumPy arrays to the device, and copies the results back."""

    is_listing = False

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
        """Set all bits of the array, which is a NaN in every float dtype."""
        array.view(np.uint8).fill(0xFF)


@functools.cache
def device_launcher() -> DeviceLauncher:
    """Return the process's only launcher, so that it opens every kernel once."""
    return DeviceLauncher()


def _is_memory(arg: Any) -> bool:
    """Return whether the argument is an array, not a number or a struct passed by value."""
    return isinstance(arg, np.ndarray) and arg.dtype.fields is None


def _plain(array: np.ndarray) -> np.ndarray:
    """Return the same memory in a dtype that every CuPy has."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array
