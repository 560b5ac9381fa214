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
from collections.abc import Sequence
from pathlib import Path

from serve_checks.clients import run_clients
from serve_checks.server import RunningServer, serving
from serve_checks.soak import Soak, p99_of_ends
from serve_checks.storm import Storm, good_requests, malformed_payloads, slow_request

MODEL = "bundled"
GROWTH_KIB = 24 << 10
"""Growth of the server's memory after the warm-up that an allocator may cause without a leak."""


STEADY = ("--batch-invariant", "--num-blocks", "640", "--event-log-steps", "0")
"""Options under which answers do not depend on other requests, and memory soon stays the same.

A pool takes memory until each block was used once, and the event log until it has its steps. If an
option is given twice, the last one counts.
"""


class Memory:
    """The server's memory, sampled at ten moments of a run."""

    def __init__(self, server: RunningServer, num_requests: int) -> None:
        self.kib: list[int] = []
        self._server = server
        self._every = max(1, num_requests // 10)

    def sample(self, number: int) -> None:
        """Look at the memory if a tenth of the run is over."""
        if number % self._every == 0:
            self.kib.append(self._server.resident_kib())

    @property
    def growth_kib(self) -> int:
        """The growth since the first fifth of the run."""
        self.kib.append(self._server.resident_kib())
        return self.kib[-1] - self.kib[min(2, len(self.kib) - 1)]


async def storm(server: RunningServer, num_requests: int, num_clients: int) -> list[str]:
    """Run the storm, print its counts, and return the faults."""
    each = Storm(url=server.url, key=server.key, num_clients=num_clients)
    memory = Memory(server, num_requests)
    await each.run(
        num_requests,
        good_requests(MODEL),
        slow=slow_request(MODEL),
        malformed=malformed_payloads(MODEL),
        at_request=memory.sample,
    )
    growth = memory.growth_kib
    wrong = list(each.wrong)
    wrong += await left_behind(server)
    if growth > GROWTH_KIB:
        wrong.append(f"memory grew by {growth / 1024:.1f} MiB after the first fifth")
    report = {
        **each.counts,
        "wrong": len(each.wrong),
        "preemptions": server.metric("vllm:num_preemptions_total"),
        "memory_mib": [round(kib / 1024, 1) for kib in memory.kib],
    }
    print(json.dumps(report))
    return wrong


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


async def soak(server: RunningServer, num_requests: int) -> list[str]:
    """Run the soak, print its figures, and return the faults."""
    each, memory = Soak(), Memory(server, num_requests)
    await each.run(server, num_requests, at_request=memory.sample)
    growth = memory.growth_kib
    first, last = p99_of_ends(each.seconds)
    wrong = each.failed + await left_behind(server)
    if growth > GROWTH_KIB:
        wrong.append(f"memory grew by {growth / 1024:.1f} MiB after the first fifth")
    report = {
        "requests": num_requests,
        "failed": len(each.failed),
        "p99_ms_first_tenth": round(first * 1000, 2),
        "p99_ms_last_tenth": round(last * 1000, 2),
        "memory_mib": [round(kib / 1024, 1) for kib in memory.kib],
    }
    print(json.dumps(report))
    return wrong


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
