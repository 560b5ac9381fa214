"""Count how many sequences fit a KV cache, paged or reserved for the longest context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from mie.memory.manager import KVCacheManager
from mie.sim.book import TITLES, published
from mie.sim.book.chapter import (
    Headline,
    Panel,
    Result,
    Scale,
    Series,
    by,
    percent,
    simulate,
    table,
    times,
)

NUM_SLOTS = 32_768
BLOCK_SIZE = 16
CONTEXTS = (512, 1024, 2048, 4096, 8192)
BLOCK_SIZES = (4, 8, 16, 32, 64)
NUM_RUNNING = 32
CONTEXT_OF_RUN = 2048


def run(scale: Scale) -> Result:
    """Run both settings, the two sweeps, and a live load."""
    lognormal, chat = published.lognormal_lengths(), published.chat_lengths()
    return {
        "settings": {"num_slots": NUM_SLOTS, "block_size": BLOCK_SIZE},
        "lognormal": _both(lognormal, 2048),
        "chat": _both(chat, 512),
        "contexts": [{"max_model_len": each, **_both(lognormal, each)} for each in CONTEXTS],
        "block_sizes": [{"block_size": each, **_fill(lognormal, each)} for each in BLOCK_SIZES],
        "running": _running(48 if scale == "small" else 256),
    }


def _both(lengths: Sequence[int], max_model_len: int) -> dict[str, Any]:
    """Fill a paged and a contiguous cache. The latter has blocks as long as the context."""
    lengths = [min(length, max_model_len) for length in lengths]
    return {
        "median_length": sorted(lengths)[len(lengths) // 2],
        "mean_length": sum(lengths) / len(lengths),
        "contiguous": _fill(lengths, max_model_len),
        "paged": _fill(lengths, BLOCK_SIZE),
    }


def _fill(lengths: Sequence[int], block_size: int) -> dict[str, Any]:
    """Give each sequence a table in turn until one does not fit."""
    manager = KVCacheManager(NUM_SLOTS // block_size, block_size, enable_prefix_caching=False)
    num_stored = 0
    for row in count():
        room = manager.find_room([0] * lengths[row]) if row < len(lengths) else None
        if room is None:
            break
        table = manager.open_table(room, (row, 0), row)
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
    load = published.mixed(num_requests, seed=0)
    result = simulate(
        published.COSTS,
        load,
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


def headlines(result: Result) -> list[Headline]:
    """Return the findings on paging."""
    lines = []
    for name, what, theirs in (
        ("lognormal", "sequences at once, context 2,048", "16 → 112 [a]"),
        ("chat", "sequences at once, context 512", "64 → 226 [b]"),
    ):
        contiguous, paged = (result[name][kind] for kind in ("contiguous", "paged"))
        numbers = [each["num_sequences"] for each in (contiguous, paged)]
        here = f"{numbers[0]} → {numbers[1]} ({times(numbers[1], numbers[0])})"
        lines.append(Headline(what=what, here=here, published=theirs))
    lognormal, running = result["lognormal"], result["running"]
    used = [lognormal[kind]["used"] for kind in ("contiguous", "paged")]
    lines.append(
        Headline(
            what="share of the reserved slots in use",
            here=f"{percent(used[0])} → {percent(used[1])}",
            published="14 % → 98 % [a]",
        )
    )
    peak, reserved = running["peak_blocks"], running["reserved_blocks"]
    lines.append(
        Headline(
            what=f"peak blocks of {running['num_requests']} requests in 32 seats",
            here=f"{reserved:,} → {peak:,} (−{percent(1 - peak / reserved, 1)})",
            published="4,096 → 754 (−81.6 %) [c]",
        )
    )
    return lines


def describe(result: Result) -> str:
    """Return the chapter's text."""
    lognormal = result["lognormal"]
    waste = {row["block_size"]: percent(row["wasted"], 1) for row in result["block_sizes"]}
    return f"""\
A contiguous cache reserves the longest context for every sequence, because the length of an answer
is not known in advance. A paged cache allocates a block of {BLOCK_SIZE} tokens when it is needed.
Both get {NUM_SLOTS:,} slots from the engine's own allocator, the contiguous one in blocks as long
as the context. Sequences are added until one does not fit. Their lengths have a median of
{lognormal["median_length"]} tokens and a mean of {lognormal["mean_length"]:.0f}, or they are short
and long chats. Each doubling of the context halves the sequences of a contiguous cache. A paged
cache costs only the tokens that exist and the rest of each last block: {waste[4]} of the slots with
blocks of 4 tokens, {waste[16]} with 16, {waste[64]} with 64.

{table(("longest context", "contiguous", "paged"), _contexts(result))}

Not shown: lengths are final ones, so nothing grows or is preempted, and a table's indirection costs
nothing (see *{TITLES["pressure"]}* and *{TITLES["engine"]}*). The load is similar to that of the
published figures, because their own load is not published."""


def _contexts(result: Result) -> Iterator[Sequence[str]]:
    for row in result["contexts"]:
        fits = [f"{row[kind]['num_sequences']}" for kind in ("contiguous", "paged")]
        yield f"{row['max_model_len']:,}", *fits


def panels(result: Result) -> list[Panel]:
    """Plot sequences by context, and waste by block size."""
    contexts, sizes = result["contexts"], result["block_sizes"]
    return [
        Panel(
            title=f"Sequences that fit {NUM_SLOTS:,} slots",
            x_label="longest context (tokens)",
            y_label="sequences",
            log_x=True,
            log_y=True,
            series=[
                Series(
                    label=kind,
                    x=by(contexts, "max_model_len"),
                    y=[row[kind]["num_sequences"] for row in contexts],
                )
                for kind in ("paged", "contiguous")
            ],
        ),
        Panel(
            title="Slots lost in last blocks",
            x_label="block size (tokens)",
            y_label="slots lost (%)",
            log_x=True,
            series=[
                Series(
                    label="paged",
                    x=by(sizes, "block_size"),
                    y=[100 * row["wasted"] for row in sizes],
                )
            ],
        ),
    ]
