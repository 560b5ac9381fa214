"""Implement ``mie bench``: throughput, latency and serving, measured as in vLLM's benchmarks."""

from __future__ import annotations

import argparse

from mie.cli.bench_options import (
    open_bench,
    place_of,
    run_engine_load,
    workload_of,
)
from mie.cli.bench_report import about, errors, exit_code, report, run_compare
from mie.cli.bench_serve import run_serve
from mie.cli.declared import Commands, declared
from mie.cli.options import add_engine_options


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``mie bench`` to the command line. Each benchmark's parser sets ``run``."""
    parser = declared(commands, "bench")
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name, run in (
        ("throughput", _run_throughput),
        ("latency", _run_latency),
        ("serve", run_serve),
        ("compare", run_compare),
    ):
        declared(benchmarks, f"bench {name}", run, engine=add_engine_options)


# Throughput: all requests at once.


def _run_throughput(args: argparse.Namespace) -> int:
    from mie.sim.metrics import summarize

    workload = workload_of(args)
    with open_bench(args) as bench:
        result = run_engine_load(bench, workload)
    summary = summarize(result.records, result.duration_ns, metrics=())
    num_tokens = int(summary["total_input_tokens"] or 0) + int(summary["total_output_tokens"] or 0)
    report(
        args,
        {
            **about(place_of(args), workload, result),
            "elapsed_time": summary["duration"],
            "num_requests": len(result.records),
            "total_num_tokens": num_tokens,
            "requests_per_second": summary["request_throughput"],
            "tokens_per_second": summary["total_token_throughput"],
            **summary,
            "errors": errors(result),
        },
    )
    return exit_code(result)


# Latency: one batch, repeated.

_LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def _run_latency(args: argparse.Namespace) -> int:
    from mie.config.engine import check_integer
    from mie.sim.clock import SECOND
    from mie.sim.loads import from_lengths
    from mie.sim.metrics import mean_and_std, percentile

    for name, low in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1)):
        check_integer(name, getattr(args, name), low)
    check_integer("num_iters_warmup", args.num_iters_warmup, 0)
    workload = from_lengths([(args.input_len, args.output_len)] * args.batch_size, name="batch")
    with open_bench(args) as bench:
        results = [
            run_engine_load(bench, workload) for _ in range(args.num_iters_warmup + args.num_iters)
        ]
    latencies = [result.duration_ns / SECOND for result in results[args.num_iters_warmup :]]
    report(
        args,
        {
            **about(place_of(args), workload, results[-1]),
            "avg_latency": mean_and_std(latencies)[0],
            "latencies": latencies,
            "percentiles": {
                str(percent): percentile(latencies, percent) for percent in _LATENCY_PERCENTILES
            },
            "errors": errors(results[-1]),
        },
    )
    return exit_code(results[-1])
