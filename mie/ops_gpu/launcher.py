"""Launch kernels, on a GPU through CuPy or on the CPU through the emulator.

    launcher.kernel("rms_norm.cu", "rms_norm<float>")(grid, block, args, shared_bytes)

CuPy does not check the number of arguments, their dtypes or contiguity. Both launchers do.
Numbers must be NumPy scalars of the kernel's type (CuPy would pass a Python int as 64 bits). An
empty grid launches nothing (CuPy would launch one block).
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mie.errors import ConfigError, MissingExtraError, install_command
from mie.ops.backend import Progress
from mie.ops_gpu.cubins import Cubin, Cubins, KernelName
from mie.ops_gpu.environment import remedy_for
from mie.ops_gpu.host.emulator import EmulatedLauncher
from mie.ops_gpu.nvrtc import nvrtc_of_cupy
from mie.ops_gpu.signature import KernelFault, check_arguments, check_launch, declared

__all__ = ["CupyLauncher", "EmulatedLauncher", "Kernel", "KernelFault", "Launcher"]

NULL = np.uint64(0)
"""A null pointer. CuPy has none. A 64-bit zero is passed as the same eight bytes."""


class Kernel(Protocol):
    """A compiled kernel."""

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Launch it with ``shared_bytes`` of dynamic shared memory for each block.

        Raises TypeError for arguments that do not fit its parameters, and ValueError for a launch
        that no GPU could make.
        """


class Launcher(Protocol):
    """Compiles each kernel once and launches it over arrays of ``xp``."""

    @property
    def xp(self) -> ModuleType:
        """The module of the arrays: numpy or cupy."""

    @property
    def is_listing(self) -> bool:
        """Whether kernels are only listed now, and no work may begin."""

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> Kernel:
        """Return the kernel ``name``, a C++ expression such as ``rms_norm<float>``, in ``file``.

        The file is in mie/ops_gpu/kernels. ``options`` are of the form ``-DNAME=VALUE``.
        """


def import_cupy() -> Any:
    """Import CuPy, or raise an error that says how to install it."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise _broken_cupy(error) from error
        raise MissingExtraError(
            "backend 'cupy' needs CuPy, which is not installed "
            f"({install_command('cuda12')} for a driver with CUDA 12, "
            f"{install_command('cuda13')} for CUDA 13)"
        ) from error
    except ImportError as error:
        raise _broken_cupy(error) from error
    return cupy


def _broken_cupy(error: ImportError) -> ConfigError:
    """Return an error for a broken CuPy. CuPy's own message is a page that ends with the reason."""
    reason = str(error.__cause__ or error).strip().splitlines()
    return ConfigError(
        "backend 'cupy' needs CuPy, which is installed but cannot be imported: "
        f"{reason[-1] if reason else 'no reason given'} (a missing libnvrtc or libcublas: install "
        "CUDA's libraries of the version that this CuPy was built for; otherwise reinstall one "
        "CuPy: pip uninstall cupy-cuda12x cupy-cuda13x, then "
        f"{install_command('cuda12')} or {install_command('cuda13')})"
    )


class CupyLauncher:
    """A `Launcher` over CuPy arrays. NVRTC compiles each kernel, and `Cubins` keeps it.

    Kernels run in the thread's current stream.
    """

    def __init__(self) -> None:
        cupy = import_cupy()
        if not cupy.cuda.is_available():
            raise ConfigError(
                "backend 'cupy' needs an NVIDIA GPU, and CuPy finds none (does nvidia-smi list "
                "one? backend 'cupy-emulated' runs the same kernels on a CPU)"
            )
        capability = str(cupy.cuda.Device().compute_capability)
        remedy = remedy_for((int(capability[:-1]), int(capability[-1])))
        if remedy is not None:
            raise ConfigError(
                f"backend 'cupy' does not run on this GPU, which is sm_{capability}: {remedy}"
            )
        self.xp: ModuleType = cupy
        self.cubins = Cubins(nvrtc_of_cupy(cupy), int(capability))
        self._kernels: dict[KernelName, CupyKernel] = {}
        self._listed: list[KernelName] | None = None

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> Kernel:
        """Return the kernel ``name`` in ``file``; see `Launcher`."""
        key = KernelName(file, name, options)
        if self._listed is not None:
            self._listed.append(key)
            return _launch_nothing
        if key not in self._kernels:
            self._kernels[key] = CupyKernel(self.xp, key, self.cubins.get(key))
        return self._kernels[key]

    @property
    def is_listing(self) -> bool:
        """Whether kernels are only listed now."""
        return self._listed is not None

    @contextmanager
    def listing(self) -> Iterator[list[KernelName]]:
        """List the kernels that are asked for meanwhile. They neither compile nor run."""
        self._listed = []
        try:
            yield self._listed
        finally:
            self._listed = None

    def build(self, kernels: Iterable[KernelName], progress: Progress) -> None:
        """Compile kernels on all CPUs, and load them."""
        kernels = list(dict.fromkeys(kernels))
        self.cubins.build(kernels, progress)
        for kernel in kernels:
            self.kernel(*kernel)


def _launch_nothing(
    grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_bytes: int = 0
) -> None:
    """Stand in for a kernel that is only listed."""


class CupyKernel:
    """One kernel, loaded on the current device."""

    def __init__(self, cupy: ModuleType, kernel: KernelName, cubin: Cubin) -> None:
        self.name = f"{kernel.file} {kernel.name}"
        self._function = cupy.RawModule(path=str(cubin.path)).get_function(cubin.function)
        self._most_shared_bytes: int = self._function.max_dynamic_shared_size_bytes
        self._has_carveout = False
        self._parameters = declared(kernel.name)
        self._array_type = cupy.ndarray

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int = 0,
    ) -> None:
        check_launch(self.name, grid, block)
        if self._parameters is not None:
            check_arguments(self.name, self._parameters, args, self._array_type)
        if math.prod(grid) == 0:
            return
        if shared_bytes and not self._has_carveout:
            # The driver's own choice may leave room for fewer blocks than launches count on
            # (`Chip.resident_blocks`). The rest of this memory is the L1 cache.
            self._function.preferred_shared_memory_carveout = 100
            self._has_carveout = True
        if shared_bytes > self._most_shared_bytes:
            self._function.max_dynamic_shared_size_bytes = shared_bytes
            self._most_shared_bytes = shared_bytes
        values = tuple([NULL if arg is None else arg for arg in args])
        self._function(grid, block, values, shared_mem=shared_bytes)
