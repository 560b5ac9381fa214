"""Measure how long a user waits for `import mie`, and for the first token of `mie generate`.

    python scripts/benchmark.py start [--rounds 7]

Each figure is the median over fresh processes and counts from their launch. The three figures are
Python alone, Python with `import mie`, and the first byte of the bundled model's text.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from bench.harness import ROOT, Spread, machine, user_environment

PROMPT = "Tell me a story about Mia the fox, the old mill and a silver bell."
COMMANDS = {
    "Python alone": ["-c", "print()"],
    "Python and `import mie`": ["-c", "import mie; print()"],
    "`mie generate`, first token": ["-m", "mie", "generate", "--temperature", "0", PROMPT],
}


def seconds_to_first_byte(arguments: list[str]) -> float:
    """Return the seconds until a fresh process writes to stdout."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=user_environment(),
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("benchmark.py start", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(argv).rounds
    print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    for title, arguments in COMMANDS.items():
        found = Spread.of(seconds_to_first_byte(arguments) for _ in range(rounds))
        print(f"{title}: {found.median:.3f} s ({found.least:.3f}–{found.most:.3f})")
