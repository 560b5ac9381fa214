"""Queue work for a device in order, and capture it in graphs to replay.

On a GPU the host only queues copies and launches, and waits for a place in the queue. A graph is a
sequence of launches that was captured once and is queued again as a whole. The arguments (pointers,
grids and numbers) are fixed, but the contents of the memory may change.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mie.ops.backend import Array
from mie.ops_gpu.host.nccl import Address

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Task = Callable[[], None]


Wait = Callable[[Callable[[], bool]], None]


def no_wait() -> None:
    """Return at once: all earlier work is done."""


class Queue(Protocol):
    """The work that a backend gives its device, in order."""

    is_asynchronous: bool
    """Whether the host continues while the device works."""
    device: AbstractContextManager[Any]
    """Makes the device current in another thread."""
    address: int
    """The address of the stream."""
    wait: Wait | None
    """Waits until its argument returns true, in place of CUDA, or None."""

    def address_of(self, array: Array) -> int:
        """Return the address of an array's memory."""

    def __enter__(self) -> None:
        """Direct this thread's launches to this queue until ``__exit__``."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate host memory for `upload` and `download`, for good."""

    def mark(self) -> Task:
        """Return a function that waits until everything that was queued so far is done."""

    def upload(self, host: NDArray[Any], device: Array) -> None:
        """Queue a copy. ``host`` may change once it is done.

        ``device`` is contiguous, or the first columns of a matrix.
        """

    def download(self, device: Array, host: NDArray[Any]) -> None:
        """Queue a copy. ``host`` holds the data once it is done."""

    def capture(self, work: Callable[[], T]) -> tuple[Task, T]:
        """Capture the launches of ``work`` without running them.

        Return a function that queues all of them, and the work's result. The work must allocate
        nothing, copy nothing and wait for nothing.
        """


class CupyQueue:
    """A stream of CuPy's current device.

    It is ordered with CuPy's default stream (it is not "non-blocking"), so any code may read and
    write arrays that leave the backend.
    """

    is_asynchronous = True

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.device = cupy.cuda.Device()
        self.stream = cupy.cuda.Stream()
        self.address: int = self.stream.ptr
        self.wait: Wait | None = None

    def address_of(self, array: Array) -> int:
        address: int = array.data.ptr
        return address

    def __enter__(self) -> None:
        self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        # CuPy's pool would round 1.1 GiB up to 2 GiB.
        memory = self._cupy.cuda.PinnedMemory(num_bytes)
        return np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, num_bytes)

    def mark(self) -> Task:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        if self.wait is not None:
            return functools.partial(self.wait, lambda: event.done)
        wait: Task = event.synchronize
        return wait

    def upload(self, host: NDArray[Any], device: Array) -> None:
        if device.flags.c_contiguous:
            device.set(host, self.stream)
            return
        runtime = self._cupy.cuda.runtime
        pitch = host.strides[0]
        runtime.memcpy2DAsync(
            *(device.data.ptr, device.strides[0], host.ctypes.data, pitch),
            *(pitch, len(host), runtime.memcpyHostToDevice, self.stream.ptr),
        )

    def download(self, device: Array, host: NDArray[Any]) -> None:
        device.get(self.stream, out=host, blocking=False)

    def capture(self, work: Callable[[], T]) -> tuple[Task, T]:
        with self.stream, _without_collections():
            self.stream.begin_capture()
            try:
                result = work()
            except BaseException:
                with suppress(Exception):  # the original exception is more useful than CUDA's
                    self.stream.end_capture()
                raise
            return functools.partial(self.stream.end_capture().launch, self.stream), result


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from freeing another engine's memory meanwhile, because that ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class EmulatedQueue:
    """Runs everything at once. A graph is the list of tasks submitted while capturing."""

    is_asynchronous = False

    def __init__(self) -> None:
        self._captured: list[Task] | None = None
        self.device: AbstractContextManager[Any] = nullcontext()
        self.address = 0
        self.wait: Wait | None = None

    def address_of(self, array: Array) -> int:
        return Address(array)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, task: Task) -> None:
        """Run the task, or record it while capturing."""
        if self._captured is None:
            task()
        else:
            self._captured.append(task)

    def host_memory(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.empty(num_bytes, np.uint8)

    def mark(self) -> Task:
        return no_wait

    def upload(self, host: NDArray[Any], device: Array) -> None:
        assert self._captured is None, "a copy inside a capture"
        np.copyto(device, host)

    def download(self, device: Array, host: NDArray[Any]) -> None:
        self.upload(device, host)

    def capture(self, work: Callable[[], T]) -> tuple[Task, T]:
        tasks: list[Task] = []
        self._captured = tasks
        try:
            result = work()
        finally:
            self._captured = None
        return functools.partial(_run, tasks), result


def _run(tasks: list[Task]) -> None:
    for task in tasks:
        task()


def in_queue(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Run a backend's method with its copies and launches in the backend's queue."""

    @functools.wraps(method)
    def inside(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._queue:
            return method(self, *args, **kwargs)

    return inside
