"""Measure how the web page keeps up with a fast engine.

    python scripts/page_load.py                                     # 1,000 steps/s for ten minutes
    python scripts/page_load.py --seconds 10 --steps-per-second 500

A stand-in server sends the page the records of an engine that decodes ten sequences, with ten
events in a step, ten times a second as the real one does. The first line of the output is the
memory of the browser's renderer process while it shows an empty page. Each further line is one
interval: frames a second, the slowest redraw, the JavaScript heap after a garbage collection, the
nodes of its document, and the memory of the whole renderer process. At the end the page's cells
must be those that were sent. The last line says so, with the worst intervals. It needs playwright
and chromium.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mie.events.page.assets import assets
from mie.events.page.cells import encode
from mie.events.page.records import COLUMNS, PAGE_VERSION, SHOWN

NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE = 10, 4096, 16
LONGEST = 200
"""Blocks of a sequence at most. Then it ends, and another one begins."""
BATCHES = 10
"""Batches a second, of at most as many records each."""
KEY_EVERY = 250
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run")
INTERVAL = 5.0


class Engine:
    """The cells of an engine that only decodes, and the records of its steps."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._free = list(range(NUM_BLOCKS))
        self.step = 0
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self._number = 0

    def head(self) -> dict[str, Any]:
        sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "num_host_blocks": 0}
        what = {"record": "head", "version": PAGE_VERSION, "source": "live", "name": "load"}
        return {**what, **sizes, "columns": COLUMNS, "fields": dict(SHOWN), "first": 0}

    def key(self) -> dict[str, Any]:
        blocks = [
            self._cell(name, i) for name in self.tables for i in range(len(self.tables[name]))
        ]
        tables = {name: [0, table] for name, table in self.tables.items()}
        seqs = {name: self._seq(name) for name in self.tables}
        cells = {"blocks": blocks, "seqs": seqs, "tables": tables, "host": {}, "tree": {}}
        return {"record": "key", "step": self.step, **cells, "heat": {}, "totals": {}}

    def steps(self, count: int) -> dict[str, Any]:
        """Return the record of the next steps."""
        cells: dict[str, Any] = {"blocks": {}, "seqs": {}, "gone": [], "tables": {}}
        new: set[str] = set()
        steps = [self._step(cells, new) for _ in range(count)]
        for name, start in cells["tables"].items():
            cells["tables"][name] = [start, self.tables[name][start:]]
        for name in cells["seqs"]:
            cells["seqs"][name] = self._seq(name)
        cells["blocks"] = list(cells["blocks"].values())
        return {"record": "steps", "steps": steps, "set": cells}

    def _step(self, cells: dict[str, Any], new: set[str]) -> dict[str, Any]:
        self.step += 1
        events: list[Any] = []
        for name in [name for name, table in self.tables.items() if len(table) >= LONGEST]:
            for block in self.tables.pop(name):
                self._free.append(block)
                cells["blocks"][block] = [block, 0, 0, 0]
            events.append(["finish", name, "length"])
            cells["seqs"].pop(name, None)
            cells["tables"].pop(name, None)
            if name not in new:
                cells["gone"].append(name)
        while len(self.tables) < NUM_SEQS:
            name = f"{self._number}.0"
            self.tables[name], self.computed[name] = [], 0
            new.add(name)
            events += [
                ["add", f"load-{self._number}", self._number, self._number, 1, 1, None],
                ["admit", name, len(self.tables) - 1, 1, 0],
            ]
            self._number += 1
        for name, table in self.tables.items():
            if self.computed[name] % BLOCK_SIZE == 0:
                block = self._free.pop(self._random.randrange(len(self._free)))
                cells["tables"].setdefault(name, len(table))
                table.append(block)
            self.computed[name] += 1
            cells["blocks"][table[-1]] = self._cell(name, len(table) - 1)
            cells["seqs"][name] = None
        names = list(self.tables)
        events += [["decode", [name]] for name in names]
        numbers = {"step": self.step, "num_running": NUM_SEQS, "num_decode_tokens": NUM_SEQS}
        row = {**dict.fromkeys(COLUMNS, 0), **numbers, "seconds": 0.001, "run_seconds": 0.001}
        row["num_blocks_used"] = NUM_BLOCKS - len(self._free)
        return {"row": list(row.values()), "events": events}

    def _cell(self, name: str, index: int) -> list[int]:
        fill = min(BLOCK_SIZE, self.computed[name] - index * BLOCK_SIZE)
        return [self.tables[name][index], 1, 1, fill]

    def _seq(self, name: str) -> dict[str, Any]:
        number = int(name.split(".")[0])
        sizes = {"num_prompt": 1, "num_tokens": self.computed[name] + 1, "n": 1, "rank": number}
        what = {"request_id": f"load-{number}", "state": "running", "max_tokens": None}
        return {**what, **sizes, "num_computed": self.computed[name], "row": number % NUM_SEQS}


class StandIn(ThreadingHTTPServer):
    """Serves the page's files, and one live stream."""

    daemon_threads = True

    def __init__(self, seconds: float, rate: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = Engine()
        self.seconds, self.rate = seconds, rate
        self.is_over = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = "index.html" if path == "/" else path.removeprefix("/mie/page/")
        if path == "/mie/events":
            self._stream()
        elif path == "/mie/config":
            limits = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": 4096}
            config = {"model": "load", "runs": [], "limits": limits, "may_read_text": False}
            self._send(encode(config).encode(), "application/json")
        elif name in assets():
            self._send(assets()[name].content, assets()[name].media_type)
        else:
            self._send(encode(self.server.engine.head()).encode(), "application/x-ndjson")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        server, engine = self.server, self.server.engine
        self._event(engine.head(), engine.key())
        start = time.monotonic()
        per_record = max(1, server.rate // BATCHES // BATCHES)
        for batch in range(1, round(server.seconds * BATCHES) + 1):
            due = batch * server.rate // BATCHES
            while engine.step < due:
                before = engine.step // KEY_EVERY
                self._event(engine.steps(min(per_record, due - engine.step)))
                if engine.step // KEY_EVERY > before:
                    self._event(engine.key())
            time.sleep(max(0.0, start + batch / BATCHES - time.monotonic()))
        server.is_over.set()
        time.sleep(3600)

    def _event(self, *records: dict[str, Any]) -> None:
        for record in records:
            self.wfile.write(f"event: {record['record']}\ndata: {encode(record)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


COUNT_FRAMES = """seconds => new Promise(resolve => {
    mie.frames.slowest = 0;
    let [count, start] = [0, performance.now()];
    const tick = now => {
        count += 1;
        if (now - start < seconds * 1000) return void requestAnimationFrame(tick);
        resolve({frames: count * 1000 / (now - start), slowest: mie.frames.slowest});
    };
    requestAnimationFrame(tick);
})"""


def renderer_megabytes(session: Any) -> float:
    """Return the resident memory of the largest renderer, with the code that it shares."""
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    renderers = [each["id"] for each in processes if each["type"] == "renderer"]
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in renderers]
    return max(pages) * 4096 / 1e6


def main(arguments: Sequence[str]) -> int:
    """Run the load, and return 1 if the page shows anything else than the cells that were sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps-per-second", type=int, default=1000)
    args = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    server = StandIn(args.seconds, args.steps_per_second)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        options: dict[str, Any] = {"executable_path": "/usr/bin/chromium", "args": [*FLAGS]}
        browser = playwright.chromium.launch(**options)
        processes = browser.new_browser_cdp_session()
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        print(json.dumps({"empty_renderer_mb": round(renderer_megabytes(processes), 1)}))
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.wait_for_timeout(1000)
        lines: list[dict[str, float]] = []
        while not server.is_over.is_set():
            shown = page.evaluate(COUNT_FRAMES, INTERVAL)
            session.send("HeapProfiler.collectGarbage")
            metrics = session.send("Performance.getMetrics")["metrics"]
            found = {each["name"]: each["value"] for each in metrics}
            state = {"step": page.evaluate("mie.store.step"), "sent": server.engine.step}
            numbers = {"frames_per_second": shown["frames"], "slowest_redraw_ms": shown["slowest"]}
            sizes = {"heap_mb": found["JSHeapUsedSize"] / 1e6, "nodes": found["Nodes"]}
            line = {**state, **numbers, **sizes, "renderer_mb": renderer_megabytes(processes)}
            lines.append(line)
            print(json.dumps({name: round(value, 1) for name, value in line.items()}), flush=True)
        while page.evaluate("mie.store.run.last") < server.engine.step:
            page.wait_for_timeout(100)
        page.wait_for_timeout(500)
        state = page.evaluate("mie.state()")
        browser.close()
    tables = {name: [0, table] for name, table in server.engine.tables.items()}
    blocks = sorted(server.engine.key()["blocks"])
    is_right = state["tables"] == tables and state["blocks"] == blocks
    limits = {"least_frames_per_second": min(each["frames_per_second"] for each in lines)}
    for name in ("heap_mb", "renderer_mb"):
        limits[f"most_{name}"] = max(each[name] for each in lines)
    rounded = {name: round(value, 1) for name, value in limits.items()}
    print(json.dumps({"is_right": is_right, "errors": errors, **rounded}))
    return 0 if is_right and not errors else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
