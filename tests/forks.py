"""Run a part of a test in a forked child, and observe processes."""

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from deadlines import PATIENCE


def exit_code_of_child(action: Callable[[], object]) -> int:
    """Return the exit code of a forked child that runs ``action``: 0 unless it raises or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(PATIENCE))  # ends a child that hangs
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def children() -> set[int]:
    """Return the children of this process, zombies among them."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {number for number in numbers if _stat(number)[1:2] == [str(os.getpid())]}


def cpu_seconds_of_children(pid: int) -> float:
    """Return the CPU time of the children of a process that have ended."""
    return sum(map(int, _stat(pid)[13:15])) / os.sysconf("SC_CLK_TCK")


def assert_ends(pid: int) -> None:
    """Wait until a process is gone, or is a zombie because its parent does not wait for it."""
    for _ in range(int(100 * PATIENCE)):
        if _stat(pid)[:1] in ([], ["Z"], ["X"]):
            return
        time.sleep(0.01)
    raise AssertionError(f"{pid} still runs")


def _stat(pid: int) -> list[str]:
    """Return the state, the parent and the other facts of a process, or nothing if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
