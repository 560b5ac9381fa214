"""A page tells one server from another, and says so if its server is gone or silent."""

import contextlib
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from browser import PATIENCE, Shown, opened
from command_line import start
from deadlines import join


@contextmanager
def serving(port: int, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a server in a process of its own until it is killed, and return it and its port."""
    server = start("serve", "--port", str(port), *options)
    assert server.stderr is not None
    try:
        lines = (line.decode() for line in server.stderr)
        found = next(filter(None, (re.search(r"listening on http://\S+:(\d+)", x) for x in lines)))
        # A server waits for ever when nobody reads its log and the pipe is full.
        reader = threading.Thread(target=server.stderr.read)
        reader.start()
        yield server, int(found[1])
    finally:
        server.kill()
        join(reader)
        server.communicate(timeout=PATIENCE)


def pool(num_blocks: int) -> tuple[str, ...]:
    """The options of a pool of blocks of 8 tokens."""
    return ("--num-blocks", str(num_blocks), "--block-size", "8")


def shows(shown: Shown, num_blocks: int) -> None:
    """Wait until the page shows a live pool of this size, and the server agrees with it."""
    shown.until(f"window.mie?.store.run?.numBlocks === {num_blocks} && mie.truth()")
    shown.until("document.getElementById('notice').hidden")
    assert "agree" in shown.text("truth")


@pytest.mark.slow
def test_a_page_outlives_its_server_and_never_mixes_two(browser: Any) -> None:
    with contextlib.ExitStack() as first:
        server, port = first.enter_context(serving(0, *pool(40)))
        with opened(browser, f"http://127.0.0.1:{port}/") as shown:
            shows(shown, 40)
            body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
            httpx2.post(
                f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE
            ).raise_for_status()
            shown.until("mie.store.run.last >= 40")
            server.send_signal(signal.SIGSTOP)
            shown.until("document.getElementById('notice').textContent.includes('silent')")
            assert shown.text("truth") == ""
            server.send_signal(signal.SIGCONT)
            shows(shown, 40)
            first.close()  # kills the server
            shown.until("document.getElementById('notice').textContent.includes('tries again')")
            assert shown.text("truth") == ""
            with serving(port, *pool(100)):
                shows(shown, 100)
                assert shown.js("mie.store.run.last") == 0
                assert shown.state()["blocks"] == []


@pytest.mark.slow
def test_a_demo_shows_sharing_copies_and_preemption_by_itself(browser: Any) -> None:
    with serving(0, "--demo") as (_, port), opened(browser, f"http://127.0.0.1:{port}/") as shown:
        shown.until("window.mie?.store.run?.numBlocks === 48")
        shown.until("document.getElementById('promise').textContent.startsWith('The second')")
        shown.settle()
        for kind in ("preempt", "fork", "copy", "hit"):
            assert shown.events(kind), kind
        assert shown.js("document.getElementById('welcome').hidden")
        shown.js("mie.seek(20)")
        shown.until("location.hash.startsWith('#live-') && location.hash.endsWith('/20')")
        here = shown.js("location.href")
        request = shown.events("add")[0]["request_id"]
        for link in (here, here.replace("/20", f"//request:{request}")):
            with opened(browser, link) as again:
                again.until("window.mie?.store.run && !mie.store.follows")
                is_moment = link == here
                assert again.js("mie.store.step") == (20 if is_moment else 1)
                assert again.js("mie.store.selected?.kind ?? null") == (
                    None if is_moment else "seq"
                )
        with opened(browser, here.replace("#live-", "#live-0")) as other:
            other.until("document.getElementById('notice').textContent.includes('has ended')")


@pytest.mark.slow
def test_a_fresh_server_offers_a_first_look_and_draws_a_part_of_a_large_pool(browser: Any) -> None:
    with (
        serving(0, *pool(20_000)) as (_, port),
        opened(browser, f"http://127.0.0.1:{port}/") as shown,
    ):
        shows(shown, 20_000)
        assert not shown.js("document.getElementById('welcome').hidden")
        assert shown.js("[mie.parts.map.numShown, mie.parts.map.lay.per]") == [256, 1]
        assert "the first 256 are drawn" in shown.text("map-note")
        shown.js("document.getElementById('map-whole').click()")
        shown.drawn()
        assert shown.js("mie.parts.map.numShown") == 20_000
