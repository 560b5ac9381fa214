"""Keep the threads that run programs."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

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
        self, run: int, work: int, num_threads: int, scratch_bytes: int, code: object = None
    ) -> None:
        """Take the addresses of the kernels `run` and `work`, and ``code``, which holds them.

        Raises:
            ThreadLimitError: the system starts no more threads.
        """
        self.num_threads = num_threads
        self._run, self._work = function_at(run, 7), function_at(work, 3)
        self.scratch_bytes = scratch_bytes
        """The memory of each thread, which its kernels may overwrite."""
        self._code = code
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # that of a parent process may be locked for ever
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
        words, scratch, work = self._words, self._scratch, self._work
        at_work: list[threading.Lock] = []

        def serve(worker: int, has_left: threading.Lock) -> None:
            try:
                nothing = ctypes.c_void_p()
                own = scratch[worker + 1].ctypes.data
                work(ctypes.addressof(nothing), None, words.ctypes.data, worker, own)
            finally:
                has_left.release()

        weakref.finalize(self, _stop, words, at_work, self._pid, self._code)
        for worker in range(num_workers):
            (has_left := threading.Lock()).acquire()
            thread = threading.Thread(
                target=serve, args=(worker, has_left), name=f"mie-jit-{worker + 1}", daemon=True
            )
            start_thread(thread)
            at_work.append(has_left)

    def run(self, program: NDArray[np.int64], header: NDArray[np.int64], num_threads: int) -> None:
        """Run a program's instructions with at most this many threads."""
        if os.getpid() != self._pid:
            self._start()
        with self._lock:
            self._run(
                self._result, None, self._words.ctypes.data, program.ctypes.data,
                header.ctypes.data, 0, len(program), num_threads - 1, self._scratch.ctypes.data,
            )  # fmt: skip


def _stop(
    words: NDArray[np.int64], at_work: Sequence[threading.Lock], pid: int, code: object
) -> None:
    """Let the workers leave the compiled ``code``, which is kept until then.

    Those of a parent process do not exist in its forked child.
    """
    if os.getpid() != pid:
        return
    words[STOP] = 1
    post = ctypes.CDLL(None).sem_post
    for worker in range(len(at_work)):
        at = SLEEPERS + worker * WORKER_WORDS + SEMAPHORE_WORD
        post(ctypes.c_void_p(words[at:].ctypes.data))
    for has_left in at_work:
        has_left.acquire()
