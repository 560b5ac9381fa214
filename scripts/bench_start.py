"""Measure how long a user waits for `import mie`, and for the first token of `mie generate`.

    python scripts/bench_start.py [--rounds 7]

Each figure is the median over fresh processes and counts from their launch. The three figures are
Python alone, Python with `import mie`, and the first byte of the bundled model's text.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = "Tell me a story about Mia the fox, the old mill and a silver bell."
GENERATE = [sys.executable, "-m", "mie", "generate", "--temperature", "0", PROMPT]
ROOT = Path(__file__).resolve().parents[1]


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return a user's environment, without tuning and with cached bytecode, for a checkout."""
    tuned = re.compile("OPENBLAS_|OMP_|PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not tuned.match(k)}
    return kept | {"PYTHONPATH": str(root)}


def seconds_to_run(code: str, root: Path = ROOT) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(root), cwd=root)
    return time.perf_counter() - start


def seconds_to_first_token(root: Path = ROOT) -> float:
    start = time.perf_counter()
    with subprocess.Popen(
        GENERATE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(root),
        cwd=root,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def median(measure: Callable[[], float], rounds: int) -> str:
    times = [measure() for _ in range(rounds)]
    return f"{statistics.median(times):.3f} s ({min(times):.3f}–{max(times):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs, median of {rounds}")
    print("python alone            ", median(lambda: seconds_to_run("pass"), rounds))
    print("python and import mie   ", median(lambda: seconds_to_run("import mie"), rounds))
    print("mie generate, 1st token ", median(seconds_to_first_token, rounds))


if __name__ == "__main__":
    main()
