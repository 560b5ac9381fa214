"""Provide a lock that a thread spin-waits for, up to a limit.

Waking a sleeping thread takes tens of microseconds, most of all on a virtual machine, which has to
wake the CPU as well. That is as long as many operators take. A thread that spins in C sees the lock
become free at once, and does not hold the GIL meanwhile.
"""

from __future__ import annotations

import ctypes
import time

from mie.arithmetic import ceil_div

CACHE_LINE = 64
"""Bytes of a cache line. A lock has its own line, so nothing else slows down the waiting thread."""
CALIBRATION_TRIES = 1000
CALIBRATION_ROUNDS = 5

_LIBRARY = ctypes.CDLL(None)
_UNDER_GIL = ctypes.PyDLL(None)
_NO_SIZE = ctypes.c_size_t(0)
IS_AVAILABLE = all(hasattr(_LIBRARY, name) for name in ("pthread_spin_trylock", "lfind"))
"""These locks are an option of POSIX. Linux's C libraries have them."""


class SpinLock:
    """A `threading.Lock` that is initially taken and can be released when it is free.

    Any thread may release it, because in glibc and musl these locks have no owner.
    """

    def __init__(self, address: int | None = None) -> None:
        """Create a lock at ``address``, a cache line of zeros, or in memory of its own."""
        if address is None:
            self._memory = ctypes.create_string_buffer(2 * CACHE_LINE)
            address = ceil_div(ctypes.addressof(self._memory), CACHE_LINE) * CACHE_LINE
        self._lock = ctypes.c_void_p(address)
        self._try = ctypes.cast(_LIBRARY.pthread_spin_trylock, ctypes.c_void_p)
        self._count = ctypes.c_size_t(0)  # made once, because many waits are short
        self._count_place = ctypes.byref(self._count)
        self._find = _LIBRARY["lfind"]  # a private object, because its type is set here
        self._find.restype = ctypes.c_void_p
        _UNDER_GIL.pthread_spin_init(self._lock, 0)
        self.take()

    def take(self) -> bool:
        """Take the lock if it is free. This keeps the GIL, because nothing here waits."""
        return bool(_UNDER_GIL.pthread_spin_trylock(self._lock) == 0)

    def acquire(self, num_tries: int) -> bool:
        """Take the lock as soon as it is free. Return False after ``num_tries`` tries."""
        # lfind compares its key with each element until the comparison yields 0. Here a comparison
        # is an attempt to lock, and the elements, of size 0, are never read.
        if self._count.value != num_tries:
            self._count.value = num_tries
        found = self._find(self._lock, self._lock, self._count_place, _NO_SIZE, self._try)
        return found is not None

    def release(self) -> None:
        """Release the lock. This keeps the GIL, because nothing here waits."""
        _UNDER_GIL.pthread_spin_unlock(self._lock)


def tries_per_second() -> float:
    """Return how often this CPU can try to take a lock in a second, or 0 without such locks."""
    if not IS_AVAILABLE:
        return 0.0
    lock, fastest = SpinLock(), float("inf")
    for _ in range(CALIBRATION_ROUNDS):  # other programs can only make a round slower
        begin = time.perf_counter()
        lock.acquire(CALIBRATION_TRIES)
        fastest = min(fastest, time.perf_counter() - begin)
    return CALIBRATION_TRIES / fastest
