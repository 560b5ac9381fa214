"""Write predicted times as tables of docs/gpu/predictions.md, and beside measured ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench.gpu.end_to_end import PROMPT_LENGTH
from bench.gpu.shapes import DecodeShape, PrefillShape

from gpu.nvrtc_kernels import ROOT
from gpu.predict import (
    CHIPS,
    Attention,
    Chip,
    Work,
    decode_step,
    decode_work,
    find_chip,
    floor_us,
    num_launches,
    prefill_count,
    prefill_work,
    step_us,
)
from mie.sim.devices import find_shape

PAGE = ROOT / "docs" / "gpu" / "predictions.md"
MODELS = ("Llama-3.2-1B", "SmolLM2-135M")
CONTEXTS, BATCHES = (512, 4096), (1, 16, 64, 256)
HEADS = (("Llama-3.2-1B", 64), ("Llama-3.1-8B", 128))
"""Models with 32 query heads and 8 KV heads, and their head sizes."""
CHUNK = 64, 32_768
"""New tokens, and those in the cache."""
TABLE = re.compile(r"(<!-- predicted: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)

Lines = Iterator[Sequence[str]]


def rewritten(page: str) -> str:
    """Return the page with its tables as predicted now."""
    return TABLE.sub(lambda match: f"{match[1]}\n{as_table(TABLES[match[2]]())}\n{match[3]}", page)


def as_table(rows: Iterable[Sequence[str]]) -> str:
    """Return Markdown. The first row has the heads of the columns."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * (lines[0].count("|") - 1) + "|", *lines[1:]]) + "\n"


def _chips() -> Lines:
    yield (
        *("chip", "GB/s", "reached", "dense TFLOP/s", "SMs", "GHz"),
        *("warp instructions/µs", "launch µs", "ledger"),
    )
    for chip in CHIPS:
        yield (
            chip.title,
            f"{chip.sheet.bandwidth / 1e9:,.0f}",
            f"{chip.stream_share:.0%}",
            f"{chip.sheet.flops / 1e12:,.1f}",
            str(chip.num_multiprocessors),
            f"{chip.clock_hz / 1e9:.3f}",
            f"{chip.slots_per_us:,.0f}",
            f"{chip.launch_us:g}",
            chip.target,
        )


def _steps() -> Lines:
    yield ("model", "context", "chip", *(f"batch {batch}, ms" for batch in BATCHES))
    for name in MODELS:
        for context in CONTEXTS:
            for chip in CHIPS:
                steps = [decode_step(chip, find_shape(name), batch, context) for batch in BATCHES]
                cells = (
                    f"{step_us(chip, step) / 1000:.2f} ({floor_us(chip, step) / 1000:.2f})"
                    for step in steps
                )
                yield (name, f"{context:,}", chip.title, *cells)


def _kernels(batch: int) -> Lines:
    yield ("launch", "times a step", *(f"{chip.title}, µs" for chip in CHIPS))
    model = find_shape(MODELS[0])
    steps = [decode_step(chip, model, batch, CONTEXTS[-1]) for chip in CHIPS]
    for works in zip(*steps, strict=True):
        cells = (_cell(chip, work) for chip, work in zip(CHIPS, works, strict=True))
        yield (works[0].name, str(works[0].count), *cells)
    totals = (f"{step_us(chip, step):,.0f}" for chip, step in zip(CHIPS, steps, strict=True))
    yield ("the step", str(num_launches(steps[0])), *totals)


def _cell(chip: Chip, work: Work) -> str:
    return f"{chip.microseconds(work):,.1f} {chip.limited_by(work)}"


def _by_cache(cell: Callable[[Chip, Attention], str]) -> Lines:
    """Yield a row for each head size and each kind of cache, with a cell for each chip."""
    yield ("head_dim", "cache", *(f"{chip.title}, µs" for chip in CHIPS))
    for name, head_dim in HEADS:
        for kv_cache_dtype in ("auto", "int8", "fp8"):
            shape = _attention(name, kv_cache_dtype)
            yield (str(head_dim), kv_cache_dtype, *(cell(chip, shape) for chip in CHIPS))


def _decode(chip: Chip, shape: Attention) -> str:
    work = decode_work(chip, shape, [4096] * 64)
    return f"{chip.microseconds(work):,.0f} ({chip.issue_share(work):.0%})"


def _short_chunk(chip: Chip, shape: Attention) -> str:
    before, now = (
        chip.microseconds(prefill_work(chip, shape, *CHUNK, may_split=may_split))
        for may_split in (False, True)
    )
    return f"{before:,.0f} → {now:,.0f} ({prefill_count(chip, shape, *CHUNK)})"


def _attention(name: str, kv_cache_dtype: str) -> Attention:
    model = find_shape(name)
    return Attention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_cache_dtype=kv_cache_dtype,
    )


TABLES: Mapping[str, Callable[[], Lines]] = {
    "chips": _chips,
    "steps": _steps,
    **{f"kernels at batch {batch}": functools.partial(_kernels, batch) for batch in BATCHES},
    "decode attention": lambda: _by_cache(_decode),
    "prefill attention": lambda: _by_cache(
        lambda chip, shape: _cell(chip, prefill_work(chip, shape, 4096))
    ),
    "short chunks": lambda: _by_cache(_short_chunk),
}


def beside(bench: Mapping[str, Any], device: str) -> list[str]:
    """Return Markdown lines with the benchmark's times beside predicted ones.

    ``bench`` is a saved `BenchReport`, and ``device`` CUDA's name of the device.
    """
    chip = find_chip(device)
    if chip is None:
        titles = ", ".join(each.title for each in CHIPS)
        return [f"No prediction for {device!r}; there are predictions for {titles}."]
    rows = list(_beside(bench, chip))
    if not rows:
        return ["Nothing was timed that has a prediction."]
    heads = ("what", "measured µs", "predicted µs", "measured / predicted")
    return [
        "Predicted by docs/gpu/predictions.md, not measured: the third column.",
        "",
        *as_table([heads, *rows]).splitlines(),
    ]


def _beside(bench: Mapping[str, Any], chip: Chip) -> Lines:
    for row in bench.get("decode", []):
        if row["version"] == "mie" and "median_us" in row:
            shape = DecodeShape(**_fields(DecodeShape, row))
            works = [decode_work(chip, _shape_of(row), shape.lengths())]
            yield _compared(
                f"decode, {shape}", row["median_us"], sum(map(chip.microseconds, works))
            )
    for row in bench.get("prefill", []):
        if row["version"] == "mie" and "median_us" in row and row["num_seqs"] == 1:
            prompt = PrefillShape(**_fields(PrefillShape, row))
            work = prefill_work(chip, _shape_of(row), prompt.num_queries, prompt.prefix)
            yield _compared(f"prefill, {prompt}", row["median_us"], chip.microseconds(work))
    for row in bench.get("end_to_end", []):
        if row["engine"] == "mie" and "step_ms" in row:
            context = PROMPT_LENGTH + row["num_tokens"] // row["num_requests"] // 2
            step = decode_step(chip, find_shape(row["model"]), row["num_requests"], context)
            name = f"step, {row['model']}, batch {row['num_requests']}"
            yield _compared(name, 1000 * row["step_ms"], step_us(chip, step))


def _fields(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: row[field.name] for field in fields(kind) if field.name in row}


def _shape_of(row: Mapping[str, Any]) -> Attention:
    return Attention(
        num_heads=row["num_heads"],
        num_kv_heads=row["num_kv_heads"],
        head_dim=row["head_dim"],
        kv_cache_dtype=row.get("kv_cache_dtype", "auto"),
        element="bf16" if row["dtype"] == "bfloat16" else "f16",
    )


def _compared(name: str, measured: float, predicted: float) -> Sequence[str]:
    return (name, f"{measured:,.1f}", f"{predicted:,.1f}", f"{measured / predicted:.2f}")
