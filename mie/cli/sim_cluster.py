"""Implement ``mie sim cluster``: replicas behind a router, simulated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mie.cli.bench_report import table, write_results
from mie.errors import ConfigError

_EPILOG = """\
Every replica is the real scheduler and allocator on a simulated device, and the router is that of
mie serve --replicas. The load grows with the number of replicas. Some prefixes are far more
popular than others (Zipf's law).

columns:
  possible    the hit rate of one cache without limits
  hit rate    prompt tokens found in the replicas' prefix caches
  imbalance   tokens that the busiest replica computes, divided by the mean
"""


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie sim cluster`` to the commands of ``mie sim``."""
    parser = commands.add_parser(
        "cluster",
        help="hit rate, balance and latency of replicas behind a router",
        description="Simulate replicas behind a router under a load of skewed prefixes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--replicas", default="1,3,10", metavar="LIST", help="sizes of clusters (default: 1,3,10)"
    )
    parser.add_argument(
        "--request-router",
        default="prefix,random",
        metavar="LIST",
        help="prefix or random, or both (default: prefix,random)",
    )
    for name, kind, default, text in (
        ("device", str, "a10g", "device of each replica"),
        ("model-shape", str, "Llama-3.1-8B", "shape of the model"),
        ("requests-per-replica", int, 40, "number of requests for each replica"),
        ("rate-per-replica", float, 4.0, "requests a second for each replica"),
        ("num-prefixes", int, 1000, "number of prefixes"),
        ("exponent", float, 1.0, "skew of their popularity; 0 makes all equally popular"),
        ("prefix-len", int, 512, "tokens of a prefix"),
        ("seed", int, 0, "seed for lengths, arrivals and prefixes"),
    ):
        metavar = "NAME" if kind is str else "N"
        help = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=help)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each cluster")
    parser.add_argument(
        "--output-json", metavar="FILE", help="also write the figures to a file, as JSON"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Simulate each cluster, print its figures, and return 0.

    Raises:
        ConfigError: a name is unknown, or a number is out of range.
    """
    from dataclasses import fields

    from mie.sim.cluster import ROUTERS, ClusterLoad, simulate_cluster

    load = ClusterLoad(**{each.name: getattr(args, each.name) for each in fields(ClusterLoad)})
    routers = args.request_router.split(",")
    if not set(routers) <= ROUTERS.keys():
        raise ConfigError(
            f"--request-router {args.request_router!r} is unknown; known are {', '.join(ROUTERS)}"
        )
    rows = [
        simulate_cluster(load, size, router) for size in _sizes(args.replicas) for router in routers
    ]
    if args.output_json is not None:
        write_results(Path(args.output_json), {"clusters": rows})
    print("\n".join(map(json.dumps, rows) if args.json else cluster_table(rows)))
    return 0


def cluster_table(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, with a row for each cluster."""
    heads = ("replicas", "router", "possible", "hit rate", "imbalance", "mean TTFT", "p99 TTFT")
    cells = [
        (
            f"{row['num_replicas']:,}",
            row["router"],
            f"{row['possible_hit_rate']:.1%}",
            f"{row['hit_rate']:.1%}",
            f"{row['imbalance']:.2f}",
            f"{row['mean_ttft_ms']:,.0f} ms",
            f"{row['p99_ttft_ms']:,.0f} ms",
        )
        for row in rows
    ]
    yield from table(heads, cells)


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--replicas {text!r} is not understood; write 1,3,10") from error
