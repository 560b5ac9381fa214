"""A page tells one server from another, and says so if its server is gone or silent."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from browser import Shown, chromium, opened
from command_line import start


@contextmanager
def serving(port: int, num_blocks: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a server in a process of its own until it is killed, and return it and its port."""
    sizes = ("--num-blocks", str(num_blocks), "--block-size", "8")
    server = start("serve", "--port", str(port), *sizes)
    assert server.stderr is not None
    try:
        lines = (line.decode() for line in server.stderr)
        found = next(filter(None, (re.search(r"listening on http://\S+:(\d+)", x) for x in lines)))
        yield server, int(found[1])
    finally:
        server.kill()
        server.communicate()


def shows(shown: Shown, num_blocks: int) -> None:
    """Wait until the page shows a live pool of this size, and the server agrees with it."""
    shown.until(f"window.mie?.store.run?.numBlocks === {num_blocks} && mie.truth()")
    shown.until("document.getElementById('notice').hidden")
    assert "agree" in shown.text("truth")


def test_a_page_outlives_its_server_and_never_mixes_two() -> None:
    with chromium() as browser, contextlib.ExitStack() as first:
        server, port = first.enter_context(serving(0, 40))
        with opened(browser, f"http://127.0.0.1:{port}/") as shown:
            shows(shown, 40)
            body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
            httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body).raise_for_status()
            shown.until("mie.store.run.last >= 40")
            server.send_signal(signal.SIGSTOP)
            shown.until("document.getElementById('notice').textContent.includes('silent')")
            assert shown.text("truth") == ""
            server.send_signal(signal.SIGCONT)
            shows(shown, 40)
            first.close()  # kills the server
            shown.until("document.getElementById('notice').textContent.includes('tries again')")
            assert shown.text("truth") == ""
            with serving(port, 100):
                shows(shown, 100)
                assert shown.js("mie.store.run.last") == 0
                assert shown.state()["blocks"] == []
