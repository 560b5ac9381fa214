"""Fork helper processes, and share one piece of work at a time with them."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import struct
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from mie.ops_cpu.allocator import CACHE_LINE, shared_zeros
from mie.ops_cpu.threads import spin
from mie.ops_cpu.threads.gains import Gains

logger = logging.getLogger(__name__)

_MESSAGE = struct.Struct("8q")
HELPER_SPINS = 1e-3
"""Seconds that a helper spin-waits for a message before it sleeps."""
CALLER_SPINS = 2e-4
"""Seconds that the caller spin-waits for a helper. The helper may be waiting for this CPU."""
NAP = 1e-4
"""Seconds that the caller then sleeps between two looks."""
PATIENCE = 10.0
"""Seconds after which a helper that has begun counts as stuck, and is killed."""

_IS_ASLEEP, _ENDED, _SECONDS = range(3)
_STDERR = 2
_LIBRARY = ctypes.PyDLL(None)

IS_AVAILABLE = spin.IS_AVAILABLE and hasattr(os, "eventfd") and hasattr(_LIBRARY, "sched_getcpu")
"""Whether this system has what helper processes need, as Linux does."""


def pack(*numbers: int) -> bytes:
    """Return a message of at most eight numbers."""
    return _MESSAGE.pack(*numbers, *(0,) * (8 - len(numbers)))


def unpack(message: bytes) -> tuple[int, ...]:
    """Return the eight numbers of a message. Those that were not given are 0."""
    return _MESSAGE.unpack(message)


class HelperProcesses:
    """Forked children that do what messages say. Only one thread at a time may call `run`.

    A child sees this process's memory as it was when the child was forked, and shared memory as it
    is. Children end with this object, or with this process. Like helper threads, they are left out
    for a while when they do not pay (see `Gains`).
    """

    def __init__(self, number: int, do: Callable[[bytes], object]) -> None:
        """Fork ``number`` children, which call do(message).

        The caller may do a message as well, so doing it twice must be harmless.
        """
        self.have_failed = False
        """Whether one of them died or was stuck."""
        self._do = do
        self._gains = Gains()
        self._pid = os.getpid()
        reading, writing = os.pipe()
        self._helpers = [_Helper() for _ in range(number)]
        for helper in self._helpers:
            helper.fork(do, reading)
        os.close(reading)
        self._end = weakref.finalize(self, _end, self._pid, self._helpers, writing)

    @property
    def are_usable(self) -> bool:
        """Whether they are alive. A forked child of this process has none."""
        return self._end.alive and os.getpid() == self._pid

    def are_paused(self) -> bool:
        """Return whether to work without them now."""
        return not self._end.alive or self._gains.are_paused(time.perf_counter())

    def run(self, messages: Sequence[bytes], own: Callable[[], object]) -> float:
        """Call own() here while each of the first helpers does a message.

        Return how many seconds the last helper ended after the caller. The caller takes back what
        no helper has begun, and such a helper counts as if it were as slow again. If a helper dies
        or is stuck, the caller does all messages, and all helpers end.
        """
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        pairs = list(zip(self._helpers, messages, strict=False))
        own_end = helpers_end = 0.0
        try:
            for helper, message in pairs:
                helper.give(message)
            own()
            cpu_seconds = time.thread_time() - cpu_begin
            own_end = time.perf_counter()
            for helper, message in pairs:
                if helper.take_back():
                    self._do(message)
                    helpers_end = 2 * time.perf_counter() - begin
                else:
                    helper.wait()
                    cpu_seconds += helper.state[_SECONDS]
                    helpers_end = max(helpers_end, helper.state[_ENDED])
        except _HelperEnded as error:
            logger.warning("%s; mie goes on without helper processes", error)
            self.have_failed = True
            self._end()
            if not own_end:
                own()
            for message in messages:
                self._do(message)
            return 0.0
        except BaseException:  # such as Ctrl-C, after which no helper may write to shared memory
            self._end()
            raise
        end = time.perf_counter()
        self._gains.add(cpu_seconds - (end - begin), end)
        return helpers_end - own_end

    def close(self) -> None:
        """End the children. `run` may not be called afterwards."""
        self._end()


class _HelperEnded(Exception):
    """A helper died or is stuck."""


class _Helper:
    """One child, seen from both sides."""

    def __init__(self) -> None:
        # Each lock, the message and the state have a cache line of their own.
        self._memory = shared_zeros((4, CACHE_LINE), np.uint8)
        given, done, message, state = self._memory
        self._given, self._done = spin.SpinLock(given.ctypes.data), spin.SpinLock(done.ctypes.data)
        self._message, self.state = memoryview(message), memoryview(state).cast("d")
        self.state[_IS_ASLEEP] = 1  # the first message wakes it up, on a CPU of its own
        rate = spin.tries_per_second()
        self._helper_tries, self._caller_tries = (
            int(seconds * rate) for seconds in (HELPER_SPINS, CALLER_SPINS)
        )
        self._wake = os.eventfd(0)
        self._cpus = os.sched_getaffinity(0)
        self._pid = 0

    def fork(self, do: Callable[[bytes], object], reading: int) -> None:
        """Fork the child. It ends when ``reading``, a pipe, has no writer left."""
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of locks that other threads hold. The child takes none.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
            if self._pid == 0:
                status = 1
                try:
                    self._serve(do, reading)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    # In the caller.
    def give(self, message: bytes) -> None:
        """Offer the message to the child."""
        self._message[:] = message
        self._given.release()
        # If the child falls asleep at this moment, the caller takes the message back.
        if self.state[_IS_ASLEEP]:
            self._wake_up()

    def _wake_up(self) -> None:
        """Wake the child on another CPU than the caller's.

        Linux may wake it on the caller's, and moves it away only some milliseconds later.
        """
        if self._has_ended():
            raise _HelperEnded(f"helper process {self._pid} died")
        others = self._cpus - {_LIBRARY.sched_getcpu()}
        if others:
            with suppress(OSError):  # the process may have lost these CPUs meanwhile
                os.sched_setaffinity(self._pid, others)
        os.eventfd_write(self._wake, 1)

    def take_back(self) -> bool:
        """Take the message back, if the child has not begun."""
        return self._given.take()

    def wait(self) -> None:
        """Wait until the child has done the message that it has begun."""
        deadline = time.perf_counter() + PATIENCE
        while not self._done.acquire(self._caller_tries):
            if self._has_ended():
                raise _HelperEnded(f"helper process {self._pid} died")
            if time.perf_counter() > deadline:
                raise _HelperEnded(f"helper process {self._pid} took over {PATIENCE:g} s")
            time.sleep(NAP)

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:  # the program has waited for all its children
            return True

    def end(self) -> None:
        """Kill the child and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._wake)

    # In the child.
    def _serve(self, do: Callable[[bytes], object], reading: int) -> None:
        """Do messages until the caller's process ends. All signals stay blocked."""
        gc.disable()  # it may not finalise what belongs to the caller
        _close_files(except_for=(_STDERR, self._wake, reading))
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(reading, 0)  # reports only that the last writer has gone
        state = self.state
        with np.errstate(all="ignore"):  # the caller's own part warns
            while True:
                while not self._given.acquire(self._helper_tries):
                    state[_IS_ASLEEP] = 1
                    if self._given.take():
                        break
                    if reading in dict(poll.poll()):
                        return
                    os.eventfd_read(self._wake)
                state[_IS_ASLEEP] = 0
                begin = time.thread_time()
                do(bytes(self._message))
                state[_SECONDS] = time.thread_time() - begin
                state[_ENDED] = time.perf_counter()
                self._done.release()


def _close_files(except_for: Sequence[int]) -> None:
    """Close all other files, so that nothing waits for this process to close them."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in except_for:
            with suppress(OSError):  # the listing's own is closed already
                os.close(number)


def _end(pid: int, helpers: Sequence[_Helper], writing: int) -> None:
    if os.getpid() == pid:  # a forked child of this process has no helpers
        os.close(writing)
        for helper in helpers:
            helper.end()
