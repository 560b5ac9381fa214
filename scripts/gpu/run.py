"""Run the processes of the parts, and report how they ended."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
ROOT = SCRIPTS.parent


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a process ended. Without an exit code, its time was up."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that the process printed."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else "no output"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a part: "passed", "failed" or "skipped", and why."""

    status: str
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how the parts run."""

    directory: Path
    is_dry_run: bool

    def execute(
        self, command: Sequence[str | Path], seconds: float, env: Mapping[str, str] | None = None
    ) -> Done:
        """Run a command from the repository's root. End it and its children at the limit."""
        words = list(map(str, command))
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
            done = Done(exit_code=process.returncode, output=output)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            done = Done(exit_code=None, output=process.communicate()[0])
        with (self.directory / "gpu_check.log").open("a") as log:
            log.write(f"$ {' '.join(words)}\n{done.output}\nexit code: {done.exit_code}\n\n")
        return done

    def child(self, name: str) -> list[str | Path]:
        """Return the command of one of this script's own children."""
        dry_run = ["--dry-run"] if self.is_dry_run else []
        return [sys.executable, "-m", "gpu.check", "--child", name, *dry_run]


def python_path() -> str:
    """Return a PYTHONPATH that begins with this checkout and its scripts."""
    return os.pathsep.join(filter(None, [str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH")]))


def how_it_ended(done: Done, seconds: float) -> str:
    """Describe in one line how a process failed."""
    if done.exit_code is None:
        return f"its time was up ({seconds:.0f} s)"
    return f"exit code {done.exit_code}: {done.last_line[:300]}"
