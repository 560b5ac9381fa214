"""Implement ``mie sim``: devices, workloads, and costs from a recorded run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mie.checkpoint.tensors import num_parameters
from mie.cli.bench import costs_as_place, numbers_in, simulated_config
from mie.cli.bench_files import check_files, provenance, write_results
from mie.cli.bench_report import COMPARED, COSTS, number, place_line, table, write_text
from mie.errors import ConfigError


def _write(args: argparse.Namespace, text: str) -> None:
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_text(Path(args.output), text)


def _run_devices(args: argparse.Namespace) -> int:
    from mie.sim.devices import DEVICES, SHAPES, find_shape

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
    from mie.sim.loads import PRESETS

    if args.kind == "list":
        print("\n".join(PRESETS))
        return 0
    if args.kind not in PRESETS:
        raise ConfigError(f"workload {args.kind!r} is unknown; known are: {', '.join(PRESETS)}")
    _write(args, PRESETS[args.kind](seed=args.seed).to_json())
    return 0


def _run_extract(args: argparse.Namespace) -> int:
    from mie.events import read_log
    from mie.sim.recorded import recording_of

    _write(args, recording_of(read_log(args.trace), Path(args.trace).name).workload.to_json())
    return 0


def _run_calibrate(args: argparse.Namespace) -> int:
    from mie.events import read_log
    from mie.sim.calibrate import fit_costs
    from mie.sim.recorded import recording_of

    fit = fit_costs(recording_of(read_log(args.trace)).steps)
    _write(args, fit.to_json(trace=Path(args.trace).name))
    if args.output is not None:
        costs = asdict(fit.costs)
        rows = [(label, f"{costs[name] / 1e6:,.3f}") for name, label in COSTS.items()]
        print("\n".join(table(("cost", "µs"), rows)))
    print(
        f"[{fit.num_steps} steps · relative error of a step: median {fit.median_error:.1%}, 90 % "
        f"within {fit.p90_error:.1%} · of all together: {fit.total_error:+.1%}]",
        file=sys.stderr,
    )
    return 0


def _run_predict(args: argparse.Namespace) -> int:
    from mie.events import read_log
    from mie.sim.calibrate import read_costs
    from mie.sim.driver import run_load
    from mie.sim.metrics import summarize
    from mie.sim.recorded import recording_of
    from mie.sim.simulated import simulated

    costs, _ = read_costs(Path(args.costs))
    recording = recording_of(read_log(args.trace), Path(args.trace).name)
    if recording.has_windows:
        raise ConfigError(
            f"{args.trace} is a run of a model that frees blocks behind a window; its blocks cannot"
            " be simulated without the model's shape (use mie bench with --device, --model-shape"
            " and the workload of mie sim extract)"
        )
    sizes: dict[str, Any] = {"block_size": recording.block_size}
    if args.kv_cache_memory_bytes is None:
        # A pool with room for all tokens is enough. The file may claim any larger number.
        sizes["num_blocks"] = min(recording.num_blocks, recording.num_blocks_of_all)
    config = simulated_config(args, **sizes)
    num_host_blocks = min(recording.num_host_blocks, recording.num_blocks_of_all)
    num_slots, num_host_slots = (
        min(count, recording.num_blocks_of_all) for count in recording.num_states
    )
    bench = simulated(
        costs, config, num_host_blocks=num_host_blocks, num_states=(num_slots, num_host_slots)
    )
    result = run_load(bench, recording.workload)
    predicted = summarize(result.records, result.duration_ns)
    measured = summarize(recording.records, recording.duration_ns)
    place = costs_as_place(args.costs)
    if args.json:
        results = {
            "predicted": {**place, **predicted},
            "measured": {"simulated": False, **measured},
        }
        print(json.dumps(results, indent=2))
    else:
        print(f"Predicted: {place_line(place)}\n")
        print("\n".join(_comparison(predicted, measured)))
    refused = [record for record in result.records if record.error]
    for record in refused:
        print(f"mie: error: request {record.request_id}: {record.error}", file=sys.stderr)
    return 1 if refused else 0


def _comparison(
    predicted: Mapping[str, float | None], measured: Mapping[str, float | None]
) -> Iterator[str]:
    rows = []
    for name, label in COMPARED.items():
        ours, theirs = predicted[name], measured[name]
        error = "–" if ours is None or not theirs else f"{ours / theirs - 1:+.1%}"
        rows.append((label, number(ours), number(theirs), error))
    yield from table(("", "predicted", "measured", "error"), rows)


def run_cluster(args: argparse.Namespace) -> int:
    """Simulate each cluster, print its figures, and return 0."""
    from mie.sim.cluster import ROUTERS, ClusterLoad, simulate_cluster

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


run = MappingProxyType(
    {
        "devices": _run_devices,
        "workload": _run_workload,
        "extract": _run_extract,
        "calibrate": _run_calibrate,
        "predict": _run_predict,
        "cluster": run_cluster,
    }
)
"""The commands of ``mie sim``."""
