"""Write the results as Markdown: tables and missing rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.harness import table

Row = Mapping[str, Any]


def as_markdown(values: Row) -> str:
    """Return the whole page."""
    parts = [
        [f"* {key}: {value}" for key, value in values["state"].items()],
        ["", "### Ceilings", ""],
        [f"* {key}: {value:,.0f}" for key, value in values["ceilings"].items()],
        decode_table(values["decode"]),
        prefill_table(values["prefill"]),
        end_to_end_table(values["end_to_end"]),
        named("Failed", values["failures"]),
        named("Skipped", [f"{each['name']}: {each['reason']}" for each in values["skipped"]]),
    ]
    if values["is_dry_run"]:
        parts.insert(0, ["**A dry run: the figures below are played, nothing was measured.**", ""])
    return "\n".join(line for part in parts for line in part) + "\n"


def named(title: str, lines: Sequence[str]) -> list[str]:
    """Return a list under a heading, or nothing if the list is empty."""
    return ["", f"### {title}", "", *(f"* {line}" for line in lines)] if lines else []


def titled(title: str, note: str, heads: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a heading, a sentence, and a table whose column heads are separated by bars."""
    return ["", f"### {title}", "", note, "", *table(heads.split(" | "), rows)]


def decode_table(rows: Iterable[Row]) -> list[str]:
    """Return one line for each version of each decode shape."""
    return titled(
        "Decode attention",
        "µs: median (least–most) of one call. eager: as it is, without a graph.",
        "shape | version | µs | floor µs | GB/s | of copy | of read | noise | eager µs | error",
        map(decode_cells, rows),
    )


def decode_cells(row: Row) -> list[str]:
    """Return a line of the decode table."""
    floor = f"{row['floor_us']:.1f}" if "floor_us" in row else "–"
    if "median_us" not in row:
        return [row["shape"], row["version"], f"n/a: {row['reason']}", floor, *6 * ["–"]]
    return [
        *timing_cells(row),
        floor,
        f"{row['gb_per_s']:.0f}",
        f"{row['share_of_copy']:.1%}",
        f"{row['share_of_read']:.1%}",
        f"{row['noise']:.1%}",
        f"{row['eager_us']:.1f}" if "eager_us" in row else "–",
        f"{row['error']:.1e}",
    ]


def prefill_table(rows: Iterable[Row]) -> list[str]:
    """Return one line for each version of each prefill shape."""
    return titled(
        "Prefill attention",
        "Useful FLOP: the pairs that the causal mask leaves. Floor: these at the GEMM's rate.",
        "shape | version | µs | floor µs | TFLOP/s | of GEMM | noise | error",
        map(prefill_cells, rows),
    )


def prefill_cells(row: Row) -> list[str]:
    """Return a line of the prefill table."""
    floor = f"{row['floor_us']:.1f}" if "floor_us" in row else "–"
    if "median_us" not in row:
        return [row["shape"], row["version"], f"n/a: {row['reason']}", floor, *4 * ["–"]]
    share = f"{row['share_of_gemm']:.1%}" if "share_of_gemm" in row else "–"
    noise, error = f"{row['noise']:.1%}", f"{row['error']:.1e}"
    return [*timing_cells(row), floor, f"{row['tflops']:.1f}", share, noise, error]


def timing_cells(row: Row) -> list[str]:
    """Return shape, version (and how it was timed, if not in a graph) and microseconds."""
    method = "" if row["method"] in ("graph", "fake") else f", {row['method']}"
    spread = f"{row['median_us']:.1f} ({row['min_us']:.1f}–{row['max_us']:.1f})"
    return [row["shape"], row["version"] + method, spread]


def end_to_end_table(rows: Iterable[Row]) -> list[str]:
    """Return one line for each engine and workload."""
    return titled(
        "End to end",
        "Random weights. A step: the median of a host's clock. Floor: the bytes that it must read.",
        "model | engine | requests × tokens | tokens/s | decode tokens/s | step ms | floor ms "
        "| over floor | peak GiB",
        map(end_to_end_cells, rows),
    )


def end_to_end_cells(row: Row) -> list[str]:
    """Return a line of the end-to-end table."""
    keys = ("decode_tokens_per_s", "step_ms", "floor_ms", "over_floor")
    return [
        row["model"],
        row["engine"],
        f"{row['num_requests']} × {row['num_tokens']}",
        f"{row['tokens_per_s']:.1f}",
        *(f"{row[key]:.3g}" if key in row else "–" for key in keys),
        f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "–",
    ]
