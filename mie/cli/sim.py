"""Implement ``mie sim``: devices, workloads and clusters."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mie.checkpoint.tensors import num_parameters
from mie.cli.bench import numbers_in
from mie.cli.bench_files import check_files, provenance, write_results
from mie.cli.bench_report import table, write_text
from mie.errors import ConfigError


def _write(args: argparse.Namespace, text: str) -> None:
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_text(Path(args.output), text)


def _run_devices(args: argparse.Namespace) -> int:
    from mie.lab.sim.devices import DEVICES, SHAPES, find_shape

    rows = [
        (name, f"{device.bandwidth / 1e9:,.0f}", f"{device.flops / 1e12:,.1f}", device.title)
        for name, device in DEVICES.items()
    ]
    print("\n".join(table(("device", "GB/s", "TFLOP/s", "description"), rows)))
    for name, device in DEVICES.items():
        print(f"\n{name}: {device.source}.")
    models = {name: find_shape(name) for name in (*SHAPES, "bundled")}
    sizes = [(name, f"{num_parameters(model):,}") for name, model in models.items()]
    print()
    print("\n".join(table(("model", "parameters"), sizes)))
    return 0


def _run_workload(args: argparse.Namespace) -> int:
    from mie.lab.loads import PRESETS

    if args.kind == "list":
        print("\n".join(PRESETS))
        return 0
    if args.kind not in PRESETS:
        raise ConfigError(f"workload {args.kind!r} is unknown; known are: {', '.join(PRESETS)}")
    _write(args, PRESETS[args.kind](seed=args.seed).to_json())
    return 0


def run_cluster(args: argparse.Namespace) -> int:
    """Simulate each cluster, print its figures, and return 0."""
    from mie.lab.sim.cluster import ROUTERS, ClusterLoad, simulate_cluster

    load = ClusterLoad(**{each.name: getattr(args, each.name) for each in fields(ClusterLoad)})
    routers = args.request_router.split(",")
    if not set(routers) <= ROUTERS.keys():
        raise ConfigError(
            f"--request-router {args.request_router!r} is unknown; known are {', '.join(ROUTERS)}"
        )
    sizes = numbers_in("--replicas", args.replicas, int, "1,3,10")
    check_files(args)
    rows = [simulate_cluster(load, size, router) for size in sizes for router in routers]
    if args.output_json is not None:
        path = Path(args.output_json)
        write_results("--output-json", path, {**provenance(args), "clusters": rows})
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


run = MappingProxyType({"devices": _run_devices, "workload": _run_workload, "cluster": run_cluster})
"""The commands of ``mie sim``."""
