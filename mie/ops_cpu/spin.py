"""Provide a lock that a thread spin-waits for, up to a limit.

Waking a sleeping thread takes tens of microseconds, most of all on a virtual machine, which has to
wake the CPU as well. That is as long as many operators take. A thread that spins in C sees the lock
become free at once, and does not hold the GIL meanwhile.
"""

import ctypes

from mie.base.arithmetic import ceil_div

CACHE_LINE = 64
"""Bytes of a cache line. A lock has its own line, so nothing else slows down the waiting thread."""

_LIBRARY = ctypes.CDLL(None)
_UNDER_GIL = ctypes.PyDLL(None)
_NO_SIZE = ctypes.c_size_t(0)
IS_AVAILABLE = all(hasattr(_LIBRARY, name) for name in ("pthread_spin_trylock", "lfind"))
"""These locks are an option of POSIX. Linux's C libraries have them."""


class SpinLock:
    """A `threading.Lock` that is initially taken and can be released when it is free.

    Any thread may release it, because in glibc and musl these locks have no owner.
    """

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(2 * CACHE_LINE)
        address = ceil_div(ctypes.addressof(self._memory), CACHE_LINE) * CACHE_LINE
        self._lock = ctypes.c_void_p(address)
        self._try = ctypes.cast(_LIBRARY.pthread_spin_trylock, ctypes.c_void_p)
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
        count = ctypes.byref(ctypes.c_size_t(num_tries))
        found = self._find(self._lock, self._lock, count, _NO_SIZE, self._try)
        return found is not None

    def release(self) -> None:
        """Release the lock. This keeps the GIL, because nothing here waits."""
        _UNDER_GIL.pthread_spin_unlock(self._lock)
