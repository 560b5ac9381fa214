"""Measure the web page and the engine under load: frames, memory, and the cost for steps.

    python scripts/page_load.py [--streams 64] [--minutes 3] [--rounds 5] [--turn 10]

`mie serve` runs the bundled model with a number of streaming requests at all times. First a
headless Chromium keeps the page open. Then it shows, in turns, a blank page, a blank page while a
client reads the page's stream, the page, and the page while frames are counted. At the end the
server rests, and the frames of the page are counted again. Needs playwright and chromium.

* frames/s: the callbacks of `requestAnimationFrame`, at most 60. Counting them makes Chromium draw
  each, so the frames that the page drew by itself are counted apart;
* heap: the used JavaScript heap after a collection, by CDP, of a page that stays open;
* step: the mean time of `mie:step_seconds`, all phases, of a turn. A turn is compared with the
  first one of `--kinds` in its round, and the median of the ratios is told with its quartiles;
* CPU time: of the server's threads and processes and of the browser's, in percent of a CPU.

With `--apart`, the server has half of the CPUs, and the browser and the clients the others. Steps
compete with everything else on the machine, so read the load averages first.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_checks.cpu_time import WAIT, cpu_seconds
from serve_checks.server import RunningServer, serving

FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run")
FRAMES = """seconds => new Promise(resolve => {
    const start = performance.now();
    let frames = 0;
    const count = now => {
        frames += 1;
        if (now - start < 1000 * seconds) requestAnimationFrame(count);
        else resolve(1000 * frames / (now - start));
    };
    requestAnimationFrame(count);
})"""

LINGER_SECONDS = 6
"""Time in which the server goes on following the engine after its last page, and a little more."""

UNTIL = "async () => { while (!(%s)) await new Promise(requestAnimationFrame); }"


async def stream(address: tuple[str, int], number: int, end: threading.Event) -> None:
    """Send one streaming request after another, and drop the answers."""
    sent = 0
    while not end.is_set():
        body = json.dumps({
            "prompt": f"Tell me story {sent} about the otter {number}", "stream": True,
            "max_tokens": 100 + number, "ignore_eos": True, "temperature": 1, "seed": number + sent,
        })  # fmt: skip
        reader, writer = await asyncio.open_connection(*address)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + kind + body).encode())
        while await reader.read(1 << 16) and not end.is_set():
            pass
        writer.close()
        sent += 1


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread until its event is set."""
    end = threading.Event()
    thread = threading.Thread(target=work, args=(end,))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def loaded(server: RunningServer, num_streams: int) -> AbstractContextManager[None]:
    """Return a context in which a number of requests run in the server."""

    async def streams(end: threading.Event) -> None:
        await asyncio.gather(*(stream(server.address, i, end) for i in range(num_streams)))

    return meanwhile(lambda end: asyncio.run(streams(end)))


def read(server: RunningServer) -> AbstractContextManager[None]:
    """Return a context in which a client reads the page's stream, and draws nothing."""

    def work(end: threading.Event) -> None:
        with socket.create_connection(server.address) as connection:
            host = f"{server.address[0]}:{server.address[1]}"
            connection.sendall(f"GET /mie/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            while not end.is_set() and connection.recv(1 << 16):
                pass

    return meanwhile(work)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The steps, frames and CPU times of a turn."""

    num_steps: float
    step_seconds: float
    """All phases of these steps."""
    num_drawn: float
    """Frames that the page drew."""
    seconds: float
    cpu: dict[str, float]
    """Seconds by name."""


def measured(server: RunningServer, page: Any, seconds: float, *, counts: bool) -> Turn:
    """Let a turn go by. ``counts``: the page is asked for a frame as often as there can be one."""
    drawn = "window.mie?.frames.drawn ?? 0"
    begin, before = page.evaluate(drawn), cpu_seconds(server.process_id)
    count, total = steps(server)
    start = time.monotonic()
    if counts:
        frames_of(page, seconds)
    else:
        time.sleep(seconds)
    later, more = steps(server)
    wall = time.monotonic() - start
    cpu = cpu_seconds(server.process_id)
    return Turn(
        num_steps=later - count,
        step_seconds=more - total,
        num_drawn=page.evaluate(drawn) - begin,
        seconds=wall,
        cpu={name: each - before.get(name, 0.0) for name, each in cpu.items()},
    )


def steps(server: RunningServer) -> tuple[float, float]:
    """Return the number of steps, and the seconds in all their phases."""
    count = server.metric("vllm:iteration_tokens_total_count")
    return count, server.metric("mie:step_seconds_sum")


def frames_of(page: Any, seconds: float) -> float:
    """Return the frames a second of a page."""
    frames: float = page.evaluate(FRAMES, seconds)
    return frames


def heap(page: Any) -> float:
    """Return the megabytes that a page's objects take after a collection."""
    cdp = page.context.new_cdp_session(page)
    cdp.send("HeapProfiler.collectGarbage")
    used: float = cdp.send("Runtime.getHeapUsage")["usedSize"]
    cdp.detach()
    return used / 1e6


KINDS = ("blank", "reader", "page", "counted")
"""A blank page, the stream read without a page, the page, and the page while frames are counted."""


def take_turns(
    opened: Callable[[str], Any], server: RunningServer, arguments: argparse.Namespace
) -> dict[str, list[Turn]]:
    """Return the turns of each kind. A round has one of each."""
    kinds = arguments.kinds
    turns: dict[str, list[Turn]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            page = opened(server.url if kind in ("page", "counted") else "about:blank")
            with read(server) if kind == "reader" else nullcontext():
                time.sleep(1)  # the first state has been sent, and is drawn
                turn = measured(server, page, arguments.turn, counts=kind == "counted")
            turns[kind].append(turn)
            page.close()
            if kind != "blank":
                time.sleep(LINGER_SECONDS)
    return turns


def report(turns: dict[str, list[Turn]]) -> Iterator[str]:
    """Yield the lines of two tables: steps, and the CPU time in percent of a CPU."""
    yield f"| | {' | '.join(turns)} |\n|---|{'--:|' * len(turns)}"
    rows: dict[str, Callable[[Turn], float]] = {
        "step, ms": lambda turn: 1e3 * turn.step_seconds / turn.num_steps,
        "steps/s": lambda turn: turn.num_steps / turn.seconds,
        "frames/s that the page drew": lambda turn: turn.num_drawn / turn.seconds,
        "engine's thread, CPU ms a step": lambda turn: (
            1e3 * turn.cpu["server: mie-engine"] / turn.num_steps
        ),
        "engine's thread, ms a step without a CPU": lambda turn: (
            1e3 * turn.cpu[WAIT] / turn.num_steps
        ),
    }
    for title, value in rows.items():
        medians = [statistics.median(map(value, each)) for each in turns.values()]
        yield f"| {title} | {' | '.join(f'{each:.2f}' for each in medians)} |"
    first, step = next(iter(turns)), rows["step, ms"]
    ratios = []
    for each in turns.values():
        pairs = zip(each, turns[first], strict=True)
        low, middle, high = quartiles([step(turn) / step(other) for turn, other in pairs])
        ratios.append(f"{middle:.3f} ({low:.3f}-{high:.3f})")
    yield f"| step, ratio to {first} | {' | '.join(ratios)} |"
    for name in sorted({name for each in turns.values() for turn in each for name in turn.cpu}):
        shares = [
            100 * statistics.median(turn.cpu.get(name, 0.0) / turn.seconds for turn in each)
            for each in turns.values()
        ]
        if max(shares) >= 0.05:
            yield f"| {name}, % | {' | '.join(f'{share:.1f}' for share in shares)} |"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles, or the only value three times."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else 3 * [*values]
    return low, middle, high


def watch(opened: Callable[[str], Any], server: RunningServer, num_turns: int, turn: float) -> None:
    """Print the heap of a page that stays open under load, and its frames a second."""
    frames = []
    print("heap of a page that stays open, MB, and its steps:")
    page = opened(server.url)
    for i in range(num_turns + 1):
        if i % max(1, num_turns // 6) == 0:
            step, kept = page.evaluate("[mie.store.run.last, mie.store.run.steps.length]")
            print(f"  after {i * turn:4.0f} s: {heap(page):6.2f}  "
                  f"step {step:,}, {kept:,} kept", flush=True)  # fmt: skip
        frames.append(frames_of(page, turn))
    page.close()
    print(f"frames/s under load: {statistics.median(frames):.1f} (lowest {min(frames):.1f})")


def measure(browser: Any, server: RunningServer, arguments: argparse.Namespace) -> None:
    """Print the tables."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def opened(url: str) -> Any:
        page = context.new_page()
        page.goto(url)
        if url != "about:blank":
            page.evaluate(UNTIL % "window.mie?.store.run")
        return page

    with loaded(server, arguments.streams):
        time.sleep(arguments.turn)
        if num_turns := round(arguments.minutes * 60 / arguments.turn):
            watch(opened, server, num_turns, arguments.turn)
        if arguments.rounds:
            turns = take_turns(opened, server, arguments)
            print("\n".join(report(turns)))
        print(f"load averages: {os.getloadavg()}")
    page = opened(server.url)
    page.evaluate(UNTIL % "mie.truth()?.step === mie.store.run.last")
    quiet = [frames_of(page, arguments.turn) for _ in range(3)]
    print(f"frames/s at rest: {statistics.median(quiet):.1f} (lowest {min(quiet):.1f})")


def main() -> None:
    """Start the server and the browser, and measure."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=3, help="time that a page stays open")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="of turns")
    parser.add_argument("--turn", type=float, default=10, help="seconds of a turn")
    parser.add_argument("--apart", action="store_true", help="halve the CPUs: server, and the rest")
    arguments = parser.parse_args()
    options = ("--max-num-seqs", str(arguments.streams), "--num-blocks", "2048")
    print(f"load averages: {os.getloadavg()}, {os.cpu_count()} CPUs", flush=True)
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        if arguments.apart:
            os.sched_setaffinity(0, cpus[: len(cpus) // 2])  # the server inherits them
        log = stack.enter_context(tempfile.NamedTemporaryFile())
        server = stack.enter_context(serving(Path(log.name), options, key=""))
        if arguments.apart:
            os.sched_setaffinity(0, cpus[len(cpus) // 2 :])
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*FLAGS])
        measure(browser, server, arguments)
        browser.close()


if __name__ == "__main__":
    main()
