"""Send signals to ``mie`` at chosen lines, from the first line of the program on."""

import os
import signal
import sys
from pathlib import Path

from command_line import COMMAND, ENVIRONMENT, mie, python
from deadlines import run

PROGRAM = """
import os, signal, sys

tests, number, num_cases = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1))
sys.path.insert(0, tests)
from interrupts import Injector
import mie.__main__ as program

def run(line):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    injector = Injector(lambda: signal.raise_signal(number), line)
    code = injector.run(program.main)
    if not line:
        with open("lines", "w") as file:
            print(injector.num_lines, file=file)
    sys.exit(code)

def code_at(line):
    child = os.fork() or run(line)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert code_at(0) == 0
with open("lines") as file:
    num_lines = int(file.read())
os.unlink("lines")
# Most lines import modules, and the last few are of the command itself.
for line in [50, *(num_lines - num_lines // 2**case for case in range(1, num_cases))]:
    print(code_at(line), file=sys.stderr, flush=True)
"""
"""Runs a command in forks that have imported nothing, each with a signal at another line."""


def strike(folder: Path, number: int, num_cases: int, *arguments: str) -> list[str]:
    """Return the lines on standard error: of each case the messages, and the exit code."""
    words = [Path(__file__).parents[1], number, num_cases, *arguments]
    done = python("-W", "error", "-c", PROGRAM, *words, cwd=folder, env=ENVIRONMENT)
    return done.stderr.splitlines()


def test_an_interrupt_at_any_line_of_a_command_ends_it_with_130(tmp_path: Path) -> None:
    lines = strike(tmp_path, signal.SIGINT, 8, "learn", "hint", "1")
    assert [line for line in lines if line != "mie: interrupted"] == ["130"] * 8
    assert 2 < lines.count("mie: interrupted") < 8, (
        "some interrupts come while modules are imported"
    )


def test_a_terminated_command_leaves_no_half_written_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert mie("generate", "--max-tokens", "2", "--trace", log, "Hi").returncode == 0
    lines = strike(tmp_path, signal.SIGTERM, 8, "trace", str(log), "--perfetto", "out")
    assert lines == ["143"] * 8
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "out"}


SWALLOWS = """
import os, signal

try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise ImportError("as extension modules do") from None
"""


def test_an_interrupt_of_an_import_comes_when_the_import_has_ended(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(SWALLOWS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run([*COMMAND, "digest"], env={**ENVIRONMENT, "PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (130, "mie: interrupted\n")
