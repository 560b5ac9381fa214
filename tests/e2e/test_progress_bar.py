"""Check that loading weights and compiling show a progress bar, and only on a terminal."""

import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest

PATIENCE = 240
"""Seconds after which a program counts as hung."""

LOAD = """
import itertools, sys
from tqdm import std
from mie import LLM
seconds = itertools.count()
std.time = lambda: next(seconds)  # a bar is drawn after half a second
LLM("bundled", backend=sys.argv[1], num_blocks=8, use_tqdm_on_load=sys.argv[2] == "shown")
"""
SHOWN = [
    ("numpy", {"loading weights"}),
    pytest.param("jit", {"loading weights", "compiling kernels"}, marks=pytest.mark.slow),
]


def program(backend: str, how: str) -> list[str]:
    return [sys.executable, "-c", LOAD, backend, how]


def shown_on_a_terminal(backend: str, how: str, cache: Path) -> str:
    """Return what a terminal shows while a model loads for the first time."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    child = subprocess.Popen(program(backend, how), stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    with suppress(OSError):  # raised at the end, when no process has the terminal any more
        while piece := os.read(leader, 100_000):
            shown += piece
    os.close(leader)
    assert child.wait(PATIENCE) == 0, shown
    return shown.decode()


@pytest.mark.parametrize(("backend", "bars"), SHOWN)
def test_a_bar_is_drawn_on_a_terminal(backend: str, bars: set[str], tmp_path: Path):
    shown = shown_on_a_terminal(backend, "shown", tmp_path)
    assert {bar for bar in ("loading weights", "compiling kernels") if bar in shown} == bars
    assert "%|" in shown


def test_a_progress_bar_can_be_turned_off(tmp_path: Path):
    assert shown_on_a_terminal("numpy", "hidden", tmp_path) == ""
