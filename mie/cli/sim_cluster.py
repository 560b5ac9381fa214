"""Implement ``mie sim cluster``: replicas behind a router, simulated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mie.cli.bench_report import table, write_results
from mie.errors import ConfigError


def run_cluster(args: argparse.Namespace) -> int:
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
