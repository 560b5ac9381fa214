"""Fork helper processes, and share one piece of work at a time with them."""

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from mie.ops_cpu.allocator import CACHE_LINE, shared_zeros
from mie.ops_cpu.threads import cpus, spin
from mie.ops_cpu.threads.cpus import leave_to_caller
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
"""Seconds of waiting after which a helper that has begun counts as stuck, and is killed."""

_IS_ASLEEP, _ENDED, _SECONDS = range(3)
_STDERR = 2

IS_AVAILABLE = (
    spin.IS_AVAILABLE
    and all(hasattr(os, name) for name in ("eventfd", "pidfd_open"))
    and cpus.IS_AVAILABLE
)
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

        The caller may do a message as well, so doing it twice must be harmless. Raise OSError or
        MemoryError if the system cannot give so many processes, files or bytes.
        """
        self.have_failed = False
        """Whether one of them died or was stuck."""
        self._do = do
        self._gains = Gains()
        self._are_idle = True
        self._pid = os.getpid()
        self._helpers: list[_Helper] = []
        self._end = weakref.finalize(self, _end, self._pid, self._helpers)
        try:
            for _ in range(number):
                self._helpers.append(_Helper())
                self._helpers[-1].fork(do)
        except BaseException:
            self.close()
            raise

    @property
    def are_usable(self) -> bool:
        """Whether they are alive. A forked child of this process has none."""
        return self._are_idle and self._end.alive and os.getpid() == self._pid

    def are_paused(self) -> bool:
        """Return whether to work without them now."""
        return not self._end.alive or self._gains.are_paused(time.perf_counter())

    def run(self, messages: Sequence[bytes], own: Callable[[], object]) -> float:
        """Call own() here while each of the first helpers does a message.

        Return how many seconds the last helper ended after the caller. The caller takes back what
        no helper has begun, and such a helper counts as if it were as slow again. If a helper dies
        or is stuck, the caller does all messages, and all helpers end.
        """
        if not self.are_usable:
            own()
            self._do_all(messages)
            return 0.0
        begin, helpers_end = time.perf_counter(), 0.0
        helpers = self._helpers[: len(messages)]
        try:
            self._are_idle = False
            for helper, message in zip(helpers, messages, strict=True):
                helper.give(message)
            own()
            own_end = time.perf_counter()
            seconds = own_end - begin
            for helper, message in zip(helpers, messages, strict=True):
                if helper.take_back():
                    helper.check()
                    self._do(message)
                    helpers_end = 2 * time.perf_counter() - begin
                else:
                    helper.wait()
                    seconds += helper.state[_SECONDS]
                    helpers_end = max(helpers_end, helper.state[_ENDED])
            self._are_idle = True
        except _HelperEnded as error:
            if self._end.alive:  # it did not end because the program does
                logger.warning("%s; mie goes on without helper processes", error)
            self.have_failed = True
            self.close()
            self._do_all(messages)
            return 0.0
        except BaseException:  # such as Ctrl-C, after which no helper may write to shared memory
            self.close()
            raise
        end = time.perf_counter()
        self._gains.add(seconds - (end - begin), end)
        return helpers_end - own_end

    def _do_all(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self._do(message)

    def close(self) -> None:
        """End the children, even if interrupts come meanwhile. `run` then works without them."""
        interrupt: BaseException | None = None
        while self._end.alive or self._helpers:
            try:
                self._end()
                _end(self._pid, self._helpers)  # an interrupt may have ended the first call
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


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
        self._pid, self._wake = 0, -1

    def fork(self, do: Callable[[bytes], object]) -> None:
        """Fork the child. It ends with this process."""
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        caller = -1
        try:
            # A pipe would not tell the child while another child, forked later, has it open.
            caller = os.pidfd_open(os.getpid())
            self._wake = os.eventfd(0)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            with warnings.catch_warnings():
                # Python 3.12 warns of locks that other threads hold. The child takes none.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
            if self._pid == 0:
                status = 1
                try:
                    self._serve(do, caller)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
        finally:
            _close([caller])
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
        leave_to_caller(self._pid)
        with suppress(OSError):  # the program may have closed all files
            os.eventfd_write(self._wake, 1)

    def take_back(self) -> bool:
        """Take the message back, if the child has not begun."""
        return self._given.take()

    def wait(self) -> None:
        """Wait until the child has done the message that it has begun."""
        if self._done.acquire(self._caller_tries):
            return
        # Looks are counted, because the clock goes on while both processes are stopped.
        num_looks = int(PATIENCE / (CALLER_SPINS + NAP))
        for _ in range(num_looks):
            self.check()
            time.sleep(NAP)
            if self._done.acquire(self._caller_tries):
                return
        raise _HelperEnded(f"helper process {self._pid} took over {PATIENCE:g} s")

    def check(self) -> None:
        """Raise an exception if the child has died."""
        if self._has_ended():
            raise _HelperEnded(f"helper process {self._pid} died")

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:  # it was waited for, here or by the program
            return True

    def end(self) -> None:
        """Kill the child, if there is one, and wait until it has ended. Twice does no harm."""
        # Its number may already belong to another process if the program has waited for it.
        if self._pid and not self._has_ended():
            os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        wake, self._wake = self._wake, -1
        try:  # noqa: SIM105  # in `suppress`, an interrupt could come before the call
            os.close(wake)
        except OSError:  # it is closed already
            pass

    # In the child.
    def _serve(self, do: Callable[[bytes], object], caller: int) -> None:
        """Do messages until the caller's process ends. All signals stay blocked."""
        gc.disable()  # it may not finalise what belongs to the caller
        # Nothing should wait for this process to close a file.
        files = {int(name) for name in os.listdir("/proc/self/fd")}
        _close(files - {_STDERR, self._wake, caller})
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(caller, select.POLLIN)  # reports that the process has ended
        state = self.state
        with np.errstate(all="ignore"):  # the caller's own part warns
            while True:
                while not self._given.acquire(self._helper_tries):
                    state[_IS_ASLEEP] = 1
                    if self._given.take():
                        break
                    if caller in dict(poll.poll()):
                        return
                    os.eventfd_read(self._wake)
                state[_IS_ASLEEP] = 0
                begin = time.thread_time()
                do(bytes(self._message))
                state[_SECONDS] = time.thread_time() - begin
                state[_ENDED] = time.perf_counter()
                self._done.release()


def _close(files: Iterable[int]) -> None:
    for number in files:
        with suppress(OSError):  # it is closed already
            os.close(number)


def _end(pid: int, helpers: list[_Helper]) -> None:
    interrupt: BaseException | None = None
    while helpers and os.getpid() == pid:  # a forked child of this process has no helpers
        try:
            last = helpers[-1]
            last.end()
            helpers.remove(last)
        except (IndexError, ValueError):  # another thread ends them too
            continue
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
