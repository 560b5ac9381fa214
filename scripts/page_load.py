"""Measure the web page and the engine under load: frames, memory, and the cost for steps.

    python scripts/page_load.py [--streams 64] [--minutes 3] [--turn 10]

`mie serve` runs the bundled model with a number of streaming requests at all times. A headless
Chromium has the page open in every other turn, a blank one in the turns between. At the end the
server rests, and the frames of the page are counted again. Needs playwright and chromium.

* frames/s: the callbacks of `requestAnimationFrame`, at most 60;
* heap: the used JavaScript heap after a collection, by CDP, of a page that stays open;
* step: the mean time of `mie:step_seconds`, all phases, of a turn. Turns with the page and without
  are paired, and the median of their ratios is told with its quartiles.

Steps compete with everything else on the machine, so read the load averages first.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
def loaded(server: RunningServer, num_streams: int) -> Iterator[None]:
    """Keep a number of requests in the server meanwhile."""
    end = threading.Event()

    async def work() -> None:
        await asyncio.gather(*(stream(server.address, i, end) for i in range(num_streams)))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def steps(server: RunningServer) -> tuple[float, float]:
    """Return the number of steps, and the seconds in all their phases."""
    count = server.metric("vllm:iteration_tokens_total_count")
    return count, server.metric("mie:step_seconds_sum")


def frames_of(page: Any, seconds: float) -> float:
    """Return the frames a second of a page."""
    frames: float = page.evaluate(FRAMES, seconds)
    return frames


def step_time(server: RunningServer, seconds: float) -> float:
    """Return the mean seconds of a step in the time that comes."""
    count, total = steps(server)
    time.sleep(seconds)
    later, more = steps(server)
    return (more - total) / (later - count)


def heap(page: Any) -> float:
    """Return the megabytes that a page's objects take after a collection."""
    cdp = page.context.new_cdp_session(page)
    cdp.send("HeapProfiler.collectGarbage")
    used: float = cdp.send("Runtime.getHeapUsage")["usedSize"]
    cdp.detach()
    return used / 1e6


def measure(browser: Any, server: RunningServer, arguments: argparse.Namespace) -> None:
    """Print the table."""
    num_turns = max(2, round(arguments.minutes * 60 / arguments.turn))
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def opened(url: str) -> Any:
        page = context.new_page()
        page.goto(url)
        if url != "about:blank":
            page.evaluate(UNTIL % "window.mie?.store.run")
        return page

    ratios, frames = [], []
    with loaded(server, arguments.streams):
        time.sleep(arguments.turn)
        print("heap of a page that stays open, MB, and its steps:")
        page = opened(server.url)
        for i in range(num_turns + 1):
            if i % max(1, num_turns // 6) == 0:
                step, kept = page.evaluate("[mie.store.run.last, mie.store.run.steps.length]")
                print(f"  after {i * arguments.turn:4.0f} s: {heap(page):6.2f}  "
                      f"step {step:,}, {kept:,} kept", flush=True)  # fmt: skip
            frames.append(frames_of(page, arguments.turn))
        page.close()
        for _ in range(num_turns // 2):
            times = []
            for url in (server.url, "about:blank"):
                page = opened(url)
                times.append(step_time(server, arguments.turn))
                page.close()
                time.sleep(6)  # the server follows the engine for 5 s more
            ratios.append(times[0] / times[1])
        print(f"load averages: {os.getloadavg()}")
    page = opened(server.url)
    page.evaluate(UNTIL % "mie.truth()?.step === mie.store.run.last")
    quiet = [frames_of(page, arguments.turn) for _ in range(3)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"frames/s under load: {statistics.median(frames):.1f} (lowest {min(frames):.1f})")
    print(f"frames/s at rest: {statistics.median(quiet):.1f} (lowest {min(quiet):.1f})")
    print(f"step, with the page / without: {middle:.3f} ({low:.3f}-{high:.3f})")


def main() -> None:
    """Start the server and the browser, and measure."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--turn", type=float, default=10, help="seconds of a turn")
    arguments = parser.parse_args()
    options = ("--max-num-seqs", str(arguments.streams), "--num-blocks", "2048")
    print(f"load averages: {os.getloadavg()}, {os.cpu_count()} CPUs", flush=True)
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(Path(log.name), options, key="") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*FLAGS])
        measure(browser, server, arguments)
        browser.close()


if __name__ == "__main__":
    main()
