"""Measure how long a user waits for `import mie`, and for the first token of `mie generate`.

    python scripts/benchmark.py start [--rounds 7] [--model MODEL ...]

Each figure is the median over fresh processes and counts from their launch. The figures are
Python alone, Python with `import mie`, and the first byte of the bundled model's text and of the
text of each ``--model``. For a model, the least CPU time of as many more processes follows, from
the launch to the end. Other programs change it less than they change the other figures.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from bench.harness import ROOT, Spread, machine, parser_of, user_environment

PROMPT = "Tell me a story about Mia the fox, the old mill and a silver bell."
COMMANDS = {
    "Python alone": ["-c", "print()"],
    "Python and `import mie`": ["-c", "import mie; print()"],
    "`mie generate`, first token": ["-m", "mie", "generate", "--temperature", "0", PROMPT],
}


def of_model(model: str) -> list[str]:
    """Return the arguments of Python for the first token of a model."""
    options = ["--temperature", "0", "--max-tokens", "1"]
    return ["-m", "mie", "generate", "--model", model, *options, PROMPT]


def launched(arguments: list[str], stdout: int) -> subprocess.Popen[bytes]:
    """Start a fresh process of Python."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env=user_environment(),
        cwd=ROOT,
    )


def cpu_seconds(arguments: list[str]) -> float:
    """Return the CPU time of a fresh process that runs to the end."""
    with launched(arguments, subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def seconds_to_first_byte(arguments: list[str]) -> float:
    """Return the seconds until a fresh process writes to stdout."""
    start = time.perf_counter()
    with launched(arguments, subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = parser_of("start", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", action="append", default=[], help="a model or a GGUF file")
    args = parser.parse_args(argv)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    of_models = {f"`{model}`, first token": of_model(model) for model in args.model}
    for title, arguments in {**COMMANDS, **of_models}.items():
        found = Spread.of(seconds_to_first_byte(arguments) for _ in range(args.rounds))
        line = f"{title}: {found.median:.3f} s ({found.least:.3f}–{found.most:.3f})"
        if title in of_models:
            least = min(cpu_seconds(arguments) for _ in range(args.rounds))
            line += f", {least:.3f} s of CPU time"
        print(line)
