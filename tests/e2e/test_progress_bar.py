"""Check that loading weights and compiling show a progress bar, and only on a terminal."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

LOAD = """
import itertools
from tqdm import std
from mie.load.engine import {bar}
seconds = itertools.count()
std.time = lambda: next(seconds)  # a bar is drawn after half a second
with {bar}(1000, {is_wanted}) as progress:
    for _ in range(8):
        progress(125)
"""


BARS = {"_bar_of_bytes": "loading weights", "_bar_of_kernels": "compiling kernels"}


def program(bar: str, is_wanted: bool) -> list[str]:
    return [sys.executable, "-c", LOAD.format(bar=bar, is_wanted=is_wanted)]


def shown_on_a_terminal(bar: str, is_wanted: bool) -> str:
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    subprocess.run(program(bar, is_wanted), stderr=follower, check=True, timeout=240)
    os.write(follower, b".")  # gives the test something to read
    shown = os.read(leader, 100_000).decode()
    os.close(follower)
    os.close(leader)
    return shown


@pytest.mark.parametrize("bar", BARS)
def test_a_bar_is_drawn_on_a_terminal(bar: str):
    shown = shown_on_a_terminal(bar, True)
    assert BARS[bar] in shown
    assert "%|" in shown


@pytest.mark.parametrize("bar", BARS)
def test_a_progress_bar_can_be_turned_off(bar: str):
    assert shown_on_a_terminal(bar, False) == "."


@pytest.mark.parametrize("bar", BARS)
def test_a_pipe_shows_no_bar(bar: str):
    done = subprocess.run(program(bar, True), capture_output=True, check=True, timeout=240)
    assert done.stderr == b""
