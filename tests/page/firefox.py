"""Firefox for tests: the few parts of playwright's API that they need, over WebDriver BiDi.

Playwright drives its own build of Firefox, which no package manager has. Each Firefox speaks BiDi
(https://www.w3.org/TR/webdriver-bidi/): JSON over a WebSocket.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

PREFERENCES = {"ui.prefersReducedMotion": 1, "datareporting.policy.dataSubmissionEnabled": False}
MASK = b"m"
SECONDS = 240
"""Time that Firefox may take for one answer on a busy machine."""


class BidiError(Exception):
    """A command failed, or a script raised."""


class Socket:
    """A WebSocket to this machine (RFC 6455)."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        self._file = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        head = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
        lines = (f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Sec-WebSocket-Key: {key}")
        self._socket.sendall("\r\n".join((*lines, *head, "", "")).encode())
        status = self._file.readline()
        assert b" 101 " in status, status
        while self._file.readline().strip():
            pass

    def send(self, text: str) -> None:
        """Send a text in one frame, whose bytes are masked with the same one, as they must be."""
        data = text.encode()
        size = len(data)
        short = size if size < 126 else 126 if size < 1 << 16 else 127
        length = b"" if short < 126 else struct.pack(">H" if short == 126 else ">Q", size)
        masked = bytes(byte ^ MASK[0] for byte in data)
        self._socket.sendall(bytes((0x81, 0x80 | short)) + length + MASK * 4 + masked)

    def receive(self) -> str:
        """Wait for a text, which may come in several frames."""
        parts = []
        while True:
            first, size = self._file.read(2)
            if size >= 126:
                (size,) = struct.unpack(
                    *((">H", self._file.read(2)) if size == 126 else (">Q", self._file.read(8)))
                )
            data = self._file.read(size)
            kind = first & 15
            assert kind in (0, 1, 9), f"Firefox sent a frame of kind {kind}"
            if kind != 9:  # a ping, which may stay without an answer
                parts.append(data)
                if first & 128:
                    return b"".join(parts).decode()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


class Page:
    """A window with one tab, which is visible beside others."""

    def __init__(self, browser: Firefox, user_context: str | None) -> None:
        self._browser = browser
        of = {} if user_context is None else {"userContext": user_context}
        self.context: str = browser.ask("browsingContext.create", type="window", **of)["context"]
        self.listeners: dict[str, Callable[[Any], None]] = {}
        browser.pages[self.context] = self

    def on(self, kind: str, act: Callable[[Any], None]) -> None:
        """Call a function with each uncaught error (``pageerror``)."""
        self.listeners[kind] = act

    def goto(self, url: str) -> None:
        """Open an address."""
        self._browser.ask(
            "browsingContext.navigate", context=self.context, url=url, wait="complete"
        )

    def evaluate(self, source: str, argument: Any = None) -> Any:
        """Return the value of an expression, or of a function that gets the argument."""
        value = f"const value = ({source});"
        call = f"await (typeof value === 'function' ? value({json.dumps(argument)}) : value)"
        script = f"(async () => {{ {value} return JSON.stringify([{call}]); }})()"
        target = {"context": self.context}
        found = self._browser.ask(
            "script.evaluate", expression=script, target=target, awaitPromise=True
        )
        if found["type"] == "exception":
            raise BidiError(found["exceptionDetails"]["text"])
        return json.loads(found["result"]["value"])[0]

    def close(self) -> None:
        """Close the window."""
        del self._browser.pages[self.context]
        self._browser.ask("browsingContext.close", context=self.context)


class Firefox:
    """A headless Firefox."""

    def __init__(self, wire: Socket) -> None:
        self._socket = wire
        self._number = 0
        self.pages: dict[str, Page] = {}
        self.ask("session.new", capabilities={})
        self.ask("session.subscribe", events=["log.entryAdded"])

    def ask(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its answer. Errors of pages may come before it."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._number:
                break
            if message["type"] == "event":
                self._hear(message["params"])
        if message["type"] == "error":
            raise BidiError(f"{method}: {message['message']}")
        return message["result"]

    def _hear(self, entry: Any) -> None:
        page = self.pages.get(entry["source"].get("context"))
        if page is not None and entry["level"] in ("error", "warn"):
            page.listeners["pageerror"](entry["text"])

    def close(self) -> None:
        """End a context, which Firefox does with its last page."""

    def new_page(self, **_: Any) -> Page:
        """Open a window with a blank page. The options of playwright's pages have no effect."""
        return Page(self, None)

    def new_context(self, **_: Any) -> Firefox:
        """Return the browser, in which all pages share what they store."""
        return self


@contextmanager
def firefox(profile: Path) -> Iterator[Firefox]:
    """Start the system's Firefox with a new profile, or skip the test where it is missing."""
    path = shutil.which("firefox-esr") or shutil.which("firefox")
    if path is None:
        pytest.skip("firefox is not installed")
    lines = (f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in PREFERENCES.items())
    (profile / "user.js").write_text("".join(lines))
    command = [path, "--headless", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(
        [*command, "--remote-debugging-port=0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        found = (re.search(r"listening on ws://\S+:(\d+)", line) for line in process.stderr)
        port = next(filter(None, found), None)
        if port is None:
            pytest.skip("firefox does not start")
        with closing(Socket(int(port[1]), "/session")) as wire:
            browser = Firefox(wire)
            yield browser
            browser.ask("browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()
        process.communicate()
