"""Three tabs scrub through 50,000 steps of three servers, and show no false cell.

The servers have different pools and follow each other at one address. Their logs keep few steps,
and each run goes on while the tabs scrub.
"""

import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from browser import Shown, cells, chromium, opened
from deadlines import PATIENCE
from test_page_server import pool, serving

from mie.events import read_log
from mie.events.replay import at
from mie.page.cells import NodeText, key_record

pytestmark = pytest.mark.slow

POOLS = 24, 100, 40  # blocks
NUM_STEPS = 50_000 // len(POOLS) + 1
NUM_SCRUBS = 500 // len(POOLS) + 1
TEXT = NodeText(shows_tokens=False)

SCRUB = """async ([place, waits]) => {
    const {store} = mie;
    const {first, last} = store.run;
    mie.seek(first + Math.floor(place * (last - 1 - first)));
    const {run, step} = store;
    if (waits) await run.exactly(step);
    mie.select(null);
    await new Promise(requestAnimationFrame);
    if (store.run !== run || store.step !== step) return null;  // the server changed meanwhile
    return {
        server: run.head.server, step, isKnown: run.isExact(step), state: mie.state(),
        note: document.getElementById("map-note").textContent,
    };
}"""
"""Moves a tab to a place between 0 and 1 of its run, may wait for the server, and returns the state
on the screen."""


@contextmanager
def busy(url: str, seed: int) -> Iterator[None]:
    """Keep eight requests in a server. Many share their beginnings, and some fork."""
    end = threading.Event()

    def ask(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        while not end.is_set():
            story = "Once upon a time there was an otter. " * dice.randint(1, 4)
            body = {
                "prompt": f"{story}{dice.choice('abc')}", "max_tokens": dice.randint(1, 60),
                "n": dice.choice((1, 1, 2)), "ignore_eos": True, "seed": dice.randint(0, 99),
            }  # fmt: skip
            with suppress(httpx2.HTTPError):  # the server is killed in the midst of answers
                httpx2.post(f"{url}v1/completions", json=body, timeout=PATIENCE)

    with ThreadPoolExecutor(8) as threads:
        for number in range(8):
            threads.submit(ask, number)
        try:
            yield
        finally:
            end.set()


def reach(page: Shown, step: int) -> None:
    """Wait until a tab has a step, for as long as steps arrive."""
    last = -1
    while last < step:
        page.until(f"mie.store.run.last >= Math.min({step}, {last + 1})")
        last = page.js("mie.store.run.last")


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser.new_context()


def test_no_cell_is_false_over_a_long_run_with_restarts(browser: Any, tmp_path: Path) -> None:
    dice = random.Random(1)
    shown: list[tuple[int, dict[str, Any]]] = []
    with ExitStack() as tabs:
        pages: list[Shown] = []
        port = 0
        for number, num_blocks in enumerate(POOLS):
            trace = str(tmp_path / f"{number}.jsonl")
            options = ("--backend", "numpy", "--max-num-seqs", "6", "--event-log-steps", "500")
            with serving(port, *pool(num_blocks), *options, "--trace", trace) as (server, port):
                url = f"http://127.0.0.1:{port}/"
                with busy(url, number):
                    # One tab more opens at each server, in the middle of its run.
                    for page in pages:
                        page.until(f"mie.store.run.numBlocks === {num_blocks}")
                    while len(pages) <= number:
                        pages.append(tabs.enter_context(opened(browser, url)))
                        pages[-1].until("window.mie?.store.run?.last > 10")
                    for count in range(1, NUM_SCRUBS + 1):
                        page = dice.choice(pages)
                        # The runs get longer between the scrubs.
                        reach(page, count * NUM_STEPS // NUM_SCRUBS)
                        found = page.js(SCRUB, [dice.random(), dice.random() < 0.7])
                        if found is not None:
                            shown.append((number, found))
                server.send_signal(signal.SIGTERM)
                server.wait(PATIENCE)
    assert len(shown) > 0.98 * NUM_SCRUBS * len(POOLS)
    num_known = 0
    logs = [list(read_log(tmp_path / f"{number}.jsonl")) for number in range(len(POOLS))]
    for number, found in shown:
        if found["isKnown"]:
            key = json.loads(json.dumps(key_record(at(logs[number], found["step"]), TEXT)))
            assert cells(found["state"]) == cells(key), (number, found["step"])
            num_known += 1
        else:
            assert "after this step" in found["note"]  # and all cells are hatched
            assert not found["state"]["blocks"]
    assert 0.2 * len(shown) < num_known < len(shown), num_known
    for number in range(len(POOLS)):
        assert len({found["server"] for which, found in shown if which == number}) == 1
