"""Check and measure the GPU path on a machine with a GPU, in less than nine minutes.

    scripts/gpu_check --output DIR [--commit HASH] [--seconds 530] [--only PART ...]
    scripts/gpu_check --seconds 3600   on a machine with a slower CPU, such as a Jetson
    scripts/gpu_check --dry-run        run every part on the emulator, tiny

Each part runs in its own processes. Its time limit grows with the seconds for all. A part that
the total leaves no time for is skipped by name. After every part, DIR holds all results so far:
gpu_check.json, and gpu_check.md, a page for docs/gpu/. The output of the processes is in
gpu_check.log. The benchmarks add bench.json and bench.md, arrivals.json and arrivals.md. The script
needs mie's dependencies, CuPy and pytest. It imports mie from this checkout.

Exit codes: 0 if nothing failed, 1 if a part failed, 2 without CuPy or a device.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.children import CHILDREN, run_child
from gpu.page import beside_simulated, write_results
from gpu.parts import PARTS, SANITIZERS, Part, nvidia_smi
from gpu.run import ROOT, Outcome, Run

TOTAL_SECONDS = 530.0
BENCHMARK_SECONDS = 170.0
"""Seconds that the parts before the benchmark leave for it, at most half of all."""
MIN_SECONDS = 5.0
"""A part that has less time than this does not start."""


def check(run: Run, names: Sequence[str], seconds: float, state: dict[str, Any]) -> int:
    """Run the parts in order, write the results after each, and return the exit code."""
    end, parts = time.monotonic() + seconds, []
    times = max(1.0, seconds / TOTAL_SECONDS)
    for name in names:
        part, limit = PARTS[name]
        start = time.monotonic()
        kept = 0.0
        if "benchmark" in names and name not in ("environment", "benchmark"):
            kept = min(times * BENCHMARK_SECONDS, seconds / 2)
        outcome = run_part(part, run, min(times * limit, end - kept - start))
        parts.append({"name": name, "seconds": time.monotonic() - start, **asdict(outcome)})
        print(f"{name}: {outcome.status} {outcome.reason}".rstrip(), flush=True)
        if name == "environment":
            state |= outcome.details
        if name == names[-1]:
            state["nvidia_smi_after"] = nvidia_smi(run)
        write_results(run, state, parts)
        if name == "benchmark":
            values = {"is_dry_run": run.is_dry_run, "state": state, "parts": parts}
            print("\n".join(beside_simulated(values)), flush=True)
        if name == "environment" and outcome.status == "failed":
            print(outcome.reason, file=sys.stderr)
            return 2
    return 1 if any(part["status"] == "failed" for part in parts) else 0


def run_part(part: Part, run: Run, seconds: float) -> Outcome:
    """Return a part's outcome. An error of this script in one part does not stop the others."""
    if seconds < MIN_SECONDS:
        return Outcome(status="skipped", reason="no time left")
    try:
        return part(run, seconds)
    except Exception as error:
        return Outcome(status="failed", reason=f"gpu_check itself: {type(error).__name__}: {error}")


def commit(given: str | None) -> str:
    """Return the checkout's commit, and whether it was changed since."""
    if given:
        return given
    if not shutil.which("git") or not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of users, and of this script's own children (``--child``)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("gpu-check"))
    parser.add_argument("--commit", help="commit to name in the results (default: git's)")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for all parts")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS))
    parser.add_argument(
        "--dry-run", action="store_true", help="run on the emulator, tiny and untimed"
    )
    parser.add_argument("--child", choices=[*CHILDREN, "sanitized"], help=argparse.SUPPRESS)
    parser.add_argument("--tool", choices=SANITIZERS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the results."""
    args = parse_arguments(argv)
    if args.child:
        return run_child(args.child, args.tool, args.dry_run)
    directory = args.output.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    names = (f"{name}.{kind}" for name in ("bench", "arrivals") for kind in ("json", "md"))
    for name in ("gpu_check.log", *names):  # left by an earlier run
        (directory / name).unlink(missing_ok=True)
    state = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(args.commit),
    }
    parts = [name for name in PARTS if name in args.only]
    run = Run(directory=directory, is_dry_run=args.dry_run)
    return check(run, parts, args.seconds, state)


if __name__ == "__main__":
    sys.exit(main())
