"""A lock that is waited for in a busy loop.

Waking a thread that sleeps takes tens of microseconds, on a virtual machine most of all, where its
CPU has to be woken too: as long as many an operator. A thread that loops in C sees the lock go free
at once, and holds no GIL meanwhile.
"""

from __future__ import annotations

import ctypes

CACHE_LINE = 64
"""Bytes; a lock has one of its own, so that nothing else slows down who waits for it."""

_LIBRARY = ctypes.CDLL(None)
_UNDER_GIL = ctypes.PyDLL(None)
IS_AVAILABLE = hasattr(_LIBRARY, "pthread_spin_lock")
"""POSIX has these locks as an option; Linux's C libraries have them."""


class SpinLock:
    """Like `threading.Lock`, but taken when made, waited for busily, and released without harm
    when it is free. Whoever may release it: in glibc and musl these locks know no owner."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(2 * CACHE_LINE)
        address = -(-ctypes.addressof(self._memory) // CACHE_LINE) * CACHE_LINE
        self._lock = ctypes.c_void_p(address)
        _UNDER_GIL.pthread_spin_init(self._lock, 0)
        self.acquire()

    def acquire(self) -> None:
        """Wait until it is free, and take it."""
        _LIBRARY.pthread_spin_lock(self._lock)

    def release(self) -> None:
        """Let another thread take it. The GIL is kept: nothing here waits."""
        _UNDER_GIL.pthread_spin_unlock(self._lock)
