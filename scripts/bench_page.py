"""Measure what the web page costs the engine while three pages are open.

    python scripts/bench_page.py [--pages 3] [--streams 8] [--tokens 200] [--rounds 20]

A round is two turns that serve the same requests, one with no page and one with open pages. The
order changes from round to round. The pages are other processes, which read the live stream and
throw it away. The script prints the medians (quartiles) for both kinds of turn, and of the ratios
in each round. The numbers are the CPU time for a step of the engine's thread, of the page's own
thread, of the thread of the event loop, of the whole process, and of the process that replays the
event log. The last one is the steps in a second.

With `--pages 0` both turns have no page. The ratios then tell how noisy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import uvicorn

from mie import AsyncLLM, RequestOutputKind, SamplingParams
from mie.serve.app import create_app
from mie.serve.http_protocol import LimitedProtocol
from mie.serve.page.feed import Feed

READER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "/mie/events") as stream:
    print("open", flush=True)
    while stream.read1(1 << 16):
        pass
"""
"""A page that reads everything that it is sent."""


class Turn(NamedTuple):
    """What one turn took for a step."""

    engine_us: float
    page_us: float
    event_loop_us: float
    process_us: float
    replay_us: float
    steps_per_second: float


def cpu_seconds(name: str) -> float:
    """Return the CPU time of the threads whose names begin like this."""
    threads = [each for each in threading.enumerate() if each.name.startswith(name)]
    clocks = [time.pthread_getcpuclockid(each.ident or 0) for each in threads]
    return sum(map(time.clock_gettime, clocks))


def replay_seconds(feed: Feed) -> float:
    """Return the CPU time of the process that replays, or 0 if there is none."""
    if feed.child is None:
        return 0.0
    return int(Path(f"/proc/{feed.child.pid}/schedstat").read_text().split()[0]) / 1e9


def clocks(llm: AsyncLLM, feed: Feed) -> tuple[float, ...]:
    """Return the number of steps, the CPU times in the order of `Turn`, and the time."""
    threads = map(cpu_seconds, ("mie-engine", "mie-page-feed", "MainThread"))
    cpu = (*threads, time.process_time(), replay_seconds(feed))
    return llm.pulse.num_turns, *cpu, time.monotonic()


async def turn(llm: AsyncLLM, feed: Feed, streams: int, tokens: int) -> Turn:
    """Serve the requests once."""
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(number: int) -> None:
        async for _ in llm.generate(f"Story {number}: once upon a time", params):
            pass

    before = clocks(llm, feed)
    await asyncio.gather(*map(one, range(streams)))
    steps, *cpu, wall = (b - a for a, b in zip(before, clocks(llm, feed), strict=True))
    return Turn(*(1e6 * seconds / steps for seconds in cpu), steps / wall)


async def with_pages(
    url: str, count: int, llm: AsyncLLM, feed: Feed, streams: int, tokens: int
) -> Turn:
    """Serve the requests while pages are open."""
    pages = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, url, stdout=subprocess.PIPE
        )
        for _ in range(count)
    ]
    try:
        for page in pages:
            assert page.stdout is not None
            await page.stdout.readline()
        return await turn(llm, feed, streams, tokens)
    finally:
        for page in pages:
            page.kill()
            await page.wait()
        await feed.stop_following()  # it would follow the engine for some seconds


async def measure(args: argparse.Namespace) -> None:
    """Run the turns and print the table."""
    llm = AsyncLLM(args.model, max_num_seqs=args.streams)
    app = create_app(llm)
    options = uvicorn.Config(app, port=0, http=LimitedProtocol, log_config=None)
    server = uvicorn.Server(options)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    feed: Feed = app.state.edge.page.feed
    load = (llm, feed, args.streams, args.tokens)
    closed: list[Turn] = []
    opened: list[Turn] = []
    await turn(*load)
    for number in range(args.rounds):
        for has_pages in (number % 2 == 0, number % 2 == 1):
            if has_pages:
                opened.append(await with_pages(url, args.pages, *load))
            else:
                closed.append(await turn(*load))
    server.should_exit = True
    await serving
    await asyncio.to_thread(llm.shutdown)
    names = ("engine", "page", "loop", "process", "replay", "steps/s")
    print(f"{'':>10}" + "".join(f"{name:>22}" for name in names))
    print(_row("no page", closed))
    print(_row(f"{args.pages} pages", opened))
    ratios = [
        Turn(*(b / a if a else float("nan") for a, b in zip(*pair, strict=True)))
        for pair in zip(closed, opened, strict=True)
    ]
    print(_row("ratio", ratios, digits=3))


def _row(name: str, turns: Sequence[Turn], digits: int = 0) -> str:
    cells: list[str] = []
    for values in zip(*turns, strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        shown = f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"
        cells.append("–" if math.isnan(middle) else shown)  # a ratio to no time
    return f"{name:>10}" + "".join(f"{cell:>22}" for cell in cells)


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    # Quartiles need two rounds.
    for name, least in {"pages": 0, "streams": 1, "tokens": 1, "rounds": 2}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}; got {getattr(args, name)}")
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
