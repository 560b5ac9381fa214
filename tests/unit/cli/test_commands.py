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


@pytest.mark.parametrize(
    ("error", "raised"),
    [(subprocess.TimeoutExpired("x", 5.0), CommandError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=["takes too long", "interrupted"],
)
def test_a_command_that_is_given_up_ends_with_its_children(error, raised, tmp_path, monkeypatch):
    """The pipes close only when the child of the child has ended too."""
    sign = tmp_path / "begun"

    class Popen(subprocess.Popen[str]):
        """The error comes as soon as the command's child runs."""

        has_come = False

        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            if self.has_come:
                return super().communicate(input)
            while not sign.exists():
                time.sleep(0.01)  # yields the CPU
            self.has_come = True
            raise error

    monkeypatch.setattr(commands.subprocess, "Popen", Popen)
    child = f"import pathlib, signal; pathlib.Path({str(sign)!r}).touch(); signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    message = "gave no answer within 5 s" if raised is CommandError else None
    with pytest.raises(raised, match=message):
        run_command([sys.executable, "-c", code], timeout=5.0)
