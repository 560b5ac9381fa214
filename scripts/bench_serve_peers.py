"""Measure `mie serve` beside `transformers serve` and llama.cpp's Python server.

    python scripts/bench_serve_peers.py --python transformers=VENV/bin/python \\
        --python llama.cpp=VENV/bin/python [--clients 16 64] [--tokens 32]

Each server runs alone, one after another, in the environment that has it, with the same weights:
SmolLM2-135M's published shape with random numbers, in float32. As many clients as the table says
ask at once, each for one streamed answer of a few tokens to a different short prompt. The numbers
are tokens per second until the last answer ended: the median of the rounds, and their range.
Servers that are not installed are left out.

All have ``/v1/completions``. transformers serves with continuous batching, and llama.cpp's Python
server answers one request at a time.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cpu.shapes import write_model
from bench.harness import user_environment
from bench_serve_callers import stream_all

ROOT = Path(__file__).parent.parent
MODEL = "SmolLM2-135M"
START_SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How a server is started and asked."""

    module: str
    """The module that its environment must have."""
    arguments: tuple[str, ...]
    """Its command line after the interpreter; {model}, {gguf} and {port} are filled in."""
    health: str
    """A route that answers when the server is ready."""
    options: Mapping[str, Any]
    """Fields of a request that it understands, beside OpenAI's."""


PEERS = {
    "mie": Peer(
        module="mie",
        arguments=(
            *("-m", "mie", "serve", "{model}", "--port", "{port}", "--max-num-seqs", "64"),
            *("--max-model-len", "512", "--dtype", "float32"),
        ),
        health="/health",
        options={"ignore_eos": True, "stream_options": {"include_usage": True}},
    ),
    "transformers": Peer(
        module="transformers",
        arguments=(
            *("-m", "transformers.cli.transformers", "serve", "{model}", "--port", "{port}"),
            *("--dtype", "float32", "--device", "cpu", "--continuous-batching"),
            # It would otherwise take most of the machine's memory for its KV cache.
            *("--cb-block-size", "32", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "1024"),
        ),
        health="/health",
        options={},
    ),
    "llama.cpp": Peer(
        module="llama_cpp.server",
        arguments=(
            *("-m", "llama_cpp.server", "--model", "{gguf}", "--port", "{port}"),
            *("--n_ctx", "512", "--n_threads", "{threads}", "--n_threads_batch", "{threads}"),
            *("--interrupt_requests", "false"),  # or a new request would end the one that runs
        ),
        health="/v1/models",
        options={},
    ),
}


def write_checkpoint(directory: Path) -> None:
    """Write the model with a vocabulary of bytes and words, in which every text has tokens."""
    config = write_model(MODEL, directory)
    letters = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    words = [*letters, "ab", *(f"Ġw{i}" for i in range(config.vocab_size - len(letters) - 1))]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": ["a b"],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    settings = json.loads((directory / "config.json").read_text())
    del settings["eos_token_id"], settings["bos_token_id"]  # no answer ends early
    (directory / "config.json").write_text(json.dumps(settings))


def write_gguf(python: str, directory: Path, path: Path) -> None:
    """Convert the model in the environment that has the package gguf."""
    code = (
        "import sys; from pathlib import Path; from bench.cpu.gguf_file import write_gguf; "
        "write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), 'F32', has_vocabulary=True)"
    )
    subprocess.run(
        [python, "-c", code, str(directory), str(path)], check=True, cwd=ROOT / "scripts"
    )


def body_of(peer: Peer, model: str, number: int, num_tokens: int) -> dict[str, Any]:
    """Return one client's request, whose prompt differs from its neighbours'."""
    return {
        "model": model,
        "prompt": f"{number:02} bottles",
        "stream": True,
        "temperature": 0,
        "max_tokens": num_tokens,
        **peer.options,
    }


@contextmanager
def running(name: str, python: str, directory: Path, log: Path) -> Iterator[int]:
    """Run a server, and yield its port when it answers."""
    peer = PEERS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {
        "model": str(directory),
        "gguf": str(directory / "model.gguf"),
        "port": port,
        "threads": len(os.sched_getaffinity(0)),
    }
    command = [python, *(part.format(**values) for part in peer.arguments)]
    environment = {**user_environment(), "HF_HUB_OFFLINE": "1"}
    if name == "mie":
        environment["PYTHONPATH"] = str(ROOT)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{peer.health}", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name} did not start:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(peer: Peer, port: int, model: str, num_clients: int, num_tokens: int) -> float:
    """Return the tokens per second of one round."""
    bodies = [body_of(peer, model, i, num_tokens) for i in range(num_clients)]
    begin = time.perf_counter()
    clients = asyncio.run(stream_all(port, bodies))
    seconds = time.perf_counter() - begin
    return sum(num_tokens_of(b"".join(client.pieces)) for client in clients) / seconds


def num_tokens_of(answer: bytes) -> int:
    """Return the tokens of a complete stream: its usage, or a token for each chunk."""
    lines = [line for line in answer.splitlines() if line.startswith(b"data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    if not any(choice.get("finish_reason") for choice in choices):
        raise SystemExit(f"an answer is incomplete: {answer.decode(errors='replace')[-2000:]}")
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    if usage is not None:
        return int(usage["completion_tokens"])
    return sum(bool(choice.get("text")) for choice in choices)


def has(python: str, module: str) -> bool:
    """Return whether an environment has a module."""
    command = [python, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each number of clients")
    parser.add_argument("--servers", nargs="+", choices=PEERS, default=[*PEERS])
    args = parser.parse_args(argv)
    pythons = dict(each.split("=", 1) for each in args.python)
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(f"{'server':<14}" + "".join(f"{count:>9} clients" for count in args.clients), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "model")
        directory.mkdir()
        write_checkpoint(directory)
        for name in args.servers:
            peer, python = PEERS[name], pythons.get(name, sys.executable)
            if not has(python, peer.module):
                print(f"{name:<14}  left out: {python} has no {peer.module}", flush=True)
                continue
            if name == "llama.cpp":
                write_gguf(python, directory, directory / "model.gguf")
            with running(name, python, directory, Path(folder, "log")) as port:
                print_row(name, peer, port, str(directory), args)


def print_row(name: str, peer: Peer, port: int, model: str, args: argparse.Namespace) -> None:
    """Measure a server, and print its row."""
    cells = []
    measure(peer, port, model, 2, 4)  # warms up
    for num_clients in args.clients:
        rounds = [measure(peer, port, model, num_clients, args.tokens) for _ in range(args.rounds)]
        cells.append(f"{statistics.median(rounds):>8.1f} ({min(rounds):.1f} … {max(rounds):.1f})")
    print(f"{name:<14}{'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
