"""Define the device: a CUDA device, or the emulator with an arbitrary clock."""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mie.ops_gpu.chip import EMULATED_CHIP, Chip, current_chip, device_memory
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.launcher import CupyLauncher
from mie.ops_gpu.load import load_cupy_backend, load_emulated_backend

Call = Callable[[], object]

SAMPLES = 30


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Microseconds of a call, and how they were taken: "graph", "eager" or "fake"."""

    method: str
    values: list[float]


class Device(Protocol):
    """A machine, real or emulated."""

    xp: Any
    chip: Chip
    l2_bytes: int
    buffer_bytes: int
    """Bytes of a buffer that measures the memory. Two of them fit."""

    def backend(self, dtype: str, kv_cache_dtype: str) -> CupyBackend:
        """The backend that computes on the device."""

    def samples(self, calls: Sequence[Call], count: int) -> Samples:
        """Take ``count`` samples after an untimed first one.

        A sample is the mean microseconds of the calls.
        """

    def eager_us(self, calls: Sequence[Call]) -> float:
        """Return the median microseconds of the calls without a graph."""


class CupyDevice:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.xp: Any = CupyLauncher().xp
        self.chip = current_chip(self.xp)
        self.l2_bytes = int(self.xp.cuda.Device().attributes["L2CacheSize"])
        free = device_memory(self.xp, 1.0).available_bytes
        self.buffer_bytes = min(8 << 30, free // 4 >> 20 << 20)
        self._stream = self.xp.cuda.Stream()

    def backend(self, dtype: str, kv_cache_dtype: str) -> CupyBackend:
        return load_cupy_backend(dtype, kv_cache_dtype=kv_cache_dtype)

    def samples(self, calls: Sequence[Call], count: int) -> Samples:
        pool = self.xp.cuda.MemoryPool()  # the memory of a graph's results must stay its own
        with self._stream, self.xp.cuda.using_allocator(pool.malloc):
            run_all(calls)
            self._stream.synchronize()
            launch, method = self._captured(calls)
            self._time(launch)
            values = [self._time(launch) / len(calls) for _ in range(count)]
        return Samples(method=method, values=values)

    def eager_us(self, calls: Sequence[Call]) -> float:
        with self._stream:
            run_all(calls)
            return statistics.median(
                self._time(lambda: run_all(calls)) / len(calls) for _ in range(SAMPLES)
            )

    def _captured(self, calls: Sequence[Call]) -> tuple[Call, str]:
        """Return a launch of the graph of all calls, or of the calls, and which it is."""
        try:
            self._stream.begin_capture()
            try:
                run_all(calls)
            finally:
                graph = self._stream.end_capture()
            graph.launch(self._stream)
            self._stream.synchronize()
        except Exception as error:  # any error of CuPy: the row names it
            return lambda: run_all(calls), f"eager ({one_line(error)})"
        return lambda: graph.launch(self._stream), "graph"

    def _time(self, launch: Call) -> float:
        """Return the microseconds between two events around a launch."""
        start, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record(self._stream)
        launch()
        end.record(self._stream)
        end.synchronize()
        return 1000.0 * float(self.xp.cuda.get_elapsed_time(start, end))


class DryDevice:
    """The emulator."""

    def __init__(self) -> None:
        self.xp: Any = np
        self.chip = EMULATED_CHIP
        self.l2_bytes = self.buffer_bytes = 1 << 16

    def backend(self, dtype: str, kv_cache_dtype: str) -> CupyBackend:
        return load_emulated_backend(dtype, kv_cache_dtype=kv_cache_dtype)

    def samples(self, calls: Sequence[Call], count: int) -> Samples:
        calls[0]()
        return Samples(method="fake", values=[100.0 + index for index in range(count)])

    def eager_us(self, calls: Sequence[Call]) -> float:
        calls[-1]()
        return 123.0


def run_all(calls: Sequence[Call]) -> None:
    """Run each call once, in order."""
    for call in calls:
        call()


def one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def free_device_memory(xp: Any) -> None:
    """Give the pools' memory back to the device."""
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
