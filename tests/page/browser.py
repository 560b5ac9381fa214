"""A page in a headless browser, and questions of tests to it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE = 300.0
"""Seconds after which something that should have happened has failed."""
LIFETIME = 900.0
"""Seconds after which a browser is killed, so that a test that waits for a page without a deadline
fails."""
LOOKS = int(50 * PATIENCE)
"""How often `Shown.until` looks, at intervals of 20 ms, before it gives up."""

IS_SETTLED = """await (async () => {
    const text = await (await fetch('metrics')).text();
    const sum = name => [...text.matchAll(new RegExp(`^${name}(?:{.*})? ([0-9.]+)$`, 'gm'))]
        .reduce((total, [, number]) => total + Number(number), 0);
    const step = sum('vllm:iteration_tokens_total_count');
    const truth = mie.truth();
    return sum('vllm:num_requests_running') + sum('vllm:num_requests_waiting') === 0
        && mie.store.run.last === step && truth?.step === step && !truth.wrong.length
        && mie.isWhole() && mie.own().num_running + mie.own().num_waiting === 0;
})()"""
"""Whether the engine has nothing to do, and the page has all its steps and agrees with it.

An answer may arrive before the records of its steps, which come ten times a second. So the page's
own numbers are not enough: they also agree with each other before the first of these records.
"""


def missing(reason: str) -> NoReturn:
    """Skip a test, or let it fail where the browser must be there, as in CI."""
    if os.environ.get("MIE_NEEDS_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """Start the system's browser, or skip the test where it or playwright is missing."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing("chromium is not installed")
    if importlib.util.find_spec("playwright") is None:
        missing("playwright is not installed (pip install '.[browser]')")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        before = descendants(os.getpid())
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *flags])
        started = descendants(os.getpid()) - before
        end = threading.Timer(LIFETIME, kill, [started])
        end.daemon = True
        end.start()
        try:
            yield browser
            browser.close()
        finally:
            end.cancel()


def descendants(pid: int) -> set[int]:
    """Return the processes below a process."""
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def kill(processes: Iterable[int]) -> None:
    """Kill processes of which some may have ended."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def sync_error() -> type[Exception]:
    """Return the error that playwright raises."""
    from playwright.sync_api import Error

    return Error


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Shown]:
    """Open a page. It is closed before its server is, which waits for open streams."""
    shown = Shown(browser, url, **options)
    try:
        yield shown
    finally:
        shown.page.close()


class Shown:
    """A page that is open. It keeps every error of its console."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        options.setdefault("reduced_motion", "reduce")
        # A context, in which other pages are open, has its own options.
        self.page = (
            browser.new_page(**options) if hasattr(browser, "contexts") else browser.new_page()
        )
        self.page.set_default_timeout(1000 * PATIENCE)
        self.errors: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def js(self, source: str, argument: Any = None) -> Any:
        """Return the value of an expression or a function. The page's policy does not bind it."""
        return self.page.evaluate(source, argument)

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        looks = f"""async () => {{
            for (let i = 0; i < {LOOKS}; i++) {{
                if ({condition}) return true;
                await new Promise(resolve => setTimeout(resolve, 20));
            }}
            return false;
        }}"""
        while True:
            try:
                is_so = self.js(looks)
                break
            except sync_error() as error:  # the page was loaded again meanwhile
                if "context was destroyed" not in str(error):
                    raise
                self.page.wait_for_load_state()
        assert is_so, f"it does not happen: {condition}; the page said {self.errors}"

    def drawn(self) -> None:
        """Wait until all that the page knows is drawn."""
        self.js(
            """async () => {
                do await new Promise(requestAnimationFrame);
                while (mie.isFrameComing?.());
            }"""
        )

    def text(self, element: str) -> str:
        """Return the text of an element, by its id."""
        return str(self.js("id => document.getElementById(id).textContent", element))

    def do(self, name: str) -> str:
        """Run an experiment, and return the sentence that it ends with."""
        button = f"document.querySelector('[data-do={name}]')"
        self.js(f"{button}.click()")
        self.until(f"!{button}.disabled")
        return self.text("promise")

    def at(self, step: int) -> dict[str, Any]:
        """Return the page's state at a step, in the shape of a key."""
        state: dict[str, Any] = self.js("step => mie.at(step)", step)
        return state

    def state(self) -> dict[str, Any]:
        """Return the state that the page shows, in the shape of a key."""
        state: dict[str, Any] = self.js("mie.state()")
        return state

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind, with their steps.

        Events between two steps belong to the later one. It comes in a record of its own if
        the server looked at the engine in between.
        """
        found: list[dict[str, Any]] = self.js(
            """kind => mie.store.run.records
                .flatMap(({steps, events = [], last}) => steps ?? [{events, step: last + 1}])
                .flatMap(each => each.events
                    .filter(event => event.kind === kind)
                    .map(event => ({...event, step: each.step})))""",
            kind,
        )
        return found

    def settle(self) -> None:
        """Wait until the engine rests, and the page shows all that it did and agrees with it."""
        self.until(IS_SETTLED)
        self.drawn()


def serious(shown: Shown, theme: str) -> list[Any]:
    """Return the serious and critical findings of axe on a page."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        missing("axe-core is not installed (pip install '.[browser]')")
    import axe_playwright_python as package

    shown.js("theme => { document.documentElement.dataset.theme = theme; }", theme)
    shown.js((Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8") + ";0")
    found = shown.js(
        "axe.run({exclude: ['.answer:nth-child(n+2)']}, {resultTypes: ['violations']})"
    )
    return [
        (each["id"], [node["html"] for node in each["nodes"]])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def cells(key: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a key in the page's form, without the cells that it leaves out."""
    return {
        "blocks": sorted(key["blocks"]),
        "seqs": key["seqs"],
        "tables": {seq: blocks for seq, (_, blocks) in key["tables"].items() if blocks},
        "host": {seq: blocks for seq, blocks in key["host"].items() if blocks},
        "tree": {block: (node["parent"], node["salt"]) for block, node in key["tree"].items()},
    }
