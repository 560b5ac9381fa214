"""The live stream of the page: the queue of one page is bounded, and no page delays another."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import PATIENCE
from edge_helpers import answer_of, asks, client_of, generate, load
from forks import assert_ends
from page_cells import Page as Applied
from page_cells import cells_of

from mie.events import log as event_log
from mie.events.replay import at
from mie.page.cells import NodeText
from mie.serve.errors import ApiError
from mie.serve.page import feed as feed_module
from mie.serve.page.feed import MAX_BEHIND_TICKS, Feed, Page


@pytest.fixture
def engine():
    with_engine = load(num_blocks=32, block_size=8)
    yield with_engine
    with_engine.shutdown()


def records_of(events):
    """The records of a piece of a stream."""
    lines = events.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


async def opened(feed):
    """A page that has read its first key, and its cells."""
    await feed.tick()
    page, applied = Page(), Applied()
    feed.pages.add(page)
    page.is_reading = True
    await feed.tick()
    await read(page, applied)
    return page, applied


async def read(page, applied):
    """Let a page read all that waits for it, and return the kinds of records."""
    records = records_of(await page.take())
    for record in records:
        applied.take(record)
    return [record["record"] for record in records]


async def replayed(engine):
    """The right cells of a page: the state of the replay after the last step."""
    segments = (await engine.look()).segments
    state = at(segments, segments[-1].last)
    state.apply_step(segments[-1].rest)
    return cells_of(state, NodeText(shows_tokens=False))


async def state_of(feed):
    """The cells of a page that was never behind."""
    applied = Applied()
    applied.take(json.loads(await feed.key()))
    return applied.cells()


async def test_a_page_that_sleeps_gets_the_whole_state_when_it_wakes(engine):
    feed = Feed(engine, "bundled")
    async with client_of(engine) as client:
        awake, shown = await opened(feed)
        asleep, stale = await opened(feed)
        for _ in range(MAX_BEHIND_TICKS + 3):
            await generate(client)
            await feed.tick()
            assert "key" not in await read(awake, shown)
        assert asleep.needs_key
        assert not asleep.num_bytes
        for _ in range(3):  # it still sleeps: no key is made for it
            await generate(client)
            await feed.tick()
            await read(awake, shown)
        assert asleep.needs_key
        asleep.is_reading = True
        await feed.tick()
        assert (await read(asleep, stale))[0] == "key"
        assert stale.cells() == shown.cells() == await state_of(feed)
        assert shown.cells() == await replayed(engine)
    await feed.close()


def test_pages_are_refused_when_too_many_are_open(engine, monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_PAGES", 0)
    assert answer_of(engine, "/mie/events").status_code == 429


async def stream_of(feed):
    """The stream of a page that is open, after its first key."""
    stream = await feed.events(None)
    while b"event: key" not in await anext(stream):
        pass
    return stream


async def test_a_page_that_joins_a_resting_engine_gets_the_truth_too(engine, monkeypatch):
    monkeypatch.setattr(feed_module, "TICK_SECONDS", 0)
    feed = Feed(engine, "bundled")

    async def truth(stream):
        while b"event: truth" not in await anext(stream):
            pass

    async with client_of(engine) as client:
        await generate(client)
        for _ in range(2):  # the first one has got the truth about the last step
            await asyncio.wait_for(truth(await stream_of(feed)), PATIENCE)
    await feed.close()


async def test_the_engine_goes_before_the_process_of_the_page(engine):
    feed = Feed(engine, "bundled")
    await feed.key()
    assert os.getpriority(os.PRIO_PROCESS, feed.child.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    await feed.close()


async def test_the_engine_goes_on_when_the_process_of_the_page_is_killed(engine):
    feed = Feed(engine, "bundled")
    async with client_of(engine) as client:
        stream = await stream_of(feed)
        os.kill(feed.child.pid, signal.SIGKILL)
        await generate(client)
        rest = b"".join([events async for events in stream])
        end = records_of(rest)[-1]
        assert end["record"] == "end"
        assert "has ended" in end["reason"]
        assert feed.child is None
        page, applied = await opened(feed)  # a page that is opened now sees everything
        await generate(client)
        await feed.tick()
        await read(page, applied)
        assert applied.cells() == await replayed(engine)
    await feed.close()


async def test_a_process_that_stands_still_stops_neither_the_engine_nor_the_server(engine):
    feed = Feed(engine, "bundled")
    async with client_of(engine) as client:
        stream = await stream_of(feed)
        pid = feed.child.pid
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(feed.key())
        await generate(client, max_tokens=50)
        await feed.close()
        assert b"event: end" in b"".join([events async for events in stream])
        with pytest.raises(ApiError, match="has ended"):
            await asked
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_stood_still_takes_in_everything_after_a_hole_in_the_log(monkeypatch):
    monkeypatch.setattr(event_log, "SNAPSHOT_EVERY", 2)
    engine = load(num_blocks=32, block_size=8, event_log_steps=2)

    async def watch():
        feed = Feed(engine, "bundled")
        async with client_of(engine) as client:
            page, applied = await opened(feed)
            os.kill(feed.child.pid, signal.SIGSTOP)
            await generate(client)
            late = asyncio.ensure_future(feed.tick())
            await generate(client, max_tokens=20)
            os.kill(feed.child.pid, signal.SIGCONT)
            await late
            await feed.tick()
            await read(page, applied)
            assert applied.cells() == await replayed(engine)
        await feed.close()

    try:
        asks(watch())
    finally:
        engine.shutdown()


PARENT = """
import os, signal, sys
sys.path.append(sys.argv[1])
from mie.serve.page.processes import Child
print(Child().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_its_parent():
    parent = [sys.executable, "-c", PARENT, str(Path(feed_module.__file__).parents[3])]
    ended = subprocess.run(parent, stdout=subprocess.PIPE, timeout=PATIENCE, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert_ends(int(ended.stdout))
