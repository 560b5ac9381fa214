"""Check that loading weights shows a progress bar only on a terminal."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

LOAD = """
import itertools
from tqdm import std
from mie.load.engine import _progress_bar
seconds = itertools.count()
std.time = lambda: next(seconds)  # a bar is drawn after half a second
with _progress_bar(1000, {is_wanted}) as progress:
    for _ in range(8):
        progress(125)
"""


def program(is_wanted: bool) -> list[str]:
    return [sys.executable, "-c", LOAD.format(is_wanted=is_wanted)]


def shown_on_a_terminal(is_wanted: bool) -> str:
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    subprocess.run(program(is_wanted), stderr=follower, check=True, timeout=240)
    os.write(follower, b".")  # gives the test something to read
    shown = os.read(leader, 100_000).decode()
    os.close(follower)
    os.close(leader)
    return shown


def test_a_bar_is_drawn_on_a_terminal():
    shown = shown_on_a_terminal(True)
    assert "loading weights" in shown
    assert "%|" in shown


def test_a_progress_bar_can_be_turned_off():
    assert shown_on_a_terminal(False) == "."


def test_a_pipe_shows_no_bar():
    done = subprocess.run(program(True), capture_output=True, check=True, timeout=240)
    assert done.stderr == b""
