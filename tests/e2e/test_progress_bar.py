"""A bar while weights are loaded, on a terminal and nowhere else."""

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
from mie.load import _progress_bar
seconds = itertools.count()
std.time = lambda: next(seconds)  # a bar is drawn after half a second
with _progress_bar(1000) as progress:
    for _ in range(8):
        progress(125)
"""


def test_a_bar_is_drawn_on_a_terminal():
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    subprocess.run([sys.executable, "-c", LOAD], stderr=follower, check=True, timeout=240)
    os.close(follower)
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    assert "loading weights" in shown
    assert "%|" in shown


def test_no_bar_in_a_pipe():
    done = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, check=True, timeout=240
    )
    assert done.stderr == b""
