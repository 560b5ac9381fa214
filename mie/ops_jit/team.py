"""Keep the threads that run programs."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.base.threads import start_thread
from mie.ops_jit.kernel_cache import Kernels
from mie.ops_jit.layout import (
    POST,
    SEMAPHORE,
    SHARE_SHIFT,
    SLEEPERS,
    STOP,
    WAIT,
    WORKER_WORDS,
    YIELD,
)
from mie.ops_jit.memory import address, zeros

_Function = Callable[..., int]


def function_at(address: int, num_arguments: int) -> _Function:
    """Return the compiled function at an address. A call releases the GIL."""
    arguments = [ctypes.c_int64] * num_arguments
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    return function(address)


class Team:
    """The caller's thread and ``num_threads`` - 1 workers.

    The workers end when the object is deleted. A forked child starts its own.
    """

    def __init__(self, kernels: Kernels, num_threads: int, scratch_bytes: int) -> None:
        """Start the workers. They run the kernels `run` and `work`.

        Raises:
            ThreadLimitError: the system starts no more threads.
        """
        self.num_threads = num_threads
        self._kernels = kernels
        self._run, self._work = function_at(kernels["run"], 7), function_at(kernels["work"], 3)
        self.scratch_bytes = ceil_div(scratch_bytes, 64) * 64
        self._nothing = ctypes.c_void_p()
        self._result = ctypes.addressof(self._nothing)
        self._locks: dict[int, threading.Lock] = {}
        """By process, because a fork copies the lock that another thread holds."""
        self._start()

    def _start(self) -> None:
        num_workers = self.num_threads - 1
        words: NDArray[np.int64] = zeros((SLEEPERS + num_workers * WORKER_WORDS,), np.int64)
        scratch: NDArray[np.uint8] = zeros((self.num_threads, self.scratch_bytes), np.uint8)
        library = ctypes.CDLL(None)
        for word, name in ((WAIT, "sem_wait"), (POST, "sem_post"), (YIELD, "sched_yield")):
            words[word] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        words[SHARE_SHIFT] = (4 * self.num_threads - 1).bit_length()
        for worker in range(num_workers):
            if library.sem_init(_semaphore(words, worker), 0, 0):
                raise MemoryError("sem_init failed")
        arguments = self._kernels, self._work, words, scratch
        threads = [
            threading.Thread(
                target=_serve, args=(*arguments, worker), name=f"mie-jit-{worker + 1}", daemon=True
            )
            for worker in range(num_workers)
        ]
        # From here on the team runs programs, whether all workers start or not.
        self._words, self._scratch = words, scratch
        self._team, self._own_scratch = address(words), address(scratch)
        self._pid = os.getpid()
        # At the program's end too, while the workers' code is still in memory.
        weakref.finalize(self, _stop, words, threads, self._pid)
        for thread in threads:
            start_thread(thread)

    def run(
        self, program: NDArray[np.int64], header: NDArray[np.int64], first: int, end: int
    ) -> None:
        """Run the instructions first … end - 1 of a program [I, INSTRUCTION_WORDS]."""
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if os.getpid() != self._pid:
                self._start()
            self._run(
                self._result, None, self._team, address(program), address(header), first, end,
                self.num_threads - 1, self._own_scratch,
            )  # fmt: skip


def _semaphore(words: NDArray[np.int64], worker: int) -> ctypes.c_void_p:
    """Return the address of a worker's semaphore."""
    return ctypes.c_void_p(address(words[SLEEPERS + worker * WORKER_WORDS + SEMAPHORE :]))


def _serve(
    kernels: Kernels,
    work: _Function,
    words: NDArray[np.int64],
    scratch: NDArray[np.uint8],
    worker: int,
) -> None:
    """Work until the team stops. All of its memory and the kernels' code are kept until then."""
    nothing = ctypes.c_void_p()
    work(ctypes.addressof(nothing), None, address(words), worker, address(scratch[worker + 1]))


def _stop(words: NDArray[np.int64], threads: Sequence[threading.Thread], pid: int) -> None:
    """End the workers. Workers of a parent process do not exist in its forked child."""
    if os.getpid() != pid:
        return
    words[STOP] = 1
    post = ctypes.CDLL(None).sem_post
    for worker in range(len(threads)):
        post(_semaphore(words, worker))
    for thread in threads:
        # One may not have started, and one may be collecting the garbage that the team was in.
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join()
