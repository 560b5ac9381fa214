"""Test running a command: its output, and each reason why it may print nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mie.base import commands
from mie.base.commands import CommandError, run_command


def test_a_command_may_answer_fail_crash_hang_or_be_missing(tmp_path: Path) -> None:
    def python(code: str, timeout: float = 60.0) -> str:
        return run_command([sys.executable, "-c", code], timeout=timeout)

    assert python("print('é')") == "é\n"
    with pytest.raises(CommandError, match=r"^ended with code 3: bad$"):
        python("import sys; print('bad', file=sys.stderr); sys.exit(3)")
    with pytest.raises(CommandError, match=r"^ended with code 1: no message$"):
        python("raise SystemExit(1)")
    with pytest.raises(CommandError, match=r"^was ended by signal SIGABRT$"):
        python("import os; os.abort()")
    with pytest.raises(CommandError, match="is not installed"):
        run_command(["no-such-command-here"])
    with pytest.raises(CommandError, match="cannot be run"):
        run_command([str(tmp_path)])


def test_a_command_gets_the_environment_and_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "red")
    code = "import os, sys; print(os.environ.get('COLOUR'), repr(sys.stdin.read()))"
    assert run_command([sys.executable, "-c", code]) == "red ''\n"
    environment = {**os.environ, "COLOUR": "blue"}
    assert run_command([sys.executable, "-c", code], environment=environment) == "blue ''\n"


def raise_when_begun(monkeypatch: pytest.MonkeyPatch, sign: Path, error: BaseException) -> None:
    """Raise an error from the next command as soon as the file ``sign`` exists."""

    class Popen(subprocess.Popen[str]):
        has_come = False

        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            if self.has_come:
                return super().communicate(input, timeout)
            while not sign.exists():
                time.sleep(0.01)  # yields the CPU
            self.has_come = True
            raise error

    monkeypatch.setattr(commands.subprocess, "Popen", Popen)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(subprocess.TimeoutExpired("x", 5.0), CommandError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["takes too long", "interrupted"],
)
def test_a_command_that_is_given_up_ends_with_its_children(error, raised, tmp_path, monkeypatch):
    """The pipes close only when the child of the child has ended too. It ignores Ctrl-C."""
    sign = tmp_path / "begun"
    raise_when_begun(monkeypatch, sign, error)
    monkeypatch.setattr(commands, "GRACE", 0.1)
    child = (
        "import pathlib, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"pathlib.Path({str(sign)!r}).touch(); signal.pause()"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    message = "gave no answer within 5 s" if raised is CommandError else None
    with pytest.raises(raised, match=message):
        run_command([sys.executable, "-c", code], timeout=5.0)


def test_a_command_that_is_given_up_ends_the_commands_that_it_runs(tmp_path, monkeypatch):
    """They have sessions of their own, as the compiler has that ``mie doctor`` waits for."""
    sign, ended = tmp_path / "begun", tmp_path / "ended"
    raise_when_begun(monkeypatch, sign, subprocess.TimeoutExpired("x", 5.0))
    monkeypatch.setattr(commands, "GRACE", 60.0)
    inner = (
        f"import pathlib, signal\npathlib.Path({str(sign)!r}).touch()\n"
        f"try: signal.pause()\nfinally: pathlib.Path({str(ended)!r}).touch()"
    )
    outer = (
        "import sys; from mie.base.commands import run_command; "
        f"run_command([sys.executable, '-c', {inner!r}])"
    )
    with pytest.raises(CommandError, match="gave no answer"):
        run_command([sys.executable, "-c", outer], timeout=5.0)
    assert ended.exists()
