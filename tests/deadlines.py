"""Wait with a deadline, so that a failure never becomes a hang (`house/test_deadlines.py`)."""

import subprocess
import threading
from collections.abc import Callable
from typing import Any, Protocol

PATIENCE = 240.0
"""Seconds after which a program, a thread or a server counts as hung, far more than a slow and busy
machine needs."""


class Waited(Protocol):
    """A thread, or a process of ``multiprocessing``."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


def run(command: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program, and return it with its output. The program may fail."""
    settings = {"capture_output": True, "text": True, "check": False, "timeout": PATIENCE}
    done: subprocess.CompletedProcess[str] = subprocess.run(command, **{**settings, **options})
    return done


def join(*threads: Waited) -> None:
    """Wait until all threads have ended."""
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"


def within(wait: Callable[[], object]) -> None:
    """Call a function that waits without a deadline of its own."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    join(thread)
