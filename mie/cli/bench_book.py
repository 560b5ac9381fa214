"""Implement ``mie bench NAME`` and ``mie bench all``, the chapters of the book of benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mie.errors import ConfigError
from mie.sim.book import TITLES

_DESCRIPTION = """\
Run a chapter of the book of benchmarks, and print its results and findings.

All chapters except "engine" run the real scheduler and allocator on a simulated clock, so their
results are the same on every machine. With --output-dir each chapter writes NAME.json there, and
NAME.png if matplotlib is installed, and rewrites README.md from all results in that directory.
"""


def add_book(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add a benchmark for each chapter, and ``all``."""
    for name, title in TITLES.items():
        _add(subparsers, name, (name,), f"book: {title.lower()}")
    _add(subparsers, "all", tuple(TITLES), "book: every chapter, in less than ten minutes")


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    chapters: Sequence[str],
    text: str,
) -> None:
    parser = subparsers.add_parser(
        name,
        help=text,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scale",
        choices=("full", "small"),
        default="full",
        help="small gives a first look in seconds (default: full)",
    )
    parser.add_argument("--output-dir", metavar="DIR", help="directory for JSON, PNG and README.md")
    parser.add_argument(
        "--summary",
        metavar="FILE",
        help="Markdown file above DIR whose summary of the book is updated",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=partial(_run, chapters))


def _run(chapters: Sequence[str], args: argparse.Namespace) -> int:
    from mie.sim.book import report

    if args.summary is not None and args.output_dir is None:
        raise ConfigError("--summary needs --output-dir")
    directory = None if args.output_dir is None else Path(args.output_dir)
    if directory is not None:  # fail before the measurement if the directory cannot be written
        directory.mkdir(parents=True, exist_ok=True)
        if args.summary is not None:
            report.check_summary(Path(args.summary), directory)
    can_plot = directory is not None and _can_plot()
    results = {}
    for name in chapters:
        start = time.perf_counter()
        results[name] = result = report.run_chapter(name, args.scale)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        if not args.json:
            print(f"## {TITLES[name]}\n\n{_place(result)}\n\n{report.section(result)}", flush=True)
        if directory is not None:
            report.write_json(result, directory)
            if can_plot:
                report.write_png(result, directory)
    if args.json:
        marked = {
            name: {"simulated": _is_simulated(result), **result} for name, result in results.items()
        }
        print(json.dumps(marked, indent=1, ensure_ascii=False))
    if directory is not None:
        report.write_page(directory)
        if args.summary is not None:
            report.update_summary(Path(args.summary), directory)
    return 0


def _is_simulated(result: Mapping[str, Any]) -> bool:
    return bool(result["benchmark"] != "engine")


def _place(result: Mapping[str, Any]) -> str:
    """Return a sentence that says whether a chapter is simulated, and on what."""
    settings = result["settings"]
    if not _is_simulated(result):
        return "Measured on this machine."
    if "device" in settings:
        return f"Simulated: {settings['model']} on {settings['device']}."
    return "Simulated: the scheduler and the allocator are real, and no model runs."


def _can_plot() -> bool:
    from mie.sim.book.plots import require_matplotlib

    try:
        require_matplotlib()
    except ConfigError as error:
        print(f"mie: PNG skipped: {error}", file=sys.stderr)
        return False
    return True
