"""Keep the threads that run programs."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops_jit.layout import POST, SLEEPERS, STOP, WAIT, WORKER_WORDS, YIELD
from mie.ops_jit.memory import zeros
from mie.system.threads import start_thread

_Function = Callable[..., int]
SEMAPHORE_WORD = 8
"""Where a worker's semaphore is, in words after its flag. POSIX's sem_t takes 32 bytes."""


def function_at(address: int, num_arguments: int) -> _Function:
    """Return the compiled function at an address. A call releases the GIL."""
    arguments = [ctypes.c_int64] * num_arguments
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *arguments)
    return function(address)


class Team:
    """The caller's thread and ``num_threads`` - 1 workers.

    The workers end when the object is deleted. A forked child starts its own.
    """

    def __init__(
        self, code: object, run: int, work: int, num_threads: int, scratch_bytes: int
    ) -> None:
        """Take the addresses of the kernels `run` and `work`, and the object that keeps their code.

        A worker that is told to end may still run the code when everything else is deleted.

        Raises:
            ThreadLimitError: the system starts no more threads.
        """
        self.num_threads = num_threads
        self._code = code
        self._run, self._work = function_at(run, 7), function_at(work, 3)
        self.scratch_bytes = ceil_div(scratch_bytes, 64) * 64
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        num_workers = self.num_threads - 1
        self._words: NDArray[np.int64] = zeros((SLEEPERS + num_workers * WORKER_WORDS,), np.int64)
        self._scratch = zeros((self.num_threads, self.scratch_bytes), np.uint8)
        self._nothing = ctypes.c_void_p()
        self._result = ctypes.addressof(self._nothing)
        library = ctypes.CDLL(None)
        for word, name in ((WAIT, "sem_wait"), (POST, "sem_post"), (YIELD, "sched_yield")):
            self._words[word] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        for worker in range(num_workers):
            at = SLEEPERS + worker * WORKER_WORDS + SEMAPHORE_WORD
            if library.sem_init(ctypes.c_void_p(self._words[at:].ctypes.data), 0, 0):
                raise MemoryError("sem_init failed")
        words, scratch, work, code = self._words, self._scratch, self._work, self._code

        def serve(worker: int) -> None:
            kept = ctypes.c_void_p(), code
            own = scratch[worker + 1].ctypes.data
            work(ctypes.addressof(kept[0]), None, words.ctypes.data, worker, own)

        weakref.finalize(self, _stop, words, num_workers, self._pid)
        for worker in range(num_workers):
            thread = threading.Thread(
                target=serve, args=(worker,), name=f"mie-jit-{worker + 1}", daemon=True
            )
            start_thread(thread)

    def run(self, program: NDArray[np.int64], header: NDArray[np.int64], num_threads: int) -> None:
        """Run a program's instructions with at most this many threads."""
        with self._lock:
            if os.getpid() != self._pid:
                self._start()
            self._run(
                self._result, None, self._words.ctypes.data, program.ctypes.data,
                header.ctypes.data, 0, len(program), num_threads - 1, self._scratch.ctypes.data,
            )  # fmt: skip


def _stop(words: NDArray[np.int64], num_workers: int, pid: int) -> None:
    """Tell the workers to end. Those of a parent process do not exist in its forked child."""
    if os.getpid() != pid:
        return
    words[STOP] = 1
    post = ctypes.CDLL(None).sem_post
    for worker in range(num_workers):
        at = SLEEPERS + worker * WORKER_WORDS + SEMAPHORE_WORD
        post(ctypes.c_void_p(words[at:].ctypes.data))
