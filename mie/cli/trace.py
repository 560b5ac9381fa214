"""Implement ``mie trace``: what the scheduler and the allocator did, from an event log."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mie.arithmetic import ceil_div
from mie.cli.trace_blocks import render_blocks
from mie.cli.trace_page import write_html, write_records
from mie.cli.trace_perfetto import write_perfetto
from mie.cli.trace_request import request_lines
from mie.cli.trace_text import percent
from mie.errors import ConfigError
from mie.events import Segment, Snapshot, Summary, read_log, summary_of
from mie.replay import at
from mie.reprs import count

MAX_ROWS = 40
"""Default number of rows in the table."""

_EPILOG = f"""\
The table has at most {MAX_ROWS} rows. A row covers the steps since the previous row. Prefill and
decode tokens, preemptions and finished requests are sums, and other columns describe the last step.

  KV      fraction of all blocks that are in a table
  waste   fraction of empty slots in them
  shared  fraction of blocks that sharing saves

The last line counts computed tokens, and prompt tokens that hit the prefix cache.

examples:
  mie trace run.jsonl                        the run as a table
  mie trace run.jsonl --all                  a row for each step
  mie trace run.jsonl --step 120             the block map after step 120
  mie trace run.jsonl --request 7            what happened to request 7, and why
  mie trace run.jsonl --perfetto trace.json  a timeline for https://ui.perfetto.dev
  mie trace run.jsonl --html run.html        a web page in one file, to look at and to send
  mie trace --html demo.html                 the same page with two runs that come with mie
  grep '"event":"preempt"' run.jsonl         the log is JSON lines; see docs/tracing.md
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie trace`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "trace",
        help="show what the scheduler did in a run",
        description="Show what the scheduler and the block allocator did, from an event log.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="event log (JSON lines); --html needs none, and shows two runs that come with mie",
    )
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--all", action="store_true", help="show a row for each step")
    views.add_argument("--every", type=int, metavar="N", help="show a row for every N steps")
    views.add_argument("--step", type=int, metavar="K", help="show the block map after step K")
    views.add_argument("--request", metavar="ID", help="show the events of one request")
    views.add_argument("--perfetto", metavar="OUT", help="write a timeline for Perfetto or Chrome")
    views.add_argument("--html", metavar="OUT", help="write a web page that shows the run")
    views.add_argument(
        "--page", metavar="OUT", help="write the run for a web page without a server to open"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="for --html and --page: the model of the run, whose tokenizer gives the text of "
        "blocks (default: their token ids)",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the requested view, and return 0.

    Raises:
        ConfigError: an argument is out of range.
        TraceError: the file is not an event log, contradicts itself, or lacks the step or request.
        ModelError: --model names no model.
    """
    if args.every is not None and args.every < 1:
        raise ConfigError(f"--every must be at least 1; got {args.every}")
    is_for_page = args.html is not None or args.page is not None
    if args.model is not None and not is_for_page:
        raise ConfigError("--model belongs to --html and --page; leave it out")
    if args.file is None:
        if args.html is None or args.model is not None:
            raise ConfigError("FILE is missing; give an event log (--trace of mie generate)")
        return _write_html(args)
    segments = _noting_a_cut(args.file)
    if args.step is not None:
        print(render_blocks(at(segments, args.step)))
    elif args.request is not None:
        for line in request_lines(segments, args.request):
            print(line)
    elif args.perfetto is not None:
        num_events = write_perfetto(segments, Path(args.perfetto), source=Path(args.file))
        print(f"{args.perfetto}: {count(num_events, 'event')}; open it at https://ui.perfetto.dev")
    elif args.html is not None:
        return _write_html(args)
    elif args.page is not None:
        source, target = Path(args.file), Path(args.page)
        num_records = write_records(segments, target, source=source, model=args.model)
        print(f"{args.page}: {count(num_records, 'record')}; drop it on a page of mie")
    else:
        every = 1 if args.all else args.every
        for line in _table(_Run(segments), every):
            print(line)
    return 0


def _write_html(args: argparse.Namespace) -> int:
    segments = None if args.file is None else _noting_a_cut(args.file)
    source = None if args.file is None else Path(args.file)
    num_bytes = write_html(segments, Path(args.html), source=source, model=args.model)
    print(f"{args.html}: {num_bytes / 1000:,.0f} kB; open it in a browser")
    return 0


def _noting_a_cut(path: str) -> Iterator[Segment]:
    """Yield the segments of a file, and print a note on standard error if its end is missing."""
    for segment in read_log(path):
        if segment.is_cut:
            print(
                f"mie: note: {path} ends in the middle of a line, as a killed run leaves it; "
                "the rest is shown",
                file=sys.stderr,
            )
        yield segment


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the table: one step or several."""

    step: int
    running: int
    waiting: int
    prefill: int
    decode: int
    used: int
    saved: int
    empty: int
    preempted: int
    done: int

    @classmethod
    def of(cls, summary: Summary) -> _Row:
        return cls(
            step=summary["step"],
            running=summary["num_running"],
            waiting=summary["num_waiting"],
            prefill=summary["num_prefill_tokens"],
            decode=summary["num_decode_tokens"],
            used=summary["num_blocks_used"],
            saved=summary["num_blocks_saved"],
            empty=summary["num_slots_empty"],
            preempted=summary["num_preempted"],
            done=summary["num_finished"],
        )


def _merged(rows: Sequence[_Row]) -> _Row:
    """Return the last row, with the sums over all rows."""
    return replace(
        rows[-1],
        prefill=sum(row.prefill for row in rows),
        decode=sum(row.decode for row in rows),
        preempted=sum(row.preempted for row in rows),
        done=sum(row.done for row in rows),
    )


class _Run:
    """The facts of a log that the table shows."""

    def __init__(self, segments: Iterator[Segment]) -> None:
        self.rows: list[_Row] = []
        self.num_hit_tokens = 0
        self._requests: set[int] = set()
        for segment in segments:
            if not self.rows:
                self.snapshot: Snapshot = segment.snapshot
                self._requests.update(number for number, _ in segment.snapshot["sequences"])
            for records in [*segment.steps, segment.rest]:
                for record in records:
                    self._note(record)
            self.rows += [_Row.of(summary_of(records)) for records in segment.steps]

    def _note(self, record: tuple[object, ...]) -> None:
        match record:
            case ("add", _, int(number), *_):
                self._requests.add(number)
            case ("hit", _, _, int(num_full), int(num_partial), _):
                self.num_hit_tokens += num_full + num_partial

    @property
    def num_requests(self) -> int:
        return len(self._requests)


_WIDTHS = {
    "step": 6,
    "running": 7,
    "waiting": 7,
    "prefill": 7,
    "decode": 6,
    "KV": 5,
    "waste": 5,
    "shared": 6,
    "preempted": 9,
    "done": 5,
}
"""The columns."""


def _table(run: _Run, every: int | None) -> Iterator[str]:
    num_blocks, block_size = run.snapshot["num_blocks"], run.snapshot["block_size"]
    num_host = run.snapshot["num_host_blocks"]
    host = f", and {count(num_host, 'block')} on the host" if num_host else ""
    yield f"{count(num_blocks, 'block')} of {count(block_size, 'slot')}{host}"
    yield ""
    yield _line([*_WIDTHS])
    every = every or max(1, ceil_div(len(run.rows), MAX_ROWS))
    for start in range(0, len(run.rows), every):
        row = _merged(run.rows[start : start + every])
        yield _line(
            [
                *(row.step, row.running, row.waiting, row.prefill, row.decode),
                percent(row.used, num_blocks),
                percent(row.empty, row.used * block_size),
                percent(row.saved, row.used + row.saved),
                *(row.preempted, row.done),
            ]
        )
    yield ""
    yield _totals(run, num_blocks)


def _line(cells: Sequence[object]) -> str:
    pairs = zip(cells, _WIDTHS.values(), strict=True)
    return " ".join(f"{cell!s:>{width}}" for cell, width in pairs)


def _totals(run: _Run, num_blocks: int) -> str:
    num_tokens = sum(row.prefill + row.decode for row in run.rows)
    numbers = [
        count(len(run.rows), "step"),
        count(run.num_requests, "request"),
        f"{count(num_tokens, 'token')} computed, {run.num_hit_tokens:,} hit",
        count(sum(row.preempted for row in run.rows), "preemption"),
        f"peak {percent(max((row.used for row in run.rows), default=0), num_blocks)}",
    ]
    return f"[{' · '.join(numbers)}]"
