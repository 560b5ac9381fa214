"""Implement ``mie trace``: the decisions of scheduler and allocator, from an event log."""

import argparse
import gzip
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from mie.base.arithmetic import ceil_div
from mie.base.files import replacing
from mie.base.reprs import count
from mie.errors import ConfigError, RequestError, TraceError
from mie.events import Segment, Summary, read_log, summary_of
from mie.events.replay import at
from mie.lab.trace_blocks import percent, render_blocks
from mie.lab.trace_perfetto import write_timeline
from mie.lab.trace_request import story_of
from mie.page.assets import RECORDED_RUNS, EmbeddedRun, page_html
from mie.page.cells import NodeText
from mie.page.recording import Recording

MAX_ROWS = 40
"""Default number of rows in the table. The help has it, too."""


def run(args: argparse.Namespace) -> int:
    """Print the requested view, and return 0."""
    if args.every is not None and args.every < 1:
        raise ConfigError(f"--every must be at least 1; got {args.every}")
    if args.model is not None and not (args.html or args.page or args.request):
        raise ConfigError("--model belongs to --html, --page and --request; leave it out")
    if args.file is None:
        if args.html is None or args.model is not None:
            raise ConfigError("FILE is missing; give an event log (--trace of mie generate)")
        runs = [EmbeddedRun(name=x.name, title=x.title, gzip=x.compressed()) for x in RECORDED_RUNS]
        return _write_html(args, runs)
    segments = _noting_a_cut(args.file)
    if args.step is not None:
        print(render_blocks(at(segments, args.step)))
    elif args.request is not None:
        decode = None if args.model is None else _decoder(args.model)
        for line in story_of(segments, args.request, decode):
            print(line)
    elif args.perfetto is not None:
        with replacing(args.perfetto, "--perfetto", args.file) as file:
            num_events = write_timeline(segments, file)
        print(f"{args.perfetto}: {count(num_events, 'event')}; open it at https://ui.perfetto.dev")
    elif args.html is not None:
        name = Path(args.file).name
        content = "".join(_page_records(segments, name, args.model)).encode()
        run = EmbeddedRun(name=name, title=name, gzip=gzip.compress(content, mtime=0))
        return _write_html(args, [run])
    elif args.page is not None:
        records = _page_records(segments, Path(args.file).name, args.model)
        with replacing(args.page, "--page", args.file) as file:
            file.writelines(records)
        print(f"{args.page}: {count(len(records), 'record')}; drop it on a page of mie")
    else:
        for line in _table(segments, 1 if args.all else args.every):
            print(line)
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


# The web page.


def _write_html(args: argparse.Namespace, runs: Sequence[EmbeddedRun]) -> int:
    page = page_html(runs)
    with replacing(args.html, "--html", args.file) as file:
        file.write(page)
    print(f"{args.html}: {len(page.encode()) / 1000:,.0f} kB; open it in a browser")
    return 0


def _page_records(segments: Iterable[Segment], name: str, model: str | None) -> list[str]:
    """Return the page's records of a log, one a line, and note on standard error any that lack."""
    recording = Recording(segments, NodeText(None if model is None else _decoder(model)))
    if recording.num_dropped:
        print(
            f"mie: note: the first {count(recording.num_dropped, 'step')} are left out; a page "
            "holds about the last 20,000",
            file=sys.stderr,
        )
    return [line + "\n" for line in recording.lines(name)]


def _decoder(model: str) -> Callable[[Sequence[int]], str]:
    from mie.checkpoint.locate import locate_model  # they load slowly
    from mie.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(locate_model(model, needs_weights=False), None)

    def decode(token_ids: Sequence[int]) -> str:
        try:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        except RequestError as error:
            raise TraceError(f"the log is not of the model {model}: {error}") from error

    return decode


# The table.

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


def _table(segments: Iterator[Segment], every: int | None) -> Iterator[str]:
    """Yield the lines of the table, with a row for ``every`` steps, or at most `MAX_ROWS`."""
    first = next(segments)
    pool, numbers = first.snapshot, {number for number, _ in first.snapshot["sequences"]}
    steps: list[Summary] = []
    num_hit = num_read = 0
    for segment in chain([first], segments):
        for record in (record for step in [*segment.steps, segment.rest] for record in step):
            match record:
                case ("add", _, int(number), *_):
                    numbers.add(number)
                case ("hit", _, _, int(num_full), int(num_partial), _):
                    num_hit += num_full + num_partial
                case ("read", _, _, int(num_tokens)):
                    num_read += num_tokens
        steps += map(summary_of, segment.steps)
    num_blocks, block_size = pool["num_blocks"], pool["block_size"]
    num_host = pool["num_host_blocks"]
    host = f", and {count(num_host, 'block')} on the host" if num_host else ""
    every = every or max(1, ceil_div(len(steps), MAX_ROWS))
    rows = f"; a row covers {every} steps" if every > 1 else ""
    yield f"{count(num_blocks, 'block')} of {count(block_size, 'slot')}{host}{rows}"
    yield ""
    yield _line([*_WIDTHS])
    for start in range(0, len(steps), every):
        yield _line(_row(steps[start : start + every], num_blocks, block_size))
    yield ""
    num_tokens = _sum(steps, "num_prefill_tokens") + _sum(steps, "num_decode_tokens")
    peak = max((step["num_blocks_used"] for step in steps), default=0)
    totals = [
        count(len(steps), "step"),
        count(len(numbers), "request"),
        f"{count(num_tokens, 'token')} computed, {num_hit:,} hit",
        *([f"{num_read:,} read from a disk"] if num_read else []),
        count(_sum(steps, "num_preempted"), "preemption"),
        f"peak {percent(peak, num_blocks)}",
    ]
    yield f"[{' · '.join(totals)}]"


def _row(steps: Sequence[Summary], num_blocks: int, block_size: int) -> list[object]:
    """Return the cells of consecutive steps: sums of their work, and the state after them."""
    last = steps[-1]
    used, saved = last["num_blocks_used"], last["num_blocks_saved"]
    return [
        *(last["step"], last["num_running"], last["num_waiting"]),
        *(_sum(steps, "num_prefill_tokens"), _sum(steps, "num_decode_tokens")),
        percent(used, num_blocks),
        percent(last["num_slots_empty"], used * block_size),
        percent(saved, used + saved),
        *(_sum(steps, "num_preempted"), _sum(steps, "num_finished")),
    ]


def _sum(steps: Sequence[Summary], name: str) -> int:
    return sum(step[name] for step in steps)


def _line(cells: Sequence[object]) -> str:
    pairs = zip(cells, _WIDTHS.values(), strict=True)
    return " ".join(f"{cell!s:>{width}}" for cell, width in pairs)
