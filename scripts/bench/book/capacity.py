"""Count how many sequences fit a KV cache, paged or reserved for the longest context."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from bench.book import published
from bench.book.chapter import Result, Scale, percent, rows, simulate, times
from mie.memory.manager import KVCacheManager

TITLE = "Paging"
NUM_SLOTS = 32_768
BLOCK_SIZE = 16
CONTEXTS = (512, 1024, 2048, 4096, 8192)
BLOCK_SIZES = (4, 8, 16, 32, 64)
NUM_RUNNING = 32
CONTEXT_OF_RUN = 2048
KINDS = ("contiguous", "paged")


def run(scale: Scale) -> Result:
    """Run both settings, the two sweeps, and a live load."""
    lognormal, chat = published.lognormal_lengths(), published.chat_lengths()
    return {
        "settings": {"num_slots": NUM_SLOTS, "block_size": BLOCK_SIZE},
        "lognormal": _both(lognormal, 2048),
        "chat": _both(chat, 512),
        "contexts": [{"max_model_len": each, **_both(lognormal, each)} for each in CONTEXTS],
        "block_sizes": [{"block_size": each, **fill(lognormal, each)} for each in BLOCK_SIZES],
        "running": _running(48 if scale == "small" else 256),
    }


def _both(lengths: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """Fill a paged and a contiguous cache. The latter has blocks as long as the context."""
    lengths = [min(length, max_model_len) for length in lengths]
    return {
        "median_length": sorted(lengths)[len(lengths) // 2],
        "mean_length": sum(lengths) / len(lengths),
        "contiguous": fill(lengths, max_model_len),
        "paged": fill(lengths, BLOCK_SIZE),
    }


def fill(lengths: Sequence[int], block_size: int) -> dict[str, Any]:
    """Give one sequence after another a table until one does not fit."""
    manager = KVCacheManager(NUM_SLOTS // block_size, block_size, enable_prefix_caching=False)
    num_stored = 0
    for row in count():
        found = manager.find_allocation([0] * lengths[row]) if row < len(lengths) else None
        if found is None:
            break
        table = manager.open_table(found, (row, 0), row)
        manager.commit(table, lengths[row])
        num_stored += lengths[row]
    reserved = manager.num_used * block_size
    return {
        "num_sequences": row,
        "used": num_stored / reserved,
        "wasted": manager.num_slots_empty / reserved,
    }


def _running(num_requests: int) -> dict[str, Any]:
    """Return the peak number of blocks in tables while a load runs, and the reserved number."""
    result = simulate(
        published.COSTS,
        published.mixed(num_requests, seed=0),
        num_blocks=NUM_RUNNING * CONTEXT_OF_RUN // BLOCK_SIZE,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=NUM_RUNNING * CONTEXT_OF_RUN,
        enable_prefix_caching=False,
    )
    return {
        "num_requests": num_requests,
        "max_num_seqs": NUM_RUNNING,
        "max_model_len": CONTEXT_OF_RUN,
        "peak_blocks": result.peak_blocks,
        "reserved_blocks": result.peak_running * CONTEXT_OF_RUN // BLOCK_SIZE,
    }


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    lognormal, running = result["lognormal"], result["running"]
    peak, reserved = running["peak_blocks"], running["reserved_blocks"]
    waste = {row["block_size"]: percent(row["wasted"], 1) for row in result["block_sizes"]}
    return {
        "lognormal": _change(lognormal),
        "chat": _change(result["chat"]),
        "used": " → ".join(percent(lognormal[kind]["used"]) for kind in KINDS),
        "num_requests": str(running["num_requests"]),
        "peak": f"{reserved:,} → {peak:,} (−{percent(1 - peak / reserved, 1)})",
        "block_size": str(BLOCK_SIZE),
        "num_slots": f"{NUM_SLOTS:,}",
        "median_length": str(lognormal["median_length"]),
        "mean_length": f"{lognormal['mean_length']:.0f}",
        **{f"waste_{size}": waste[size] for size in (4, 16, 64)},
        "contexts": rows(
            (f"{row['max_model_len']:,}", *(str(row[kind]["num_sequences"]) for kind in KINDS))
            for row in result["contexts"]
        ),
    }


def _change(pair: dict[str, Any]) -> str:
    contiguous, paged = (pair[kind]["num_sequences"] for kind in KINDS)
    return f"{contiguous} → {paged} ({times(paged, contiguous)})"
