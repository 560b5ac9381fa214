"""Measure the prefix cache on a published trace: in memory, on a disk, and the best possible."""

import heapq
import json
import lzma
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from bench.book.chapter import MODEL, Result, Scale, device_costs, percent, rows
from mie.config.engine import EngineConfig
from mie.disk.identity import Identity, child
from mie.disk.segment import Block
from mie.disk.store import DiskStats
from mie.lab.draws import Draws
from mie.lab.sim.driver import run_load
from mie.lab.sim.simulated import simulated
from mie.lab.workload import Text, Workload, WorkloadRequest

TITLE = "A prefix cache on a disk"
SIZE = 512
"""Tokens of a block of the trace."""
STAND_IN = 4
"""Tokens that stand for a block, so that a simulation takes seconds."""
TOKEN_BYTES = 128 << 10
"""Keys and values of a token of `MODEL` in 16 bits: 32 layers with 8 heads of 128."""
MEMORY = (1024, 4096, 16384, 65536)
DISK = 32768
"""Blocks of the smaller disk. The larger one has room for all."""
HOST = 2048
"""Blocks of the host's pool. The longest prompt has fewer."""

Requests = Sequence[Sequence[int]]
"""The blocks of each prompt. Equal numbers are equal tokens after equal tokens."""


def run(scale: Scale, trace: Path | None = None) -> Result:
    """Run Mooncake's trace of conversations, or a drawn one of another size."""
    requests: Requests
    memory: Sequence[int]
    if scale == "small":
        requests, memory, disk = _drawn(200), (64, 128), 192
    else:
        assert trace is not None, "the full chapter needs --trace"
        with lzma.open(trace, "rt", encoding="utf-8") as file:
            requests = [json.loads(line)["hash_ids"] for line in file]
        memory, disk = MEMORY, DISK
    num_all = len({block for request in requests for block in request}) + HOST
    seen: set[int] = set()
    num_seen = 0
    for request in requests:
        num_seen += len(seen.intersection(request))
        seen.update(request)
    return {
        "settings": {"block": SIZE, "block_bytes": SIZE * TOKEN_BYTES, "disk": disk},
        "num_requests": len(requests),
        "num_blocks": sum(map(len, requests)),
        "num_seen": num_seen,
        "all": _serve(requests, num_all, None),
        "memory": [
            {
                "num_blocks": size,
                "alone": _serve(requests, size, None),
                "best": most_hits(requests, size),
                "disk": _serve(requests, size, disk),
                "large_disk": _serve(requests, size, num_all),
            }
            for size in memory
        ],
    }


def _drawn(num_requests: int) -> Requests:
    """Return conversations of equal rank whose turns alternate, with blocks that are numbers."""
    draws = Draws(0)
    chats: list[list[int]] = [[0] for _ in range(16)]
    requests, last = [], 0
    for _ in range(num_requests):
        chat = chats[draws.integer(0, len(chats) - 1)]
        for _ in range(draws.integer(1, 3)):
            last += 1
            chat.append(last)
        requests.append(list(chat))
        if len(chat) > 40:
            del chat[1:]
    return requests


class Disk:
    """A `mie.disk.tier.Store` of a number of blocks. The least recently used block leaves."""

    is_writing = True

    def __init__(self, num_blocks: int) -> None:
        self.identity = Identity(
            weights="", numerics="", cache_dtype="", activations="", block_size=STAND_IN,
            block_bytes=1, parts="",
        )  # fmt: skip
        self.stats = DiskStats()
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    has_written = has

    def write(self, block: Block) -> None:
        self._blocks[block.key] = block.data
        self.stats.num_written += 1
        if len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def size_of(self, key: bytes) -> int:
        return len(self._blocks[key])

    def find(self, token_ids: Sequence[int], salt: str | None, limit: int) -> list[bytes]:
        key, found = self.identity.root(salt), []
        for end in range(STAND_IN, limit + 1, STAND_IN):
            key = child(key, token_ids[end - STAND_IN : end])
            if key not in self._blocks:
                break
            found.append(key)
        return found

    def read(self, key: bytes) -> bytes | None:
        self._blocks.move_to_end(key)
        self.stats.num_read += 1
        return self._blocks[key]

    def close(self) -> None:
        pass


def _serve(requests: Requests, num_blocks: int, num_on_disk: int | None) -> dict[str, int]:
    """Serve requests one after another, and return the blocks that were found, read and written.

    A token that no other prompt has ends each prompt, so that all of its blocks may be cached.
    """
    last = max(block for request in requests for block in request) + 1
    load = [
        WorkloadRequest(
            request_id=str(number),
            prompt=(*(Text(block, STAND_IN) for block in request), Text(last + number, 1)),
            max_tokens=1,
        )
        for number, request in enumerate(requests)
    ]
    disk = None if num_on_disk is None else Disk(num_on_disk)
    config = EngineConfig(
        block_size=STAND_IN,
        num_blocks=num_blocks,
        max_num_seqs=1,
        partial_block_sharing=False,
        event_log_steps=0,
    )
    bench = simulated(device_costs(), config, num_host_blocks=HOST, store=disk)
    result = run_load(bench, Workload(name="trace", requests=tuple(load)), max_concurrency=1)
    stats = DiskStats() if disk is None else disk.stats
    return {
        "num_found": result.num_cached_tokens // STAND_IN,
        "num_read": stats.num_read,
        "num_written": stats.num_written,
    }


def most_hits(requests: Requests, num_blocks: int) -> int:
    """Return the most blocks that can be found if ``num_blocks`` are kept between two requests.

    Each use of a block that was used before is an interval of requests with a gain of one block.
    As many may overlap as there are blocks. Keeping the blocks that are used soonest is the best
    choice of equal intervals (Belady, 1966). Of blocks that are used next by one request, the
    deepest leaves first, so that the kept blocks are beginnings.
    """
    next_use: list[list[int | None]] = []
    following: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        next_use.append([following.get(block) for block in requests[number]])
        following.update(dict.fromkeys(requests[number], number))
    next_use.reverse()
    kept: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []  # the blocks that are used last come first
    num_found = 0
    for request, uses in zip(requests, next_use, strict=True):
        num_found += sum(kept.pop(block, None) is not None for block in request)
        for depth, (block, use) in enumerate(zip(request, uses, strict=True)):
            if use is not None:
                kept[block] = use
                heapq.heappush(latest, (-use, -depth, block))
        while len(kept) > num_blocks:
            use, _, block = heapq.heappop(latest)
            if kept.get(block) == -use:
                del kept[block]
    return num_found


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    total, unit = result["num_blocks"], result["settings"]["block_bytes"]

    def share(found: int) -> str:
        return percent(found / total, 1)

    least = result["memory"][0]
    table = [
        (
            f"{row['num_blocks']:,}",
            _bytes(row["num_blocks"] * unit),
            share(row["alone"]["num_found"]),
            share(row["best"]),
            share(row["disk"]["num_found"]),
            share(row["large_disk"]["num_found"]),
            _bytes(row["large_disk"]["num_read"] * unit),
        )
        for row in result["memory"]
    ]
    disk = result["settings"]["disk"]
    second = max(
        (row for row in result["memory"] if row["alone"]["num_found"] < least["disk"]["num_found"]),
        key=lambda row: int(row["num_blocks"]),
    )
    return {
        "model": MODEL,
        "num_requests": f"{result['num_requests']:,}",
        "num_blocks": f"{total:,}",
        "num_seen": f"{result['num_seen']:,}",
        "seen": share(result["num_seen"]),
        "found": f"{result['all']['num_found']:,}",
        "block_bytes": f"{unit >> 20}",
        "gain": f"{share(least['alone']['num_found'])} → {share(least['large_disk']['num_found'])}",
        "small_gain": f"{share(least['alone']['num_found'])} → {share(least['disk']['num_found'])}",
        "memory": _bytes(least["num_blocks"] * unit),
        "disk": _bytes(disk * unit),
        "written": _bytes(least["large_disk"]["num_written"] * unit),
        "first": share(least["disk"]["num_found"]),
        "second": _bytes(second["num_blocks"] * unit),
        "second_found": share(second["alone"]["num_found"]),
        "least_found": share(least["alone"]["num_found"]),
        "least_best": share(least["best"]),
        "table": rows(table),
    }


def _bytes(number: int) -> str:
    size = number / (1 << 30)
    return f"{size:,.0f} GiB" if size < 1024 else f"{size / 1024:,.1f} TiB"
