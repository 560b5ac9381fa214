"""Run kernels on the CPU over NumPy arrays, optionally checking every access."""

import ctypes
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mie.base.commands import CommandError, run_command
from mie.errors import ConfigError
from mie.ops_gpu.host.build import Builder
from mie.ops_gpu.signature import KernelFault, Parameter, check_arguments, check_launch, declared
from mie.ops_gpu.source import KERNELS

Order = Literal["forward", "reverse", "random"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")
MAX_SHARED_BYTES = 227 * 1024

_RUNNING = threading.Lock()  # The runtime has a single set of fibers.


class _Launch(ctypes.Structure):
    """``struct Launch`` of mie_emu_runtime.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("is_checked", ctypes.c_uint32),
        ("limit_ms", ctypes.c_uint32),
        ("is_counted", ctypes.c_uint32),
    )


_TRAFFIC = ("ldmatrix", "cp_async", "shared", "cp_async_source", "global_memory")
COUNTS = (
    *("blocks", "idle_blocks", "in_flight", "unhinted_copies", "mma", "barriers"),
    *("loads_in_flight", "copies_at_barriers", "load_rounds", "longest_loads"),
    *(f"{kind}.{name}" for kind in _TRAFFIC for name in ("requests", "passes", "least")),
)
"""The counts of a kernel's launches, besides "launches", as count.cpp defines them.

Idle blocks wrote no global memory. "in_flight" are the copies by cp.async that are in flight while
a thread waits for earlier ones, over all waits: a pipeline without overlap has none.
"copies_at_barriers" are those in flight while a block waits at a barrier, over all barriers.
Unhinted copies lack the hint to pass L1 or to fetch 128 bytes to L2. "mma" are products of warps,
and "barriers" are barriers of blocks. "loads_in_flight" are the bytes that lane 0 of each warp has
loaded from global memory and not used yet, over all products of the warp, if its products use them
evenly and in order. "load_rounds" is how often lane 0 of a warp has loaded and then comes to a
product or an exponential. "longest_loads" are the bytes that lane 0 of a warp has loaded since the
barrier before, of the warp that loaded most, over all barriers: a warp that loads for all others
makes it long. Copies by cp.async count in none of these. "cp_async" is its writes to
shared memory, and "shared" are the other accesses there. A vector that g++ loads in parts counts as
parts. Requests are counted for warps. A pass is a wavefront of shared memory, or a sector of 32
bytes of global memory. "least" is the number of passes for the same bytes side by side, so the
others are bank conflicts or waste.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Garbage:
    """Uninitialised memory, with a flag for each byte that a kernel has written."""

    owner: "weakref.ref[NDArray[Any]]"
    low: int
    written: NDArray[np.uint8]

    def flags_of(self, array: NDArray[Any]) -> int | None:
        """Return the address of the flags of ``array``, or None if it is elsewhere."""
        offset = array.ctypes.data - self.low
        is_inside = offset >= 0 and offset + array.nbytes <= self.written.size
        if not is_inside or self.owner() is None:
            return None
        return self.written.ctypes.data + offset


class EmulatedLauncher:
    """A `Launcher` over NumPy arrays. g++ builds each kernel, and fibers emulate its threads.

    ``check`` reports accesses out of bounds, uninitialised, misaligned or racing as `KernelFault`.
    ``order`` is the order of threads and blocks. A correct kernel gives the same result in every
    order. ``count`` fills ``counters`` by the kernels' names (`COUNTS`), in several times the time.
    """

    is_listing = False
    level = "-O1"
    """The optimisation by g++. With -O2 it builds for a third longer, and steps take as long."""

    def __init__(
        self,
        check: bool = False,
        order: Order = "forward",
        seed: int = 0,
        limit_s: float = 120.0,
        submit: Callable[[Callable[[], None]], None] = lambda task: task(),
        count: bool = False,
    ) -> None:
        """Set ``submit``. It runs a launch now or later (`EmulatedQueue.submit`).

        A launch that uses more than ``limit_s`` seconds of CPU time is a `KernelFault`. Time in
        which other processes have the CPU does not count.
        """
        if order not in ORDERS:
            raise ConfigError(f"order {order!r} is not one of {', '.join(ORDERS)}")
        if count and not check:
            raise ConfigError("the emulator counts in the checked build only (set check=True)")
        self.counters: dict[str, Counter[str]] = {}
        self.products: dict[str, list[int]] = {}
        """The products of warps of each block of a kernel's last launch, in the grid's order."""
        self.xp: ModuleType = np
        self.check = check
        self._submit = submit
        self._builder = Builder()
        self._runtime = _load_runtime(self._builder.runtime())
        self._kernels: dict[tuple[str, str, tuple[str, ...]], EmulatedKernel] = {}
        self._garbage: list[_Garbage] = []
        self._how = {
            "order": ORDERS.index(order),
            "seed": seed,
            "is_checked": int(check),
            "limit_ms": round(limit_s * 1000),
            "is_counted": int(count),
        }

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> "EmulatedKernel":
        """Return the kernel ``name``, a C++ expression, in ``file`` of mie/ops_gpu/kernels."""
        key = (file, name, options)
        if key not in self._kernels:
            self._kernels[key] = EmulatedKernel(self, KERNELS / file, name, options)
        return self._kernels[key]

    def built_together(self, path: Path, name: str) -> Sequence[str]:
        """Return the kernels of a file that one library gets, ``name`` among them."""
        return [name]

    def mark_uninitialised(self, array: NDArray[Any]) -> None:
        """Fill ``array`` with NaN and, if checking, report reads of bytes that were never written.

        Use it for scratch memory that only kernels write, because the host's writes are not seen.
        """
        array.reshape(-1).view(np.uint8).fill(0xFF)
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._garbage = [each for each in self._garbage if each.owner() is not None]
        self._garbage.append(
            _Garbage(
                owner=weakref.ref(owner),
                low=array.ctypes.data,
                written=np.zeros(array.nbytes, np.uint8),
            )
        )

    def _run(self, kernel: "EmulatedKernel", how: _Launch, args: tuple[Any, ...]) -> None:
        for key, value in self._how.items():
            setattr(how, key, value)
        values = list(map(_value, kernel.parameters, args))
        addresses = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        with _RUNNING:
            self._runtime.mie_emu_forget_arrays()
            if self.check:
                self._register(kernel.parameters, args)
            if kernel.launch(ctypes.byref(how), addresses):
                raise KernelFault(f"{kernel.name}: {self._fault()}")
            if how.is_counted:
                self._add_counts(kernel.name, math.prod(how.grid))

    def _register(self, parameters: tuple[Parameter, ...], args: tuple[Any, ...]) -> None:
        for parameter, arg in zip(parameters, args, strict=True):
            if not parameter.is_pointer or arg is None:
                continue
            flags = [each.flags_of(arg) for each in reversed(self._garbage)]
            self._runtime.mie_emu_add_array(
                arg.ctypes.data,
                arg.nbytes,
                parameter.is_mutable,
                next((address for address in flags if address is not None), None),
                parameter.name.encode(),
            )

    def _add_counts(self, kernel: str, num_blocks: int) -> None:
        numbers = (ctypes.c_uint64 * len(COUNTS))()
        self._runtime.mie_emu_counts(numbers)
        now = dict(zip(COUNTS, numbers, strict=True))
        self.counters.setdefault(kernel, Counter()).update(now, launches=1)
        products = (ctypes.c_uint64 * num_blocks)()
        self._runtime.mie_emu_products(products)
        self.products[kernel] = list(products)

    def _fault(self) -> str:
        """Return the runtime's message, with block, thread and source line."""
        runtime = self._runtime
        place = (ctypes.c_uint32 * 6)()
        is_thread_known = runtime.mie_emu_fault_place(place)
        where = [f"block ({place[0]},{place[1]},{place[2]})"]
        if is_thread_known:
            where.append(f"thread ({place[3]},{place[4]},{place[5]})")
        image = runtime.mie_emu_fault_image().decode()
        if image:
            where += source_lines(image, runtime.mie_emu_fault_offset())
        return f"{runtime.mie_emu_message().decode()} [{', '.join(where)}]"


class EmulatedKernel:
    """One kernel, built for the CPU. Calling it runs all its blocks."""

    def __init__(
        self, launcher: EmulatedLauncher, path: Path, name: str, options: tuple[str, ...]
    ) -> None:
        self.name = f"{path.name} {name}"
        self._launcher = launcher
        together = launcher.built_together(path, name)
        built = launcher._builder.kernels(
            path.resolve(), together, options, level=launcher.level, is_checked=launcher.check
        )
        library = ctypes.CDLL(str(built))
        index = together.index(name)
        self.launch = library[f"mie_launch_{index}"]
        text = ctypes.create_string_buffer(4096)
        library[f"mie_signature_{index}"](text, ctypes.c_size_t(len(text)))
        letters = [part for part in text.value.decode().split(",") if part]
        known = declared(name) or [
            Parameter(name=f"#{i}", letters="") for i in range(1, len(letters) + 1)
        ]
        self.parameters = tuple(
            Parameter(name=each.name, letters=one) for each, one in zip(known, letters, strict=True)
        )
        # On a GPU the table is the only signature, so the compiler must agree with it.
        unsized = [each.unsized for each in self.parameters]
        assert declared(name) is None or [each.unsized for each in known] == unsized

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int = 0,
    ) -> None:
        check_launch(self.name, grid, block)
        check_arguments(self.name, self.parameters, args, np.ndarray)
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(
                f"{self.name}: {shared_bytes} bytes of shared memory; at most {MAX_SHARED_BYTES}"
            )
        if math.prod(grid) == 0:
            return
        how = _Launch(grid=(*grid, 1, 1)[:3], block=(*block, 1, 1)[:3], shared_bytes=shared_bytes)
        launcher = self._launcher
        launcher._submit(lambda: launcher._run(self, how, args))


def _value(parameter: Parameter, arg: Any) -> NDArray[Any]:
    """Return an array that holds the kernel's argument by value (pointer, number or struct)."""
    if parameter.is_pointer:
        return np.array(0 if arg is None else arg.ctypes.data, np.uint64)
    return np.array(arg)


def _load_runtime(path: Path) -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(path))
    runtime.mie_emu_message.restype = ctypes.c_char_p
    runtime.mie_emu_fault_image.restype = ctypes.c_char_p
    runtime.mie_emu_fault_offset.restype = ctypes.c_uint64
    runtime.mie_emu_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_char_p,
    )
    return runtime


def source_lines(image: str, offset: int) -> list[str]:
    """Return "file:line" of an instruction and of its inlined callers, or nothing if unknown."""
    try:
        printed = run_command(["addr2line", "-i", "-e", image, hex(offset)])
    except CommandError:
        return []
    places = [line.split(" ")[0].rpartition("/")[2] for line in printed.splitlines()]
    return [place for place in places if ".cu" in place and not place.endswith("?")]
