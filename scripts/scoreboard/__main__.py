"""Run the suites of the scoreboard. The options are in --help."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench.harness import processor
from .page import Results, inputs_table, read_results, worse, write_results
from .runner import Runner, code_digest, read_suites, read_table

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run suites, write the page, and return 1 if a row is worse than on the page before."""
    suites = read_suites()
    options = _parser(list(suites)).parse_args(argv)
    build = ROOT / "build/scoreboard"
    output = options.output_dir or (build if options.quick else ROOT / "docs")
    inputs = read_table()
    runner = Runner(
        folders=[options.data, options.models],
        build=build / ("quick" if options.quick else "full"),
        is_quick=options.quick,
        is_again=options.again,
        inputs=inputs,
        code=code_digest(),
    )
    facts = {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
    }
    old, new = read_results(ROOT / "docs"), Results()
    for name in () if options.page else options.only or suites:
        if options.get:
            runner.get_inputs(suites[name])
        new[name] = {**facts, "rows": [vars(row) for row in runner.rows(name, suites[name])]}
        write_results(output, new, suites, inputs_table(inputs))
    write_results(output, new, suites, inputs_table(inputs))
    print(f"{output / 'scoreboard.md'} is written", file=sys.stderr)
    for line in (found := worse(new, old)):
        print(f"worse than before: {line}", file=sys.stderr)
    return 1 if found else 0


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.scoreboard", description="Run public suites on mie."
    )
    parser.add_argument(
        "--quick", action="store_true", help="run a part of each suite, and write no page in docs/"
    )
    parser.add_argument(
        "--only", action="append", choices=names, metavar="SUITE",
        help=f"run this suite; may be repeated: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--page", action="store_true", help="write the page again from its rows, and run nothing"
    )
    parser.add_argument(
        "--get", action="store_true",
        help="first put missing inputs that GitHub or a package index has into the folder of data",
    )  # fmt: skip
    parser.add_argument(
        "--again", action="store_true", help="compute rows again that an earlier run kept"
    )
    for kind in ("data", "models"):
        variable = f"MIE_SCOREBOARD_{kind.upper()}"
        default = Path(os.environ.get(variable, ROOT / "build/scoreboard" / kind))
        parser.add_argument(
            f"--{kind}", type=Path, default=default, metavar="DIR",
            help=f"folder of {kind} (default: ${variable}, or build/scoreboard/{kind})",
        )  # fmt: skip
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR",
        help="folder of scoreboard.json and scoreboard.md (default: docs)",
    )  # fmt: skip
    return parser


def _commit() -> str:
    """Return the commit, with "+" if the checkout has changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
