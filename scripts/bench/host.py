"""Measure the host's cost of a step of many decodes, with a backend that computes nothing.

    python scripts/benchmark.py host [--requests 64] [--rounds 3] [--compare CHECKOUT]
                                     [--output PREFIX]

The bundled model's engine runs with the real runner, and its sampled tokens spell a text. Every
figure is CPU time (`time.thread_time`) of one thread, without a tokenizer's and a model's start:

    engine       `Engine.step` alone, without text
    final only   the steps of `LLM.generate`, whose outputs are made at the end
    delta        `LLM.step`, with an output of the new text for each request
    cumulative   `LLM.step`, with an output of the whole text for each request
    server       a step of `mie serve` with as many streams: the engine's thread and the event loop,
                 from the request's route to the bytes of a chunk, without sockets

A figure is the least over windows of 16 steps, and so hardly depends on what else the machine
computes. With --compare, another checkout of mie is measured in turns, each in a process of its
own, and the figures are the least of the rounds.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.harness import ROOT, in_turn, machine, parser_of, run_child, table, write_report

WINDOW = 16
"""Steps in a window: each sequence gets one block in it."""
NUM_WINDOWS = 24
PROMPT = "Once upon a time, in a village by the sea, there was a girl who loved"
TEXT = "The café — naïve, yes — sold 42 “crêpes” to Zoë; 日本語 and 🎉 were on its sign. "
DEVICE_SECONDS = 0.004
"""Time that the server's engine waits for its device in each step, so that streams keep up."""
PARTS = ("schedule", "pack", "collect", "update", "rest of Engine.step", "text", "outputs", "loop")
PATHS = ("engine", "final only", "delta", "cumulative", "server")


class NullBackend:
    """Answers every step with the next tokens of a text. It computes nothing."""

    is_asynchronous = False
    has_decode_kernels = False

    def __init__(self, token_ids: Sequence[int], seconds: float = 0.0) -> None:
        self._token_ids = token_ids
        self._seconds = seconds
        self._at = 0

    def run_step(self, forward: object, batch: object) -> list[None]:
        """Return no logits."""
        return []

    def start_sample(self, logits: object, controls: Sequence[object]) -> int:
        """Return the number of tokens to draw."""
        return len(controls)

    def finish_sample(self, drawn: int) -> list[int]:
        """Return the tokens, after the time of a device."""
        if self._seconds:
            time.sleep(self._seconds)
        self._at = (self._at + 1) % (len(self._token_ids) - drawn)
        return list(self._token_ids[self._at : self._at + drawn])

    def move_blocks(self, *caches_and_ids: object) -> None:
        """Move nothing."""


class Watch:
    """Adds up the CPU time of an object's methods, each by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, owner: Any, method: str) -> None:
        """Measure a method from now on."""
        function, seconds = getattr(owner, method), self.seconds
        seconds[name] = 0.0

        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.thread_time() - begin

        setattr(owner, method, measured)


def load(kind: str, num_requests: int, seconds: float = 0.0) -> Any:
    """Return an `LLM`, or the `AsyncLLM` of a server, with a null backend."""
    from mie import LLM, AsyncLLM
    from mie.engine.runner import ModelRunner

    llm = (AsyncLLM if kind == "server" else LLM)(
        "bundled",
        backend="numpy",
        num_blocks=num_requests * 40,
        max_num_seqs=num_requests,
        max_num_batched_tokens=1 << 14,
        num_threads=1,
        generation_config="vllm",
    )
    engine, tokenizer = llm.loop.engine, llm.loop.processor._tokenizer
    assert tokenizer is not None
    token_ids = tokenizer.encode(TEXT * 8, add_special_tokens=False)
    token_ids = [each for each in token_ids if each not in engine.eos_token_ids]
    backend = NullBackend(token_ids * (num_requests // len(token_ids) + 2), seconds)
    decoder: Any = SimpleNamespace(backend=backend, forward=dict, adapters=None)  # never called
    engine.runner = ModelRunner(
        decoder,
        kv_cache=None,
        block_size=engine.config.block_size,
        max_num_seqs=num_requests,
        max_blocks_per_seq=-(-engine.max_model_len // engine.config.block_size),
    )
    return llm


def steps_of(path: str, num_requests: int) -> tuple[Callable[[], object], Watch]:
    """Return a step of requests that all decode, and the watch of its parts."""
    from mie import RequestOutputKind, SamplingParams

    llm, watch = load(path, num_requests), Watch()
    kind = {"delta": RequestOutputKind.DELTA, "final only": RequestOutputKind.FINAL_ONLY}
    params = SamplingParams(
        temperature=0,
        ignore_eos=True,
        max_tokens=llm.engine.max_model_len - 64,
        output_kind=kind.get(path, RequestOutputKind.CUMULATIVE),
    )
    for number in range(num_requests):
        prompt = PROMPT + " stories" * (number % 16)
        if path == "engine":
            llm.engine.add_request(llm.tokenizer.encode(prompt), params)
        else:
            llm.add_request(prompt, params)
    engine, loop = llm.engine, llm.loop
    watch.add("schedule", engine.scheduler, "schedule")
    watch.add("pack", engine.runner, "launch")
    watch.add("collect", engine.runner, "collect")
    watch.add("update", engine.scheduler, "update")
    watch.add("engine", engine, "step")
    watch.add("text", loop.processor, "process")
    watch.add("outputs", llm.llm_engine._collector, "take")
    step = llm.step
    if path == "engine":
        step = engine.step
    while any(seq.num_generated < 32 for seq in _sequences(engine)):
        step()
    return step, watch


def _sequences(engine: Any) -> list[Any]:
    return [seq for request in engine.requests for seq in request.sequences]


def measure_steps(path: str, num_requests: int) -> dict[str, float]:
    """Return the seconds of a step and of its parts, of the window that took least."""
    step, watch = steps_of(path, num_requests)
    least: dict[str, float] = {"step": float("inf")}
    gc.collect()
    for _ in range(NUM_WINDOWS):
        before = dict(watch.seconds)
        begin = time.thread_time()
        for _ in range(WINDOW):
            step()
        whole = time.thread_time() - begin
        if whole < least["step"]:
            parts = {name: each - before[name] for name, each in watch.seconds.items()}
            inner = sum(parts[name] for name in ("schedule", "pack", "collect", "update"))
            if path == "engine":
                parts["engine"] = whole
            parts["rest of Engine.step"] = parts["engine"] - inner
            parts["loop"] = whole - parts.pop("engine") - parts["text"] - parts["outputs"]
            least = {"step": whole, **parts}
    return {name: seconds / WINDOW for name, seconds in least.items()}


async def _stream(app: Any, number: int, is_begun: asyncio.Event) -> int:
    """Run one streamed chat, and return the number of its chunks."""
    messages = [{"role": "user", "content": PROMPT + " stories" * (number % 16)}]
    body = {"messages": messages, "stream": True, "temperature": 0, "ignore_eos": True}
    data = json.dumps({"model": "bundled", **body, "max_tokens": 384}).encode()
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    given, num_chunks, status = [{"type": "http.request", "body": data}], 0, []

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await asyncio.Event().wait()
        raise AssertionError("the client never disconnects")

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_chunks
        status.append(message.get("status", 200))
        num_chunks += message["type"] == "http.response.body"
        if num_chunks > 1:
            is_begun.set()

    await app(scope, receive, send)
    assert {*status} == {200}, f"the server answered {status}"
    return num_chunks


async def _serve(llm: Any, num_requests: int) -> dict[str, float]:
    from mie.serve.app import create_app

    app = create_app(llm)
    async with app.router.lifespan_context(app):
        begun = [asyncio.Event() for _ in range(num_requests)]
        streams = [asyncio.create_task(_stream(app, *each)) for each in enumerate(begun)]
        for event in begun:
            await event.wait()
        loop, least, num_chunks = llm.loop, float("inf"), 0
        for _ in range(NUM_WINDOWS // 2):
            first, begin = loop.num_turns, time.process_time()
            while loop.num_turns < first + WINDOW:
                await asyncio.sleep(DEVICE_SECONDS)
            least = min(least, (time.process_time() - begin) / (loop.num_turns - first))
        num_chunks = sum(await asyncio.gather(*streams))
    return {"step": least, "tokens a chunk": 384 * num_requests / num_chunks}


def measure(request: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of one path, as the checkout ``root`` computes it."""
    sys.path.insert(0, request["root"])
    path, num_requests = request["path"], request["requests"]
    if path == "server":
        llm = load(path, num_requests, DEVICE_SECONDS)
        found = asyncio.run(_serve(llm, num_requests))
        llm.shutdown()
        return found
    return measure_steps(path, num_requests)


def main(argv: Sequence[str]) -> None:
    """Measure, and print and write the tables."""
    parser = parser_of("host", __doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compare", metavar="CHECKOUT", type=Path, help="measure it in turns, too")
    parser.add_argument("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args(argv)
    checkouts = {"this checkout": ROOT}
    if args.compare is not None:
        checkouts["the other checkout"] = args.compare.resolve()
    state = {**machine(), "requests": args.requests}
    least: dict[str, dict[str, Any]] = {name: {} for name in checkouts}
    for turn in range(args.rounds):
        for path in args.paths:
            for name, root in in_turn(checkouts.items(), turn):
                request = {"root": str(root), "path": path, "requests": args.requests}
                found = run_child("bench.host", request)
                known = least[name].setdefault(path, found)
                least[name][path] = min(known, found, key=lambda each: each["step"])
    lines = [f"* {key}: {value}" for key, value in state.items()]
    for name, found in least.items():
        rows = [
            (path, *(_micros(parts.get(each)) for each in ("step", *PARTS)))
            for path, parts in found.items()
        ]
        lines += ["", f"### {name}", "", *table(("of a step, µs", "all", *PARTS), rows)]
    write_report(args.output, {"state": state, "seconds": least}, lines)


def _micros(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.0f}"


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
