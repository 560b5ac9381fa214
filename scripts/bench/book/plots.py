"""Draw a plot for each chapter of the book from its JSON.

    python scripts/benchmark.py plots docs/book

It needs matplotlib (pip install '.[docs]'), and writes plots/NAME.svg. A plot has no background,
and its ink is dark or light as the reader's browser prefers.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.book.chapter import Result, column

INK = "#123456"
"""A stand-in, which the style sheet of the file replaces."""
STYLE = (
    "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d8dee4}}"
    "text{font-family:system-ui,sans-serif}</style>"
)
BLUE, ORANGE, GREEN, PINK, GREY = "#3a8fd9", "#e08b1c", "#2fa56f", "#c75a9b", "#8a949e"
COLOURS = (GREY, BLUE, PINK, GREEN, ORANGE)
Axes = Any
"""A matplotlib Axes."""


def _capacity(axes: Axes, result: Result) -> None:
    sizes = column(result["contexts"], "max_model_len")
    for kind, colour in (("contiguous", ORANGE), ("paged", BLUE)):
        counts = column(result["contexts"], kind, "num_sequences")
        axes.plot(sizes, counts, "o-", color=colour, label=kind)
    axes.set(xscale="log", yscale="log", xlabel="longest context, tokens")
    axes.set(ylabel="sequences in 32,768 slots", xticks=sizes, xticklabels=sizes)
    axes.set(yticks=(4, 8, 16, 32, 64, 128), yticklabels=(4, 8, 16, 32, 64, 128))


def _batching(axes: Axes, result: Result) -> None:
    for kind, colour in (("continuous", BLUE), ("static", ORANGE), ("static, reserving", GREY)):
        points = result["ceiling"]
        rates = column(points, "request_rate")
        axes.plot(rates, column(points, kind, "output_throughput"), "o-", color=colour, label=kind)
    axes.set(xlabel="requests/s", ylabel="tokens/s", ylim=0)


def _prefix(axes: Axes, result: Result) -> None:
    budgets = result["budgets"]
    shares = [100 * each for each in column(budgets, "hit_rate")]
    axes.plot(column(budgets, "max_cached_blocks"), shares, "o-", color=BLUE)
    axes.set(xlabel="unreferenced blocks that are kept", ylabel="prompt tokens found, %", ylim=0)


def _tiers(axes: Axes, result: Result) -> None:
    rows, total = result["memory"], result["num_blocks"] / 100
    sizes = column(rows, "num_blocks")
    for name, label, colour in (
        ("large_disk", "disk for all", GREEN),
        ("disk", "disk of 32,768", BLUE),
        ("alone", "memory only", ORANGE),
    ):
        found = [count / total for count in column(rows, name, "num_found")]
        axes.plot(sizes, found, "o-", color=colour, label=label)
    best = [count / total for count in column(rows, "best")]
    axes.plot(sizes, best, "--", color=GREY, label="best possible")
    axes.set(xscale="log", xticks=sizes, xticklabels=[f"{size:,}" for size in sizes], ylim=0)
    axes.set(xlabel="blocks in memory", ylabel="blocks found, %")


def _snapshots(axes: Axes, result: Result) -> None:
    rules = ("tail only", "every block", "branch points", "mie")
    loads = result["loads"]
    for row, (rule, colour) in enumerate(zip(rules, COLOURS, strict=False)):
        rates = [100 * load["rules"][rule][2]["hit_rate"] for load in loads.values()]
        places = [place + 0.19 * (row - 1.5) for place in range(len(loads))]
        axes.bar(places, rates, 0.18, color=colour, label=rule)
    best = [100 * load["best"][2] for load in loads.values()]
    firsts, lasts = ([place + half for place in range(len(loads))] for half in (-0.38, 0.38))
    axes.hlines(best, firsts, lasts, color=INK, label="best possible")
    axes.set(xticks=range(len(loads)), xticklabels=list(loads), ylabel="prompt tokens found, %")


def _pressure(axes: Axes, result: Result) -> None:
    pools = result["pools"]
    rounds = [each / pools[0]["rounds"] for each in column(pools, "rounds")]
    axes.plot(column(pools, "share"), rounds, "o-", color=BLUE)
    axes.set(xscale="log", yscale="log", ylabel="rounds, relative to the largest pool")
    axes.set(xlabel="blocks, relative to the peak of the need")
    axes.set(xticks=(0.05, 0.1, 0.2, 0.5, 1, 2), xticklabels=(0.05, 0.1, 0.2, 0.5, 1, 2))
    axes.set(yticks=(1, 2, 5, 10), yticklabels=(1, 2, 5, 10))


def _chunking(axes: Axes, result: Result) -> None:
    sizes = column(result["chunks"], "max_prefill_chunk")
    waits, firsts = (column(result["chunks"], key) for key in ("worst_itl_ms", "long_ttft_ms"))
    axes.plot(sizes, waits, "o-", color=BLUE, label="longest wait of the others")
    axes.plot(sizes, firsts, "o-", color=ORANGE, label="first token of the long prompt")
    axes.set(xscale="log", xlabel="chunk, tokens", ylabel="ms", ylim=0)
    axes.set(xticks=sizes, xticklabels=sizes)


def _drafts(axes: Axes, result: Result) -> None:
    shares = column(result["shares"], "right_percent")
    for index, (each, colour) in enumerate(
        zip(result["without"], (BLUE, GREEN, ORANGE), strict=True)
    ):
        gains = [gain[index] for gain in column(result["shares"], "gains")]
        number = each["seats"]
        axes.plot(shares, gains, "o-", color=colour, label=f"{number} request{'s' * (number > 1)}")
    axes.set(xlabel="right drafts, %", ylabel="speed, relative to no drafts", ylim=0)


def _policies(axes: Axes, result: Result) -> None:
    policies = result["policies"]
    for row, (of, key, name, colour) in enumerate(
        (
            ("all", "mean_e2el_ms", "mean", BLUE),
            ("all", "p99_e2el_ms", "p99", GREY),
            ("urgent", "mean_e2el_ms", "mean of urgent requests", ORANGE),
        )
    ):
        seconds = [each / 1000 for each in column(policies, of, key)]
        places = [place + 0.26 * (row - 1) for place in range(len(policies))]
        axes.bar(places, seconds, 0.25, color=colour, label=name)
    axes.set(xticks=range(len(policies)), xticklabels=column(policies, "policy"))
    axes.set(ylabel="from arrival to last token, s")


PLOTS: Mapping[str, Callable[[Axes, Result], None]] = MappingProxyType(
    {
        "capacity": _capacity,
        "batching": _batching,
        "prefix": _prefix,
        "tiers": _tiers,
        "snapshots": _snapshots,
        "pressure": _pressure,
        "chunking": _chunking,
        "drafts": _drafts,
        "policies": _policies,
    }
)
"""How to draw each chapter."""


def draw(result: Result, path: Path) -> None:
    """Draw the plot of a chapter."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    settings = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "svg.fonttype": "none",
        "svg.hashsalt": "mie",
        "font.size": 10,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.color": GREY,
        "lines.markersize": 4,
        "axes.axisbelow": True,
    }
    with mpl.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(4.8, 3), layout="constrained")
        PLOTS[result["benchmark"]](axes, result)
        axes.minorticks_off()
        if axes.get_legend_handles_labels()[1]:
            figure.legend(
                loc="outside upper center",
                ncols=3,
                labelcolor=INK,
                columnspacing=1,
                handlelength=1.2,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    text = path.read_text(encoding="utf-8").replace(INK, "currentColor")
    begin = text.index(">", text.index("<svg")) + 1
    lines = (text[:begin] + STYLE + text[begin:]).splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Draw all chapters of a directory."""
    if len(argv) != 1:
        sys.exit("usage: benchmark.py plots DIRECTORY")
    for name in PLOTS:
        path = Path(argv[0]) / f"{name}.json"
        draw(json.loads(path.read_text(encoding="utf-8")), path.parent / "plots" / f"{name}.svg")
