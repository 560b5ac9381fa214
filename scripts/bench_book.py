"""Run chapters of the book of benchmarks, and print their findings.

    python scripts/bench_book.py [NAME ...] [--scale small]
    python scripts/bench_book.py --output-dir docs/book --summary docs/benchmarks.md

All chapters except "engine" run the real scheduler and allocator on a simulated clock, so their
results are the same on every machine. Without a name, every chapter runs, in less than ten minutes.
With --output-dir each chapter writes NAME.json there, and NAME.png if matplotlib is installed, and
README.md is written again from all results in that directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from book import report


def main() -> None:
    """Run the chapters that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"chapters: {', '.join(report.CHAPTERS)}")
    add("--scale", choices=("full", "small"), default="full", help="small: a look within seconds")
    add("--output-dir", type=Path, metavar="DIR", help="directory for JSON, PNG and README.md")
    add("--summary", type=Path, metavar="FILE", help="Markdown file with the summary of DIR")
    args = parser.parse_args()
    for name in set(args.names) - set(report.CHAPTERS):
        parser.error(f"no chapter is named {name!r}; there are {', '.join(report.CHAPTERS)}")
    if args.summary and not args.output_dir:
        parser.error("--summary needs --output-dir")
    can_plot = importlib.util.find_spec("matplotlib") is not None
    for name in args.names or report.CHAPTERS:
        start = time.perf_counter()
        result = report.run_chapter(name, args.scale)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        print(f"## {report.CHAPTERS[name].TITLE}\n\n{report.section(result)}\n", flush=True)
        if args.output_dir:
            report.write_json(result, args.output_dir)
            if can_plot:
                report.write_png(result, args.output_dir)
    if args.output_dir:
        report.write_page(args.output_dir)
        if not can_plot:
            print("PNG skipped: plots need matplotlib (pip install mie[plot])", file=sys.stderr)
        if args.summary:
            report.update_summary(args.summary, args.output_dir)


if __name__ == "__main__":
    main()
