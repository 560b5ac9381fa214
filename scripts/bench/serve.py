"""Measure HTTP: streams of `mie serve` beside `LLM.generate`, and beside other servers.

    python scripts/benchmark.py serve [--models bundled SmolLM2-135M] [--clients 16 64]
        [--python transformers=VENV/bin/python] [--python llama.cpp=VENV/bin/python]

`LLM.generate` runs in this process. Each server runs alone, in the environment that has it; those
that are not installed are left out. All have the same weights in float32 and get the same prompts.
As many clients as the table says ask at once, each for one streamed answer of ``/v1/completions``.
The numbers are tokens per second until the last answer ended: medians of the rounds (least–most).
`mie serve` and `LLM` have the same settings and must give the same text.

Two lines follow for mie: the time to the first token of one request on an idle engine, offline and
over HTTP, and the gaps between the chunks of 16 streams.

SmolLM2-135M is its published shape with random weights. transformers serves with continuous
batching, and llama.cpp's Python server answers one request at a time.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.child import Child
from bench.engines import EngineSpec
from bench.harness import ROOT, Spread, machine, parser_of, user_environment
from bench.models import BUNDLED, SHAPES, write_model
from mie import LLM, RequestOutputKind, SamplingParams

START_SECONDS = 240
SETTINGS: dict[str, Any] = {"max_model_len": 512, "generation_config": "vllm", "dtype": "float32"}
SAMPLING: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Server:
    """How a server is started and asked."""

    module: str
    """The module that its environment must have."""
    command: str
    """Command line after the interpreter; {model}, {gguf}, {port} and more are filled in."""
    health: str = "/health"
    """A route that answers when the server is ready."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a request that it understands, beside OpenAI's."""


SERVERS = {
    "mie": Server(
        module="mie",
        command="-m mie serve {model} --port {port} --max-num-seqs {clients} --max-model-len 512"
        " --generation-config vllm --dtype float32",
        options={"ignore_eos": True, "stream_options": {"include_usage": True}},
    ),
    "transformers": Server(
        module="transformers",
        # It would otherwise take most of the machine's memory for its KV cache.
        command="-m transformers.cli.transformers serve {model} --port {port} --dtype float32"
        " --device cpu --continuous-batching --cb-block-size 32 --cb-num-blocks 512"
        " --cb-max-batch-tokens 1024",
    ),
    "llama.cpp": Server(
        module="llama_cpp.server",
        # A new request would otherwise end the running request.
        command="-m llama_cpp.server --model {gguf} --port {port} --n_ctx 512"
        " --n_threads {threads} --n_threads_batch {threads} --interrupt_requests false",
        health="/v1/models",
    ),
}


@contextmanager
def running(server: Server, python: str, values: Mapping[str, Any], log: Path) -> Iterator[int]:
    """Run a server, and yield its port when it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {**values, "port": port, "threads": len(os.sched_getaffinity(0))}
    command = [python, *(word.format(**values) for word in server.command.split())]
    environment = {**user_environment(), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{server.health}", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    said = log.read_text(errors="replace")[-3000:]
                    raise SystemExit(f"{server.module} did not start:\n{said}") from None
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Client(asyncio.Protocol):
    """Sends one request, and keeps the pieces of the answer with their times."""

    def __init__(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        self._request = head.encode() + data
        self.done = asyncio.get_running_loop().create_future()
        self.pieces: list[bytes] = []
        self.times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Keep a piece."""
        self.pieces.append(data)
        self.times.append(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer."""
        self.done.set_result(None)

    def answer(self) -> tuple[str, int]:
        """Return the text, and the number of its tokens: from its usage, or one for each chunk."""
        lines = b"".join(self.pieces).split(b"\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        if not any(choice.get("finish_reason") for choice in choices):
            raise SystemExit(f"an answer is incomplete: {b''.join(self.pieces)[-2000:]!r}")
        texts = [choice["text"] for choice in choices if choice.get("text")]
        usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        return "".join(texts), usage[-1]["completion_tokens"] if usage else len(texts)

    def arrivals(self) -> list[float]:
        """Return when each chunk with text came."""
        return [t for t, p in zip(self.times, self.pieces, strict=True) if b'"text"' in p]


async def stream_all(port: int, bodies: Sequence[dict[str, Any]]) -> list[Client]:
    """Run one connection for each body, all at once."""
    loop = asyncio.get_running_loop()
    clients = [Client(body) for body in bodies]
    for client in clients:
        await loop.create_connection(lambda each=client: each, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(client.done for client in clients))
    return clients


def prompts_of(count: int) -> list[str]:
    """Return short prompts that differ."""
    return [f"Tell me story number {number}" for number in range(count)]


Measured = tuple[list[str], float]
"""The texts of a round, and its tokens per second."""


def ask(name: str, model: str, port: int, count: int, tokens: int) -> Measured:
    """Send a request to a server from each client."""
    common = {"model": model, "stream": True, "temperature": 0, "max_tokens": tokens}
    bodies = [{**common, **SERVERS[name].options, "prompt": each} for each in prompts_of(count)]
    begin = time.perf_counter()
    clients = asyncio.run(stream_all(port, bodies))
    seconds = time.perf_counter() - begin
    answers = [client.answer() for client in clients]
    return [text for text, _ in answers], sum(number for _, number in answers) / seconds


def offline(llm: LLM, count: int, tokens: int) -> Measured:
    """Generate for as many prompts."""
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**SAMPLING, max_tokens=tokens, output_kind=kind)
    begin = time.perf_counter()
    outputs = llm.generate(prompts_of(count), params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return [output.outputs[0].text for output in outputs], count * tokens / seconds


def compare(model: str, args: argparse.Namespace) -> None:
    """Print the rows of one model."""
    print(f"\n{model}, tokens/s at {args.clients} clients", flush=True)
    with tempfile.TemporaryDirectory(prefix="mie-bench-") as folder:
        directory = Path(folder, "model")
        spec = EngineSpec(
            family="llama.cpp",
            kind="F32",
            directory=str(directory),
            max_num_seqs=1,
            max_model_len=512,
            prepare=True,
        )
        write_model(model, directory)
        config = json.loads((directory / "config.json").read_text())
        config |= {"eos_token_id": None, "bos_token_id": None}  # no answer ends early
        (directory / "config.json").write_text(json.dumps(config))
        most = max(args.clients)
        llm = LLM(directory, **SETTINGS, max_num_seqs=most, batch_invariant=True)
        offline(llm, 2, 4)
        texts = row("LLM", args, lambda count: offline(llm, count, args.tokens))
        for name in args.servers:
            server, python = SERVERS[name], args.python.get(name, sys.executable)
            has = subprocess.run(
                [python, "-c", f"import {server.module}"], capture_output=True, cwd=ROOT
            )
            if has.returncode:
                print(f"| {name} | left out: {python} has no {server.module} |", flush=True)
                continue
            if name == "llama.cpp":
                Child(spec, python).close()
            values = {"model": directory, "gguf": spec.converted, "clients": most}
            with running(server, python, values, Path(folder, "log")) as port:
                ask(name, str(directory), port, 2, 4)
                found = row(
                    name,
                    args,
                    lambda count, name=name, port=port: ask(  # type: ignore[misc]
                        name, str(directory), port, count, args.tokens
                    ),
                )
                if name == "mie":
                    assert found == texts, "HTTP and LLM.generate gave other texts"
                    print_latencies(llm, port)


def row(name: str, args: argparse.Namespace, measure: Any) -> list[list[str]]:
    """Print a row, and return the texts of the last round of each number of clients."""
    cells, texts = [], []
    for count in args.clients:
        rounds = [measure(count) for _ in range(args.rounds)]
        cells.append(str(Spread.of(rate for _, rate in rounds)))
        texts.append(rounds[-1][0])
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return texts


def print_latencies(llm: LLM, port: int) -> None:
    """Print the first token of one request on an idle engine, and gaps between chunks."""
    here, there, gaps = [], [], []
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "skip_reading_prefix_cache": True}
    for prompt in prompts_of(20):
        begin = time.perf_counter()
        stream = llm.stream(prompt, SamplingParams(**params))
        next(stream)
        here.append(1000 * (time.perf_counter() - begin))
        stream.close()
        begin = time.perf_counter()
        [client] = asyncio.run(stream_all(port, [{"prompt": prompt, "stream": True, **params}]))
        there.append(1000 * (client.arrivals()[0] - begin))
    common = {**SAMPLING, "stream": True, "max_tokens": 32}
    bodies = [{**common, "prompt": prompt} for prompt in prompts_of(16)]
    for _ in range(3):
        clients = asyncio.run(stream_all(port, bodies))
        times = [arrivals for client in clients if (arrivals := client.arrivals())]
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        for each in times:
            gaps += [1000 * (b - a) for a, b in pairwise(each) if begin <= a and b < end]
    first = " and ".join(f"{statistics.median(each):.1f}" for each in (here, there))
    print(f"first token of an idle request: {first} ms, offline and over HTTP")
    if not gaps:
        print("gaps between chunks: none, because no two chunks came while all streams ran")
        return
    p50, p99 = (sorted(gaps)[len(gaps) * share // 100] for share in (50, 99))
    print(f"gaps between the chunks of 16 streams: p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)


def main(argv: Sequence[str]) -> None:
    """Measure each model."""
    parser = parser_of("serve", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=[*SHAPES, BUNDLED], default=[BUNDLED, "SmolLM2-135M"])
    add("--servers", nargs="+", choices=SERVERS, default=[*SERVERS])
    add("--python", action="append", default=[], metavar="NAME=PATH", help="its interpreter")
    add("--clients", type=int, nargs="+", default=[16, 64])
    add("--tokens", type=int, default=32, help="new tokens of each answer")
    add("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    args.python = dict(each.split("=", 1) for each in args.python)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    for model in args.models:
        compare(model, args)
