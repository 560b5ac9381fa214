"""Fork helper processes that compute the same as the caller, and share what takes long."""

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
from functools import partial
from itertools import chain, repeat
from typing import TypeVar

import numpy as np

from mie.ops_cpu.allocator import CACHE_LINE, shared_zeros
from mie.ops_cpu.processes.balance import Balance
from mie.ops_cpu.processes.barrier import Barrier
from mie.ops_cpu.threads import cpus, spin
from mie.ops_cpu.threads.cpus import leave_to_caller
from mie.ops_cpu.threads.gains import Gains

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_MESSAGE = struct.Struct("8q")
HELPER_SPINS = 1e-3
"""Seconds that a helper spin-waits before it sleeps."""
CALLER_SPINS = 2e-4
"""Seconds that the caller spin-waits for a helper. The helper may be waiting for this CPU."""
NAP = 1e-4
"""Seconds of sleep between two looks of a process that has to wait longer."""
NUM_NAPS = 1000
"""Naps after which a helper's become long. The caller may be suspended, as by Ctrl-Z."""
LONG_NAP = 1e-1
"""Seconds of a long nap. A helper that waits takes one percent of a CPU then."""
CREDIT = 4e-3
"""Seconds that helpers may lose before they pause. The first step after a pause loses about 2 ms.

Its helpers sleep, and what they need is in no cache.
"""
MOST_KEPT = 2e-2
"""Maximum seconds of gains that offset later losses, which other programs cause now and then."""
PATIENCE = 10.0
"""Minimum seconds of waiting after which helpers count as stuck, and are killed."""
MOST_TIMES = 8
"""Times as long as the caller's own share took. A large step may take minutes between meetings."""

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
    """Forked children that run the same code as the caller, in lockstep.

    Each process calls `share` with the same tasks in the same order, computes its own task, and
    waits until the others have computed theirs. All processes compute what lies between two calls.
    This takes no longer than computing it once.

    A child sees this process's memory as it was when the child was forked, and shared memory as it
    is. Children end with this object, or with this process. Like helper threads, they are left out
    for a while when they do not pay (see `Gains`). Only one thread at a time may call `run`.
    """

    def __init__(self, number: int) -> None:
        """Take the memory for this many processes, of which the caller is one."""
        self.number = number
        self.rank = 0
        """Which of the processes this one is. The caller is 0."""
        self.have_failed = False
        """Whether one of them died or was stuck."""
        self._gains = Gains(CREDIT, MOST_KEPT)
        self._barrier, self._balance = Barrier(number), Balance(number)
        self.ends = self._balance.ends
        """Where each process's share of a piece of work begins, of `UNITS` equal parts."""
        self._ends = shared_zeros((number + 1,), np.int64)
        self._seconds = shared_zeros((number, CACHE_LINE // 8), np.float64)
        """How long each process worked on its shares in the last step, and how long it waited."""
        self._worked = self._waited = self._since = 0.0
        rate = spin.tries_per_second()
        self._caller_tries, self._helper_tries = (
            int(seconds * rate) for seconds in (CALLER_SPINS, HELPER_SPINS)
        )
        self._is_idle = self._is_together = False
        self._pid = os.getpid()
        self._helpers: list[_Helper] = []
        self._end = weakref.finalize(self, _end, self._pid, self._helpers)

    def start(self, do: Callable[[bytes], object]) -> None:
        """Fork the children. They call do(message) for each message of `run`.

        Raise OSError or MemoryError if the system cannot give so many processes, files or bytes.
        """
        try:
            for rank in range(1, self.number):
                self._helpers.append(_Helper(self._helper_tries))
                self._helpers[-1].fork(partial(self._do_in_child, rank, do))
            self._is_idle = True
        except BaseException:
            self.close()
            raise

    @property
    def are_usable(self) -> bool:
        """Whether they are alive. A forked child of this process has none."""
        return self._is_idle and self._end.alive and os.getpid() == self._pid

    def are_paused(self) -> bool:
        """Return whether to work without them now."""
        return self._gains.are_paused(time.perf_counter())

    def run(self, message: bytes, own: Callable[[], Result]) -> Result:
        """Return own() while each helper does the message, which must do the same.

        If a helper dies or is stuck, own() goes on without help, and all helpers end.
        """
        if not self.are_usable:
            self.close()  # a fork or a second interrupt may have come within a step
            return own()
        # Everything stays inside one try statement, because an interrupt can come anywhere. After
        # one, no helper may write to shared memory.
        try:
            self._is_idle = False
            self._begin()
            self._ends[:] = self.ends
            self._is_together = True
            for helper in self._helpers:
                helper.give(message)
            result = own()
            if self._is_together and self._end_step():
                self._balance.note(*self._seconds[:, :2].T.tolist())
                self.ends = self._balance.ends
            self._is_together, self._is_idle = False, True
        except BaseException:
            self.close()
            raise
        saved = (self.number - 1) * self._worked  # at most: one alone would have more bandwidth
        self._gains.add(saved - self._waited, time.perf_counter())
        return result

    def share(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Call this process's task, and return when each process has called its own.

        Without helpers, call all of them.
        """
        if self._is_together:
            begin = time.perf_counter()
            tasks[self.rank]()
            end = time.perf_counter()
            if self._meet():
                self._since = now = time.perf_counter()
                self._worked += end - begin
                self._waited += now - end
                return
            tasks = tasks[1:]
        for task in tasks:
            task()

    def meet(self) -> None:
        """Wait until each process is here. All that it did since the last meeting was its share.

        Raise StepLostError if there are no helpers any more.
        """
        end = time.perf_counter()
        if not self._is_together or not self._meet():
            raise StepLostError
        self._worked += end - self._since
        self._since = now = time.perf_counter()
        self._waited += now - end

    def _begin(self) -> None:
        self._worked = self._waited = 0.0
        self._since = time.perf_counter()

    def _end_step(self) -> bool:
        """Tell how long this process worked and waited, and wait until all have ended."""
        self._seconds[self.rank, :2] = self._worked, self._waited
        return self._meet()

    def _meet(self) -> bool:
        """Wait for the other processes. In the caller, return False if there are none any more."""
        tries = self._helper_tries if self.rank else self._caller_tries
        try:
            self._barrier.meet(tries, self._wait_longer)
        except _HelperEnded as error:
            if self._end.alive:  # it did not end because another thread or the program ends it
                logger.warning("%s; mie goes on without helper processes", error)
                self.have_failed = True
            self.close()
            return False
        return True

    def _wait_longer(self, lock: spin.SpinLock) -> None:
        if self.rank:
            naps = chain(repeat(NAP, NUM_NAPS), repeat(LONG_NAP))
            while not lock.acquire(self._helper_tries):
                if os.getppid() != self._pid:
                    raise SystemExit
                time.sleep(next(naps))
            return
        patience = max(PATIENCE, MOST_TIMES * (time.perf_counter() - self._since))
        # Looks are counted, because the clock goes on while all processes are stopped.
        for _ in range(int(patience / (CALLER_SPINS + NAP))):
            if not self._end.alive:
                raise _HelperEnded("another thread ended the helper processes")
            for helper in self._helpers:
                helper.check()
            time.sleep(NAP)
            if lock.acquire(self._caller_tries):
                return
        raise _HelperEnded(f"a helper process took over {patience:g} s")

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
        self._is_together = False
        if interrupt is not None:
            raise interrupt

    def _do_in_child(self, rank: int, do: Callable[[bytes], object], message: bytes) -> None:
        if not self.rank:
            self.rank, self._is_together = rank, True
            self._barrier.join(rank)
        self._begin()
        ends = self._ends.tolist()
        if ends != self.ends:
            self.ends = ends
        do(message)
        self._end_step()


class StepLostError(Exception):
    """A helper died or is stuck, and nothing has the results of its part of the step."""


class _HelperEnded(Exception):
    """A helper died or is stuck."""


class _Helper:
    """One child, seen from both sides."""

    def __init__(self, num_tries: int) -> None:
        # The lock, the message and the state have a cache line of their own.
        self._memory = shared_zeros((3, CACHE_LINE), np.uint8)
        given, message, state = self._memory
        self._given = spin.SpinLock(given.ctypes.data)
        self._message, self._is_asleep = memoryview(message), memoryview(state)
        self._is_asleep[0] = 1  # the first message wakes it up, on a CPU of its own
        self._num_tries = num_tries
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
                except SystemExit:
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
        finally:
            try:
                _close([caller])
            finally:  # another thread may have received a signal
                signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    # In the caller.
    def give(self, message: bytes) -> None:
        """Give the message to the child, which is idle."""
        self._message[:] = message
        self._given.release()
        # If the child falls asleep at this moment, `check` wakes it up.
        if self._is_asleep[0]:
            with suppress(_HelperEnded):  # `check` will raise it
                self._wake_up()

    def check(self) -> None:
        """Wake the child up if it sleeps. Raise an exception if it has died."""
        if self._has_ended():
            raise _HelperEnded(f"helper process {self._pid} died")
        if self._is_asleep[0]:
            self._wake_up()

    def _wake_up(self) -> None:
        leave_to_caller(self._pid)
        try:
            os.eventfd_write(self._wake, 1)
        except OSError as error:  # the program may have closed all files
            raise _HelperEnded(f"helper process {self._pid} cannot be woken up") from error

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:  # it was waited for, here or by the program
            return True

    def end(self) -> None:
        """Kill the child, if there is one, and wait until it has ended. Twice does no harm."""
        # Its number may already belong to another process if the program has waited for it.
        if self._pid and not self._has_ended():
            # Another thread may wait for it meanwhile, or the program may have changed its user.
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
        wake, self._wake = self._wake, -1
        try:  # noqa: SIM105  # in `suppress`, an interrupt could come before the call
            os.close(wake)
        except OSError:  # it is closed already
            pass

    # In the child.
    def _serve(self, do: Callable[[bytes], object], caller: int) -> None:
        """Do messages until the caller's process ends. All signals stay blocked."""
        gc.freeze()  # what belongs to the caller is not finalised here
        # Nothing should wait for this process to close a file.
        files = {int(name) for name in os.listdir("/proc/self/fd")}
        _close(files - {_STDERR, self._wake, caller})
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(caller, select.POLLIN)  # reports that the process has ended
        with np.errstate(all="ignore"):  # the caller warns
            while True:
                while not self._given.acquire(self._num_tries):
                    self._is_asleep[0] = 1
                    if self._given.take():
                        break
                    if caller in dict(poll.poll()):
                        return
                    os.eventfd_read(self._wake)
                self._is_asleep[0] = 0
                do(bytes(self._message))


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
