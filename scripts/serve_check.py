"""Check a server as a whole: ``storm``, ``soak``, and ``clients`` that others wrote.

    python scripts/serve_check.py storm [--requests 10000] [--clients 64] [OPTION OF mie serve ...]
    python scripts/serve_check.py storm --num-blocks 40 --max-num-seqs 32   # preempts all the time
    python scripts/serve_check.py soak [--requests 100000]
    python scripts/serve_check.py clients [--python lm-eval=VENV/bin/python ...]

Each starts ``mie serve`` in a new process, with a key and on a free port. The exit code is 1
if something is wrong. ``clients`` runs the installed ones, and names the others.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
from serve_checks.clients import run_clients
from serve_checks.server import RunningServer, serving
from serve_checks.storm import Storm, good_requests, malformed_payloads, slow_request

MODEL = "bundled"
GROWTH_KIB = 24 << 10
"""Growth of the server's memory after the warm-up that an allocator may cause without a leak."""


STEADY = ("--batch-invariant", "--num-blocks", "640", "--event-log-steps", "0")
"""Options under which answers do not depend on other requests, and memory soon stays the same.

A pool takes memory until each block was used once, and the event log until it has its steps. If an
option is given twice, the last one counts.
"""


async def watched(
    server: RunningServer,
    num_requests: int,
    run: Callable[[Callable[[int], None]], Awaitable[tuple[list[str], dict[str, Any]]]],
) -> list[str]:
    """Run a check while the server's memory is sampled, print its report, and return the faults.

    ``run`` gets a function to call before each request, and returns its faults and its report.
    """
    kib: list[int] = []
    every = max(1, num_requests // 10)

    def sample(number: int) -> None:
        if number % every == 0:
            kib.append(server.resident_kib())

    faults, report = await run(sample)
    kib.append(server.resident_kib())
    growth = kib[-1] - kib[min(2, len(kib) - 1)]  # since the first fifth of the run
    faults += await left_behind(server)
    if growth > GROWTH_KIB:
        faults.append(f"memory grew by {growth / 1024:.1f} MiB after the first fifth")
    print(json.dumps({**report, "memory_mib": [round(each / 1024, 1) for each in kib]}))
    return faults


async def storm(server: RunningServer, num_requests: int, num_clients: int) -> list[str]:
    """Run the storm, and return the faults."""

    async def run(sample: Callable[[int], None]) -> tuple[list[str], dict[str, Any]]:
        each = Storm(url=server.url, key=server.key, num_clients=num_clients)
        await each.run(
            num_requests,
            good_requests(MODEL),
            slow=slow_request(MODEL),
            malformed=malformed_payloads(MODEL),
            at_request=sample,
        )
        preemptions = server.metric("vllm:num_preemptions_total")
        return [*each.wrong], {
            **each.counts,
            "wrong": len(each.wrong),
            "preemptions": preemptions,
        }

    return await watched(server, num_requests, run)


async def soak(server: RunningServer, num_requests: int, num_clients: int = 8) -> list[str]:
    """Send many short requests, one after another from each client, and return the faults."""
    seconds, failed = [0.0] * num_requests, list[str]()
    numbers = iter(range(num_requests))
    headers = {"Authorization": f"Bearer {server.key}"}

    async def run(sample: Callable[[int], None]) -> tuple[list[str], dict[str, Any]]:
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=600) as client:

            async def one_client() -> None:
                for number in numbers:
                    sample(number)
                    prompt = f"Request {number % 1000}"
                    body = {"prompt": prompt, "max_tokens": 4, "seed": number, "ignore_eos": True}
                    began = time.perf_counter()
                    response = await client.post("/v1/completions", json=body)
                    seconds[number] = time.perf_counter() - began
                    if (response.json().get("usage") or {}).get("completion_tokens") != 4:
                        failed.append(f"{response.status_code}: {response.text[:200]}")

            await asyncio.gather(*(one_client() for _ in range(num_clients)))
        tenth = max(1, num_requests // 10)
        return [*failed], {
            "requests": num_requests,
            "failed": len(failed),
            "p99_ms_first_tenth": round(p99(seconds[:tenth]) * 1000, 2),
            "p99_ms_last_tenth": round(p99(seconds[-tenth:]) * 1000, 2),
        }

    return await watched(server, num_requests, run)


def p99(values: Sequence[float]) -> float:
    """Return the value below which 99 percent of the values are."""
    return sorted(values)[int(0.99 * (len(values) - 1))]


async def left_behind(server: RunningServer) -> list[str]:
    """Return the metrics that are not zero although every client has gone."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found: list[str] = []
    for _ in range(100):  # a connection that was closed last may be noticed a moment later
        found = [name for name in names if server.metric(name) != 0]
        if not found:
            return []
        await asyncio.sleep(0.1)
    return [f"{name} is {server.metric(name)} although every client has gone" for name in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check that the arguments name: the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("check", choices=("storm", "soak", "clients"))
    parser.add_argument("--requests", type=int, metavar="N")
    parser.add_argument("--clients", type=int, default=64, metavar="N")
    parser.add_argument("--max-examples", type=int, default=50, metavar="N", help="of schemathesis")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    args, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "server.log")
        with serving(log, [*STEADY, *options]) as server:
            if args.check == "storm":
                wrong = asyncio.run(storm(server, args.requests or 10_000, args.clients))
            elif args.check == "soak":
                wrong = asyncio.run(soak(server, args.requests or 100_000))
            else:
                pythons = dict(each.split("=", 1) for each in args.python)
                wrong = run_clients(server, pythons, args.max_examples)
            wrong += [f"log: {line}" for line in server.complaints()]
        wrong += [f"log: {line}" for line in server.complaints() if f"log: {line}" not in wrong]
    for each in wrong[:20]:
        print(f"wrong: {each}", file=sys.stderr)
    if len(wrong) > 20:
        print(f"wrong: {len(wrong) - 20} more", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
