"""Measure what the web page costs the engine while three pages are open.

    python scripts/bench_page.py [--pages 3] [--streams 8] [--seconds 1] [--rounds 40]
                                 [--threads 1]

A round is two turns that serve the same requests, one with no page and one with open pages. The
order changes from round to round. The first half second of a turn is not measured. The
script prints the medians (quartiles) for both kinds of turn, and of the ratios in each round. Last
it prints the median ratio of the steps in a second, with a 95 % bootstrap interval.

| column | what it is, for a step |
|---|---|
| engine | CPU time of the engine's thread |
| page | CPU time of the page's own thread |
| loop | CPU time of the event loop's thread |
| process | CPU time of the whole server process |
| replay | CPU time of the process that replays the event log |
| readers | CPU time of the process that reads the pages' streams. It is no cost of a server. |
| steps/s | the steps in a second |

The readers stand for tabs on other machines. They are one process at the lowest priority, which
reads all that came ten times a second and throws it away.

By default the engine uses all CPUs, so everything else takes its time: the threads of the server,
which also hold Python's lock, the process that replays, and the readers. With fewer compute threads
than CPUs (``--threads``) the last two have a CPU of their own. The ratio of steps then tells what
the page takes of the engine's own path. The difference between the two is the price of CPUs that
are full.

With `--pages 0` both turns have no page. The ratios then tell how noisy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
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

READERS = """
import os, socket, sys, time
port, count = map(int, sys.argv[1:])
os.nice(19)
request = b"GET /mie/events HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n"
buffer = bytearray(1 << 20)
pages = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
for page in pages:
    page.sendall(request)
    seen = b""
    while b"event: key" not in seen:
        seen += page.recv(1 << 16)
    page.setblocking(False)
print("open", flush=True)
while True:
    time.sleep(0.1)
    for page in pages:
        try:
            page.recv_into(buffer)
        except BlockingIOError:
            pass
"""
"""Pages that read everything that they are sent."""

WARM_SECONDS = 0.5
"""Time at the beginning of a turn that is not measured. The replaying process starts in it."""
TOKENS = 200
"""Tokens of each request."""


class Turn(NamedTuple):
    """What one turn took for a step."""

    engine_us: float
    page_us: float
    event_loop_us: float
    process_us: float
    replay_us: float
    readers_us: float
    steps_per_second: float


def cpu_seconds(name: str) -> float:
    """Return the CPU time of the threads whose names begin like this."""
    threads = [each for each in threading.enumerate() if each.name.startswith(name)]
    clocks = [time.pthread_getcpuclockid(each.ident or 0) for each in threads]
    return sum(map(time.clock_gettime, clocks))


def process_seconds(pid: int | None) -> float:
    """Return the CPU time of another process, or 0 if there is none."""
    if pid is None:
        return 0.0
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def clocks(llm: AsyncLLM, feed: Feed, readers: int) -> tuple[float, ...]:
    """Return the number of steps, the CPU times in the order of `Turn`, and the time."""
    threads = map(cpu_seconds, ("mie-engine", "mie-page-feed", "MainThread"))
    others = map(process_seconds, (feed.child and feed.child.pid, readers))
    return llm.pulse.num_turns, *threads, time.process_time(), *others, time.monotonic()


async def serve(llm: AsyncLLM, streams: int, seconds: float) -> None:
    """Serve the same requests again and again until that time has passed."""
    end = time.monotonic() + seconds
    params = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def one(number: int) -> None:
        async for _ in llm.generate(f"Story {number}: once upon a time", params):
            pass

    while time.monotonic() < end:
        await asyncio.gather(*map(one, range(streams)))


async def turn(llm: AsyncLLM, feed: Feed, streams: int, seconds: float, readers: int) -> Turn:
    """Measure the requests for a time."""
    await serve(llm, streams, WARM_SECONDS)
    before = clocks(llm, feed, readers)
    await serve(llm, streams, seconds)
    after = clocks(llm, feed, readers)
    steps, *cpu, wall = (b - a for a, b in zip(before, after, strict=True))
    return Turn(*(1e6 * each / steps for each in cpu), steps / wall)


async def with_pages(
    port: int, count: int, llm: AsyncLLM, feed: Feed, streams: int, seconds: float
) -> Turn:
    """Measure the requests while pages are open.

    Without pages it starts the readers as well, so that both kinds of turn begin after a rest.
    """
    readers = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", READERS, str(port), str(count), stdout=subprocess.PIPE
    )
    try:
        assert readers.stdout is not None
        await readers.stdout.readline()
        return await turn(llm, feed, streams, seconds, readers.pid)
    finally:
        readers.kill()
        await readers.wait()
        await feed.stop_following()  # it would follow the engine for some seconds


async def measure(args: argparse.Namespace) -> None:
    """Run the turns and print the table."""
    llm = AsyncLLM(args.model, max_num_seqs=args.streams, num_threads=args.threads)
    app = create_app(llm)
    options = uvicorn.Config(app, port=0, http=LimitedProtocol, log_config=None)
    server = uvicorn.Server(options)
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    feed: Feed = app.state.edge.page.feed
    load = (llm, feed, args.streams, args.seconds)
    closed: list[Turn] = []
    opened: list[Turn] = []
    for number in range(args.rounds):
        for has_pages in (number % 2 == 0, number % 2 == 1):
            count, turns = (args.pages, opened) if has_pages else (0, closed)
            turns.append(await with_pages(port, count, *load))
    server.should_exit = True
    await serving
    await asyncio.to_thread(llm.shutdown)
    names = ("engine", "page", "loop", "process", "replay", "readers", "steps/s")
    print(f"{'':>10}" + "".join(f"{name:>22}" for name in names))
    print(_row("no page", closed))
    print(_row(f"{args.pages} pages", opened))
    ratios = [
        Turn(*(b / a if a else float("nan") for a, b in zip(*pair, strict=True)))
        for pair in zip(closed, opened, strict=True)
    ]
    print(_row("ratio", ratios, digits=3))
    steps = [ratio.steps_per_second for ratio in ratios]
    low, high = interval(steps)
    middle = statistics.median(steps)
    print(f"steps/s, median ratio: {middle:.3f} (95 % interval {low:.3f}–{high:.3f})")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval that has the median of the values with 95 %."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(2000)]
    cuts = statistics.quantiles(medians, n=40)
    return cuts[0], cuts[-1]


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
    parser.add_argument("--seconds", type=float, default=1, help="time of a turn")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, help="compute threads (default: one for each CPU)")
    args = parser.parse_args()
    # Quartiles need two rounds.
    for name, least in {"pages": 0, "streams": 1, "rounds": 2}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}; got {getattr(args, name)}")
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds must be above 0 and finite; got {args.seconds}")
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads must be at least 1; got {args.threads}")
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
