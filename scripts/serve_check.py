"""Send a storm of requests to a server: some clients leave, some send nonsense, some read slowly.

    python scripts/serve_check.py [--requests 10000] [--clients 64] [OPTION OF mie serve ...]
    python scripts/serve_check.py --num-blocks 40 --max-num-seqs 32   # preempts all the time

``mie serve`` runs in a new process, with a key and on a free port. The exit code is 1 if an answer
differs from a quiet server's, memory grows, a block stays in use, or the log has an error.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

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


async def storm(server: RunningServer, num_requests: int, num_clients: int) -> list[str]:
    """Run the storm, print its report, and return the faults."""
    kib: list[int] = []
    every = max(1, num_requests // 10)

    def sample(number: int) -> None:
        if number % every == 0:
            kib.append(server.resident_kib())

    storm = Storm(url=server.url, key=server.key, num_clients=num_clients)
    await storm.run(
        num_requests,
        good_requests(MODEL),
        slow=slow_request(MODEL),
        malformed=malformed_payloads(MODEL),
        at_request=sample,
    )
    kib.append(server.resident_kib())
    faults = [*storm.wrong, *await left_behind(server)]
    growth = kib[-1] - kib[min(2, len(kib) - 1)]  # since the first fifth of the run
    if growth > GROWTH_KIB:
        faults.append(f"memory grew by {growth / 1024:.1f} MiB after the first fifth")
    preemptions = server.metric("vllm:num_preemptions_total")
    report = {**storm.counts, "wrong": len(storm.wrong), "preemptions": preemptions}
    print(json.dumps({**report, "memory_mib": [round(each / 1024, 1) for each in kib]}))
    return faults


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
    """Run the storm, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--clients", type=int, default=64, metavar="N")
    args, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        with serving(Path(directory, "server.log"), [*STEADY, *options]) as server:
            wrong = asyncio.run(storm(server, args.requests, args.clients))
        wrong += [f"log: {line}" for line in server.complaints()]
    for each in wrong[:20]:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
