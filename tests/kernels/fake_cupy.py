"""Stand in for CuPy over NumPy arrays, as lazily as a GPU, and strictly.

Work that is queued in a stream runs only when the host waits for it. So code that overwrites memory
before a copy has read it, or reads memory before a copy has arrived, gets wrong numbers here too.
Kernels are the emulator's. Matrix products are NumPy's, behind the C interface of cuBLAS.

Inside ``steady()`` and while capturing, `Violation` is raised for actions that a step must not
take. They are allocating, compiling, copying to or from memory that is not pinned, waiting for the
device, and launching into the default stream. A graph keeps no memory alive, and refuses to run
without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import launcher
from fake_cublas import FakeCublas

from mie.ops_gpu.host.emulator import EmulatedKernel
from mie.ops_gpu.host.nccl import SIZES, Address, EmulatedNccl
from mie.ops_gpu.nvrtc import Compiled

Task = Callable[[], None]


class Violation(AssertionError):
    """A step took an action that is not allowed."""


class Array(np.ndarray):
    """Stand-in for cupy.ndarray."""

    cupy: FakeCupy

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, host: np.ndarray, stream: Stream | None = None) -> None:
        assert (host.dtype, host.shape) == (self.dtype, self.shape)
        self.cupy.copy(host, stream, lambda: np.copyto(self, host))
        self.cupy.last_upload = self.ctypes.data

    def get(
        self, stream: Stream | None = None, out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        host = np.empty(self.shape, self.dtype) if out is None else out
        self.cupy.copy(host, stream, lambda: np.copyto(host, self))
        if blocking:
            (stream or self.cupy.current).synchronize()
        return host


def owner(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Stream:
    """Stand-in for cupy.cuda.Stream: tasks in order, run when the host waits."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.ptr = len(cupy.streams) + 100
        self.cupy = cupy
        self.tasks: list[Task] = []
        self.captured: list[Launch] | None = None
        cupy.streams[self.ptr] = self

    def __enter__(self) -> None:
        self.cupy.stack.append(self)

    def __exit__(self, *error: object) -> None:
        assert self.cupy.stack.pop() is self

    def launch(self, launch: Launch) -> None:
        if self.cupy.is_steady and self is self.cupy.default:
            raise Violation(f"{launch.name} goes into the default stream")
        if self is self.cupy.default:
            self.cupy.finish_streams()
            launch.bound()()
        elif self.captured is None:
            self.tasks.append(launch.bound())
        else:
            self.captured.append(launch)

    def done(self, num_tasks: int) -> None:
        """Run the first tasks."""
        if self.captured is not None:
            raise Violation("a wait while capturing")
        for _ in range(num_tasks):
            self.tasks.pop(0)()
            self.cupy.num_done[self.ptr] = self.cupy.num_done.get(self.ptr, 0) + 1

    def synchronize(self) -> None:
        self.cupy.check("a wait for the device")
        self.done(len(self.tasks))

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Graph:
        assert self.captured is not None
        launches, self.captured = self.captured, None
        return Graph(self.cupy, launches)


class Launch:
    """A kernel or product with its arguments as CUDA keeps them: addresses and numbers."""

    def __init__(self, name: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.name = name
        self.run = run
        self.args = [_Memory(arg) if isinstance(arg, Array) else arg for arg in args]

    @property
    def addresses(self) -> list[int]:
        return [arg.address for arg in self.args if isinstance(arg, _Memory)]

    def bound(self) -> Task:
        """Return the task, which keeps its memory alive until it has run."""
        values = [arg.array() if isinstance(arg, _Memory) else arg for arg in self.args]
        return lambda: self.run(*values)


class _Memory:
    """A pointer, which keeps nothing alive."""

    def __init__(self, array: Array) -> None:
        self.owner = weakref.ref(owner(array))
        self.address, self.shape, self.dtype = array.ctypes.data, array.shape, array.dtype

    def array(self) -> np.ndarray:
        memory = self.owner()
        if memory is None:
            raise Violation(f"a graph uses memory at {self.address:#x} that was given back")
        offset = self.address - memory.ctypes.data
        size = math.prod(self.shape) * self.dtype.itemsize
        raw = memory.reshape(-1).view(np.uint8)[offset : offset + size]
        return raw.view(self.dtype).reshape(self.shape)


class Graph:
    """Stand-in for cupy.cuda.Graph."""

    def __init__(self, cupy: FakeCupy, launches: list[Launch]) -> None:
        self.cupy, self.launches = cupy, launches
        self.num_launches = 0
        cupy.graphs.append(self)

    def launch(self, stream: Stream) -> None:
        reads = {address for launch in self.launches for address in launch.addresses}
        if self.cupy.last_upload not in reads:
            raise Violation("a graph reads other memory than the step's integers were copied to")
        stream.tasks += [launch.bound() for launch in self.launches]
        self.num_launches += 1


class Event:
    """Stand-in for cupy.cuda.Event."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.place = self.cupy.num_done.get(stream.ptr, 0) + len(stream.tasks)

    def synchronize(self) -> None:
        if self.stream is None:
            return
        missing = self.place - self.cupy.num_done.get(self.stream.ptr, 0)
        if missing > 0:
            self.cupy.check("a wait for the device")
            self.stream.done(missing)

    @property
    def done(self) -> bool:
        self.synchronize()
        return True


class Device:
    """Stand-in for cupy.cuda.Device."""

    compute_capability = "90"

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.attributes = {"MultiProcessorCount": 3, "MaxSharedMemoryPerMultiprocessor": 228 << 10}
        self.attributes["Integrated"] = 1

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def use(self) -> None: ...


class FakeNccl:
    """Stand-in for cupy.cuda.nccl: the emulator's, over addresses, in streams."""

    NCCL_INT8 = EmulatedNccl.NCCL_INT8

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy, self._emulated = cupy, EmulatedNccl(lambda task: task())
        self.get_version = self._emulated.get_version
        self.get_unique_id = self._emulated.get_unique_id

    def NcclCommunicator(self, ndev: int, commId: Any, rank: int) -> Communicator:
        made = self._emulated.NcclCommunicator(ndev, commId, rank)
        return Communicator(self.cupy, made, ndev)


class Communicator:
    """Stand-in for cupy.cuda.nccl.NcclCommunicator."""

    def __init__(self, cupy: FakeCupy, emulated: Any, num_ranks: int) -> None:
        self.cupy, self._emulated, self._num_ranks = cupy, emulated, num_ranks
        self.abort, self.check_async_error = emulated.abort, emulated.check_async_error

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        def run(send: np.ndarray, recv: np.ndarray) -> None:
            self._emulated.allGather(Address(send), Address(recv), count, datatype, 0)

        size, dtype = count * SIZES[datatype], np.dtype(np.uint8)
        buffers = (sendbuf, size), (recvbuf, size * self._num_ranks)
        args = tuple(self.cupy.array_at(address, (size,), dtype) for address, size in buffers)
        self.cupy.queue(stream, "allGather", run, args)


class FakeNvrtc:
    """Stand-in for `Nvrtc`, whose machine code is the names of the file and of the kernel."""

    path, version = "libnvrtc.so", "12.6"

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy
        self.compiled: list[str] = []

    def architectures(self) -> list[int]:
        return [80, 87, 90]

    def compile(self, source: str, names: Sequence[str], options: Sequence[str]) -> Compiled:
        self.cupy.check("a compilation")
        assert "-arch=sm_90" in options
        found = re.search(r'#line 1 "(\w+\.cu)"', source)
        assert found is not None
        self.compiled += names
        cubin = f"{found[1]}\n{names[0]}".encode()
        return Compiled(cubin=cubin, log="", mangled={names[0]: "mangled"})


class RawModule:
    """Stand-in for cupy.RawModule."""

    def __init__(self, cupy: FakeCupy, path: str) -> None:
        cupy.check("a compilation")
        file, name = Path(path).read_text().split("\n")
        self.cupy, self.kernel = cupy, launcher().kernel(file, name)

    def get_function(self, name: str) -> Function:
        assert name == "mangled"
        return Function(self.cupy, self.kernel)


class Function:
    """Stand-in for cupy.RawKernel."""

    def __init__(self, cupy: FakeCupy, kernel: EmulatedKernel) -> None:
        self.cupy, self.kernel = cupy, kernel
        self.max_dynamic_shared_size_bytes = 48 * 1024
        self.preferred_shared_memory_carveout = -1

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, shared_mem: int
    ) -> None:
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        kernel = self.kernel

        def run(*values: Any) -> None:
            pairs = zip(kernel.parameters, values, strict=True)
            is_null = [p.is_pointer and isinstance(value, np.uint64) for p, value in pairs]
            given = [None if null else value for null, value in zip(is_null, values, strict=True)]
            kernel(grid, block, tuple(given), shared_mem)

        self.cupy.current.launch(Launch(kernel.name, run, args))


class FakeCupy(ModuleType):
    """Stand-in for the module."""

    __version__ = "14.0.0"

    def __init__(self) -> None:
        super().__init__("cupy")
        self.ndarray: type[Array] = type("ndarray", (Array,), {"cupy": self})
        self.is_steady = self.is_reading = False
        self.streams: dict[int, Stream] = {}
        self.num_done: dict[int, int] = {}
        self.graphs: list[Graph] = []
        self.pinned: list[tuple[int, int]] = []
        self.last_upload = 0
        self.arrays: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self.default = Stream(self)
        self.stack = [self.default]
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            Stream=lambda: Stream(self),
            Event=lambda disable_timing: Event(self),
            Device=Device,
            nccl=FakeNccl(self),
            PinnedMemory=self._pinned_memory,
            PinnedMemoryPointer=lambda memory, offset: memory,
            runtime=SimpleNamespace(
                memcpy2DAsync=self.memcpy2DAsync,
                memcpyHostToDevice=1,
                memGetInfo=lambda: (1 << 33, 1 << 33),
                getDeviceCount=lambda: 2,
            ),
        )
        self.nvrtc = FakeNvrtc(self)
        self.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 0)

    @property
    def current(self) -> Stream:
        return self.stack[-1]

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Declare that the size is warm: from now on a step may only queue."""
        self.is_steady = True
        try:
            yield
        finally:
            self.is_steady = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Allow the host to wait here, for the sampled ids."""
        self.is_reading = True
        try:
            yield
        finally:
            self.is_reading = False

    def check(self, what: str) -> None:
        is_capturing = any(stream.captured is not None for stream in self.streams.values())
        is_wait = what.startswith("a wait")
        if is_capturing or (self.is_steady and not (is_wait and self.is_reading)):
            raise Violation(f"{what} {'while capturing' if is_capturing else 'in a steady step'}")

    def copy(self, host: np.ndarray, stream: Stream | None, task: Task) -> None:
        """Queue a copy from or to the host. If the memory is not pinned, copy at once."""
        stream = stream or self.current
        if stream.captured is not None:
            raise Violation("a copy while capturing")
        if stream is self.default:
            self.finish_streams()
        begin = host.ctypes.data
        is_pinned = any(low <= begin < high for low, high in self.pinned)
        if not is_pinned and host.size:
            self.check("a copy of memory that is not pinned")
            stream.done(len(stream.tasks))
            task()
        else:
            stream.tasks.append(task)

    def memcpy2DAsync(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> None:
        """Queue a copy of rows from pinned memory. Sizes are in bytes."""
        assert kind == self.cuda.runtime.memcpyHostToDevice
        assert width <= min(dst_pitch, src_pitch)
        size = (height - 1) * src_pitch + width
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(src))
        host = np.lib.stride_tricks.as_strided(raw, (height, width), (src_pitch, 1))
        size = (height - 1) * dst_pitch + width
        memory = self.array_at(dst, (size,), np.dtype(np.uint8))
        device = np.lib.stride_tricks.as_strided(memory, (height, width), (dst_pitch, 1))
        self.copy(host, self.streams[stream], lambda: np.copyto(device, host))

    def finish_streams(self) -> None:
        """Wait for all other streams, as work in the default stream does."""
        for stream in self.streams.values():
            stream.done(len(stream.tasks))

    def empty(self, shape: Any, dtype: Any) -> Array:
        self.check("an allocation")
        memory = np.empty(shape, dtype)
        memory.reshape(-1).view(np.uint8).fill(0xFF)
        array = memory.view(self.ndarray)
        self.arrays[memory.ctypes.data] = memory
        return array

    def zeros(self, shape: Any, dtype: Any = float) -> Array:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def asarray(self, host: np.ndarray) -> Array:
        if isinstance(host, Array):
            return host
        array = self.empty(host.shape, host.dtype)
        array.set(np.ascontiguousarray(host))
        return array

    def RawModule(self, *, path: str) -> RawModule:
        return RawModule(self, path)

    def _pinned_memory(self, num_bytes: int) -> bytearray:
        self.check("an allocation")
        memory = bytearray(num_bytes)
        begin = np.frombuffer(memory, np.uint8).ctypes.data
        self.pinned.append((begin, begin + num_bytes))
        return memory

    def queue(self, stream: int, name: str, run: Callable[..., None], args: Any) -> None:
        """Queue a library's launch."""
        self.streams[stream].launch(Launch(name, run, args))

    def array_at(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return the part of an array that begins at an address."""
        memory = next(
            each
            for low, each in list(self.arrays.items())
            if low <= address < low + max(1, each.nbytes)
        )
        raw = memory.reshape(-1).view(np.uint8)[address - memory.ctypes.data :]
        size = math.prod(shape) * dtype.itemsize
        return raw[:size].view(dtype).reshape(shape).view(self.ndarray)


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> FakeCupy:
    """The module in place of CuPy, with its NVRTC and cuBLAS."""
    cupy, nvrtc = FakeCupy(), "mie.ops_gpu.cubins"
    folder = tmp_path_factory.mktemp("cubins")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("mie.ops_gpu.launcher.nvrtc_of_cupy", lambda module: cupy.nvrtc)
    monkeypatch.setattr(f"{nvrtc}.compile_apart", lambda path, *work: cupy.nvrtc.compile(*work))
    monkeypatch.setattr(f"{nvrtc}.open_cache", lambda name: folder)
    library = FakeCublas(cupy)
    monkeypatch.setattr("mie.ops_gpu.cublas.load_library", lambda module: library)
    cupy.cublas_library = library
    return cupy
