"""Measure what the web page costs the engine while three pages are open.

    python scripts/bench_page.py [--pages 3] [--streams 8] [--tokens 200] [--rounds 7]

Turns alternate between no page and open pages. The pages are another process, which reads the live
stream and throws it away. A turn serves the same requests. The script prints, for each kind of
turn, the medians (least–most) of the CPU time for a step of four things: the engine's thread, the
page's own thread, the thread of the event loop, and the whole process. It also prints the steps in
a second, and then the medians of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import uvicorn

from mie import AsyncLLM, RequestOutputKind, SamplingParams
from mie.serve.app import create_app
from mie.serve.http_protocol import LimitedProtocol

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
    steps_per_second: float


def cpu_seconds(name: str) -> float:
    """Return the CPU time of the threads whose names begin like this."""
    threads = [each for each in threading.enumerate() if each.name.startswith(name)]
    clocks = [time.pthread_getcpuclockid(each.ident or 0) for each in threads]
    return sum(map(time.clock_gettime, clocks))


def clocks(llm: AsyncLLM) -> tuple[float, ...]:
    """Return the number of steps, the CPU times in the order of `Turn`, and the time."""
    threads = map(cpu_seconds, ("mie-engine", "mie-page-feed", "MainThread"))
    return llm.pulse.num_turns, *threads, time.process_time(), time.monotonic()


async def turn(llm: AsyncLLM, streams: int, tokens: int) -> Turn:
    """Serve the requests once."""
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(number: int) -> None:
        async for _ in llm.generate(f"Story {number}: once upon a time", params):
            pass

    before = clocks(llm)
    await asyncio.gather(*map(one, range(streams)))
    steps, *cpu, wall = (b - a for a, b in zip(before, clocks(llm), strict=True))
    return Turn(*(1e6 * seconds / steps for seconds in cpu), steps / wall)


async def with_pages(url: str, count: int, llm: AsyncLLM, streams: int, tokens: int) -> Turn:
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
        return await turn(llm, streams, tokens)
    finally:
        for page in pages:
            page.kill()
            await page.wait()


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
    closed: list[Turn] = []
    opened: list[Turn] = []
    await turn(llm, args.streams, args.tokens)
    for _ in range(args.rounds):
        closed.append(await turn(llm, args.streams, args.tokens))
        opened.append(await with_pages(url, args.pages, llm, args.streams, args.tokens))
        await (
            app.state.edge.page.feed.stop_following()
        )  # it would follow the engine for some seconds
    server.should_exit = True
    await serving
    await asyncio.to_thread(llm.shutdown)
    names = ("engine µs/step", "page µs/step", "loop µs/step", "process µs/step", "steps/s")
    print(f"{'':>12}" + "".join(f"{name:>24}" for name in names))
    print(_row("no page", closed))
    print(_row(f"{args.pages} pages", opened))
    ratios = [
        Turn(*(b / a if a else float("nan") for a, b in zip(*pair, strict=True)))
        for pair in zip(closed, opened, strict=True)
    ]
    print(_row("ratio", ratios, digits=3))


def _row(name: str, turns: Sequence[Turn], digits: int = 0) -> str:
    cells: list[Any] = []
    for values in zip(*turns, strict=True):
        middle = statistics.median(values)
        cells.append(f"{middle:.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})")
    return f"{name:>12}" + "".join(f"{cell:>24}" for cell in cells)


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
