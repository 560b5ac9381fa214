"""Give the benchmarks a user's environment, child processes, medians, tables and reports.

It needs nothing but Python, because engines of other projects run under their own interpreters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
ROOT = SCRIPTS.parent
TUNING = re.compile(
    "OPENBLAS_|MKL_|OMP_|GOMP_|KMP_|GOTO_|BLIS_|ONEDNN_|DNNL_|CT2_|ATEN_|GGML_"
    "|PYTHONDONTWRITEBYTECODE"
)


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of a benchmark. The text is in its help."""
    return argparse.ArgumentParser(
        f"benchmark.py {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def user_environment() -> dict[str, str]:
    """Return the environment without variables that tune a library, for this checkout."""
    kept = {name: value for name, value in os.environ.items() if not TUNING.match(name)}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPTS}"}


def untune() -> None:
    """Start this script again without variables that tune a library, because it has read them."""
    environment = user_environment()
    if os.environ.keys() - environment.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def run_child(
    module: str,
    request: object = None,
    *,
    arguments: Sequence[str] = (),
    python: str = sys.executable,
    seconds: float | None = None,
    **variables: str,
) -> Any:
    """Run a module in a fresh process, and return the JSON of its last line.

    The process reads ``request`` as JSON from stdin. ``variables`` are set in its environment.

    Raises:
        RuntimeError: it failed, or was not done after ``seconds``. The message has the last line
            that it printed to stderr.
    """
    try:
        done = subprocess.run(
            [python, "-m", module, *arguments],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**user_environment(), **variables},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{module} was not done after {seconds:.0f} s") from None
    if done.returncode:
        [*_, last] = ["silent", *done.stderr.strip().splitlines()]
        raise RuntimeError(f"{module} ended with {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int | None:
    """Return the peak resident memory of this process, if Linux tells it.

    `getrusage` would include the parent's memory before the process became another program.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return None if found is None else int(found[1]) << 10


def processor() -> str:
    """Return the processor's name with its family and model, if Linux tells them."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    name = re.search(r"model name\s*:\s*(.*)", info)
    numbers = re.search(r"cpu family\s*:\s*(\d+)\s*model\s*:\s*(\d+)", info)
    text = name[1] if name else platform.machine()
    return text + (f" (family {numbers[1]}, model {numbers[2]})" if numbers else "")


def machine() -> dict[str, Any]:
    """Return the facts about the machine that figures hold for."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cpus": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "load average at the start": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class Spread:
    """A median with the least and the largest value."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.least)}–{number(self.most)})"


def number(value: float) -> str:
    """Return a number with three or four digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def in_turn(items: Iterable[Any], round_number: int) -> list[Any]:
    """Return the items in the order of a round. Every other round has the reverse order."""
    ordered = list(items)
    return ordered if round_number % 2 == 0 else ordered[::-1]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def write_report(prefix: str | None, values: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Print the lines, and write PREFIX.json and PREFIX.md if there is a prefix."""
    text = "\n".join(lines)
    print(text, flush=True)
    if prefix:
        Path(f"{prefix}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        Path(f"{prefix}.md").write_text(text + "\n", encoding="utf-8")
