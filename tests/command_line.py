"""``mie`` as a person runs it: a process with its streams."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Warnings are errors here too, and text comes as UTF-8 whatever the machine's locale.
COMMAND = [sys.executable, "-W", "error", "-m", "mie"]
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # or argparse would meet a closed pipe, and hide it

NUMBERS = re.compile(
    r"\[(?P<requests>\d+) requests? · (?P<tokens>\d+) tokens? in [\d.]+ s · [\d.]+ tokens/s"
    r" · first token after [\d.]+ s · peak (?P<blocks>\d+) blocks?"
    r"(?: · (?P<hits>\d+) of \d+ prompt tokens cached)?"
    r"(?: · (?P<preemptions>\d+) preemptions?)?(?: · (?P<failed>\d+) failed)?\]"
)


def mie(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The finished process; it must not have shown a traceback."""
    process = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env=ENVIRONMENT,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in process.stderr, process.stderr.decode()
    return process


def start(*arguments: str | Path, **streams: Any) -> subprocess.Popen[bytes]:
    """A running process with pipes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    settings = {"env": ENVIRONMENT, **pipes, **streams}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **settings)


def error_line(process: subprocess.CompletedProcess[bytes]) -> str:
    """The one line that a refused command leaves on standard error, with exit code 2."""
    assert process.returncode == 2, process.stderr.decode()
    assert process.stdout == b""
    (line,) = process.stderr.decode().splitlines()
    assert line.startswith("mie: error: ")
    return line
