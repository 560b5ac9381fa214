"""Measure the cost of HTTP: concurrent streams of `mie serve` beside `LLM.generate`.

    python scripts/bench_serve_callers.py [--streams 64] [--tokens 128] [--rounds 5]

The server runs in a separate process, and `LLM.generate` in this one, by turns. Both have the
same settings, get the same prompts and must give the same text. Every stream has a separate
connection, and a client that only looks for the end of the answer. SmolLM2-135M is its published
shape with random weights, and a tokenizer of as many words. The table has the median tokens per
second of both, and the median and the range of the ratios of neighbouring turns. Three times are
below it: from launch to the first answer of /version, to the first token of one idle request, and
between the tokens of 16 streams. The second is beside the offline one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.cpu.shapes import LLAMA, SHAPES

from mie import LLM, RequestOutputKind, SamplingParams

ROOT = Path(__file__).parent.parent
PROMPTS = ("Once upon a time", "Tell me a story about Mia the fox", "The old mill by the lake")


def write_model(model: str, folder: Path) -> str:
    """Write a model's configuration and tokenizer, and return its directory or name."""
    if model == "bundled":
        return model
    config = {**LLAMA, **SHAPES[model]}
    (folder / "config.json").write_text(json.dumps(config))
    words = [f"Ġw{i}" for i in range(config["vocab_size"])]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def prompts_of(model: str, count: int) -> list[Any]:
    """Return prompts that differ."""
    if model == "bundled":
        return [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return [[5 + i, 6, 7, 8, 9, 10, 11, 12] for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that answers."""

    port: int
    process_id: int
    ready: float
    """Seconds from its launch to its first answer."""

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(arguments: list[str]) -> Iterator[Served]:
    """Run a server until the context ends."""
    command = [sys.executable, "-m", "mie", "serve", "--port", "0", *arguments]
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on" in line:
                port = int(line.rstrip().rstrip("]").rpartition(":")[2])
                break
        else:
            raise SystemExit("the server did not start")
        # The server waits when nothing reads its log.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version") as answer:
            answer.read()
        yield Served(port=port, process_id=process.pid, ready=time.perf_counter() - begin)
    finally:
        process.terminate()
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
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self.times.append(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)

    def text(self) -> str:
        """Return the text of all chunks, whose HTTP framing has separate lines."""
        answer = b"".join(self.pieces)
        assert b"data: [DONE]" in answer, answer[:500]
        lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
        chunks = [json.loads(line[6:]) for line in lines]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    def arrivals(self) -> list[float]:
        """Return when each chunk with text came."""
        return [t for t, p in zip(self.times, self.pieces, strict=True) if b'"text"' in p]


async def stream_all(port: int, bodies: list[dict[str, Any]]) -> list[Client]:
    """Run one connection for each body, all at once."""
    loop = asyncio.get_running_loop()
    clients = [Client(body) for body in bodies]
    for client in clients:
        await loop.create_connection(lambda each=client: each, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(client.done for client in clients))
    return clients


def measure(
    model: str, streams: int, tokens: int, rounds: int, batch_invariant: bool, chunks: float
) -> None:
    """Print the rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        name = write_model(model, Path(folder))
        settings: dict[str, Any] = {
            "max_num_seqs": streams,
            "max_model_len": 512,
            "generation_config": "vllm",
        }
        if model != "bundled":
            settings["load_format"] = "dummy"
        options = [
            part
            for key, value in settings.items()
            for part in (f"--{key.replace('_', '-')}", str(value))
        ]
        options.append("--batch-invariant" if batch_invariant else "--no-batch-invariant")
        options += ["--max-chunks-per-second", str(chunks)]
        llm = LLM(name, **settings, batch_invariant=batch_invariant)
        sampling: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        prompts = prompts_of(model, streams)
        bodies = [{"prompt": prompt, "stream": True, **sampling} for prompt in prompts]
        with serving([name, *options]) as server:
            ratios: list[float] = []
            speeds: tuple[list[float], list[float]] = ([], [])
            cpu: tuple[list[float], list[float]] = ([], [])
            for turn in range(rounds + 1):  # the first warms up
                own, served = time.process_time(), server.cpu_seconds()
                begin = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                middle = time.perf_counter()
                own = time.process_time() - own
                clients = asyncio.run(stream_all(server.port, bodies))
                end = time.perf_counter()
                served = server.cpu_seconds() - served
                texts = [output.outputs[0].text for output in outputs]
                assert [client.text() for client in clients] == texts
                if turn:
                    speeds[0].append(streams * tokens / (middle - begin))
                    speeds[1].append(streams * tokens / (end - middle))
                    ratios.append((middle - begin) / (end - middle))
                    cpu[0].append(own / (streams * tokens) * 1e6)
                    cpu[1].append(served / (streams * tokens) * 1e6)
            medians = "".join(f"{statistics.median(each):>12.0f}" for each in speeds)
            spread = f"{min(ratios):.2f} … {max(ratios):.2f}"
            times = " and ".join(f"{statistics.median(each):.0f}" for each in cpu)
            print(f"{model:<16}{medians}{statistics.median(ratios):>8.2f}   {spread}")
            print(f"  CPU time for 1,000 tokens: {times} ms")
            print(f"  ready after {server.ready:.2f} s")
            print_first_tokens(llm, server.port, prompts[0])
            print_gaps(server.port, bodies[:16])
            sys.stdout.flush()


def print_first_tokens(llm: LLM, port: int, prompt: Any) -> None:
    """Print the time to the first token of one request on an idle engine, here and there."""
    here, there = [], []
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "skip_reading_prefix_cache": True}
    for _ in range(20):
        begin = time.perf_counter()
        stream = llm.stream(prompt, SamplingParams(**params))
        next(stream)
        here.append(time.perf_counter() - begin)
        stream.close()
        begin = time.perf_counter()
        [client] = asyncio.run(stream_all(port, [{"prompt": prompt, "stream": True, **params}]))
        there.append(client.arrivals()[0] - begin)
    a, b = (1000 * statistics.median(each) for each in (here, there))
    print(f"  first token of an idle request: {a:.1f} ms offline, {b:.1f} ms over HTTP")


def print_gaps(port: int, bodies: list[dict[str, Any]]) -> None:
    """Print the gaps between the chunks of a few streams while all of them run."""
    gaps: list[float] = []
    for _ in range(3):
        clients = asyncio.run(stream_all(port, bodies))
        all_times = [client.arrivals() for client in clients]
        begin, end = max(times[0] for times in all_times), min(times[-1] for times in all_times)
        for times in all_times:
            gaps += [1000 * (b - a) for a, b in pairwise(times) if begin <= a and b < end]
    gaps.sort()
    p50, p99 = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
    print(
        f"  between chunks of {len(bodies)} streams: p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
        f"{p99 / p50:.2f} x ({len(gaps)} gaps)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument(
        "--tokens", type=int, help="new tokens of each (default: 128, and 32 of a larger model)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--models", nargs="+", default=["bundled", "SmolLM2-135M"])
    parser.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether both keep a request's bits under any load, as mie serve does by default",
    )
    parser.add_argument(
        "--max-chunks-per-second", type=float, default=2000, help="the option of mie serve"
    )
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(f"{'model':<16}{'LLM':>12}{'HTTP':>12}{'ratio':>8}   range", flush=True)
    for model in args.models:
        tokens = args.tokens or (128 if model == "bundled" else 32)
        chunks = args.max_chunks_per_second
        measure(model, args.streams, tokens, args.rounds, args.batch_invariant, chunks)


if __name__ == "__main__":
    tuning = [name for name in os.environ if name.startswith("OPENBLAS_")]
    if tuning:  # NumPy has read them already
        environment = {name: value for name, value in os.environ.items() if name not in tuning}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    main()
