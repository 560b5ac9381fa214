"""Run a part of a test in a forked child, and see which children there are."""

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

PATIENCE = 120
"""Seconds after which a child counts as hung."""


def exit_code_of_child(action: Callable[[], object]) -> int:
    """Return the exit code of a forked child that runs ``action``: 0 unless it raises or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE)  # ends a child that hangs
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def children() -> set[int]:
    """Return the children of this process, zombies among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = stat.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(number))
    return found
