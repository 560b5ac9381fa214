"""Let a sleeping helper wake up on a CPU of its own."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_LIBRARY = ctypes.PyDLL(None)
IS_AVAILABLE = hasattr(_LIBRARY, "sched_getcpu") and hasattr(os, "sched_setaffinity")
"""Whether the system can say and set where a thread runs, as Linux can."""


def leave_to_caller(thread_id: int) -> None:
    """Keep a thread, or a process with one thread, off the CPU that the caller runs on now.

    It may run on the caller's other CPUs. Linux may wake a thread on the CPU of the thread that
    wakes it, and moves it away only some milliseconds later.
    """
    if not IS_AVAILABLE:
        return
    others = os.sched_getaffinity(0) - {_LIBRARY.sched_getcpu()}
    if others:
        with suppress(OSError):  # the thread may have ended
            os.sched_setaffinity(thread_id, others)
