"""Write the results as Markdown: tables and missing rows."""

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
        attention_table(
            "Decode attention",
            "µs: median (least–most) of one call. eager: as it is, without a graph.",
            values["decode"],
            DECODE,
        ),
        attention_table(
            "Prefill attention",
            "Useful FLOP: the pairs that the causal mask leaves. Floor: these at the GEMM's rate.",
            values["prefill"],
            PREFILL,
        ),
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
    """Return a heading, a sentence, and a table. Bars separate the column heads."""
    return ["", f"### {title}", "", note, "", *table(heads.split(" | "), rows)]


DECODE = (
    ("GB/s", "gb_per_s", ".0f"),
    ("of copy", "share_of_copy", ".1%"),
    ("of read", "share_of_read", ".1%"),
    ("noise", "noise", ".1%"),
    ("eager µs", "eager_us", ".1f"),
    ("error", "error", ".1e"),
)
PREFILL = (
    ("TFLOP/s", "tflops", ".1f"),
    ("of GEMM", "share_of_gemm", ".1%"),
    ("noise", "noise", ".1%"),
    ("error", "error", ".1e"),
)
"""Columns: head, key of a row, and format."""
Columns = Sequence[tuple[str, str, str]]


def attention_table(title: str, note: str, rows: Iterable[Row], columns: Columns) -> list[str]:
    """Return one line for each shape."""
    heads = ["shape", "version", "µs", "floor µs", *(head for head, _, _ in columns)]
    return titled(title, note, " | ".join(heads), (attention_cells(row, columns) for row in rows))


def attention_cells(row: Row, columns: Columns) -> list[str]:
    """Return a line of a table of attention."""
    floor = f"{row['floor_us']:.1f}" if "floor_us" in row else "–"
    if "median_us" not in row:
        return [row["shape"], row["version"], f"n/a: {row['reason']}", floor, *["–"] * len(columns)]
    values = (format(row[key], form) if key in row else "–" for _, key, form in columns)
    return [*timing_cells(row), floor, *values]


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
