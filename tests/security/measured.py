"""Measure the cost of hostile input: CPU seconds and peak memory of a child process.

CPU seconds do not depend on how busy the machine is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadlines import PATIENCE

MAX_CPU_SECONDS = 4.0
MAX_BYTES = 150_000_000
"""Limits of the cost of untrusted input before it is refused, above the idle process."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The outcome of a case."""

    cpu_seconds: float
    peak_bytes: int
    """Peak memory above the idle process."""
    error: str | None = None
    """The class of the exception, "killed", or "hung"."""
    is_ours: bool = False
    """Whether the exception is a `MieError`."""
    message: str = ""
    traceback: str = ""
    code: int | None = None
    """The exit code of a command line, with its output."""
    stdout: str = ""
    stderr: str = ""

    def check_cost(self) -> None:
        """Fail if the case exceeded a limit, or failed with an error that is not one of mie."""
        assert self.error is None or self.is_ours, f"{self.error}: {self.message}\n{self.traceback}"
        assert "Traceback" not in self.stderr, self.stderr
        assert self.cpu_seconds < MAX_CPU_SECONDS, f"{self.cpu_seconds:.2f} s of CPU time"
        assert self.peak_bytes < MAX_BYTES, f"{self.peak_bytes / 1e6:.0f} MB"

    def check_refused(self, *named: str) -> None:
        """Fail unless the case was refused with a message that names all of ``named``."""
        self.check_cost()
        text = self.message + self.stderr
        if self.code is None:
            assert self.error is not None, f"not refused: {self.stdout}"
        else:
            assert self.code == 2, f"exit code {self.code}: {self.stdout}"
            assert text.startswith("mie: error: "), text
            assert text.count("\n") == 1, text
        assert len(text) < 2000, f"the message has {len(text)} characters"
        assert text.rstrip("\n").isprintable(), text
        for name in named:
            assert name in text, text


class Zygote:
    """A warm process whose children run the cases; see ``zygote.py``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "80"},
        )

    def run(self, action: str, *arguments: Any) -> Measured:
        """Run the case ``action`` of ``zygote.py``, and return its outcome."""
        return Measured(**self._outcome(action, *map(_plain, arguments)))

    def run_each(self, commands: Sequence[Sequence[str | Path]]) -> list[Measured]:
        """Run command lines in one child, and return the outcome of each.

        The peak memory is that of the child, which is an upper bound for each command.
        """
        outcome = self._outcome("cli_each", *([_plain(word) for word in line] for line in commands))
        if "outcomes" not in outcome:
            return [Measured(**outcome)]
        peak = outcome["peak_bytes"]
        return [Measured(**each, peak_bytes=peak) for each in outcome["outcomes"]]

    def _outcome(self, action: str, *arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([action, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the zygote is gone"
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=PATIENCE)


def _plain(argument: object) -> object:
    return str(argument) if isinstance(argument, Path) else argument
