"""Implement ``mie bench``: throughput, latency and serving, measured as in vLLM's benchmarks.

Each function in `COMMANDS` adds the parser of a benchmark and sets its ``run``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mie.cli.bench_compare import add_compare
from mie.cli.bench_options import (
    add_load_options,
    add_place_options,
    open_bench,
    place_of,
    run_engine_load,
    workload_of,
)
from mie.cli.bench_report import about, add_report_options, errors, exit_code, report
from mie.cli.bench_serve import add_serve
from mie.cli.parser import add_numbers

Subparsers = argparse._SubParsersAction  # the result of add_subparsers has no public type

_EPILOG = """\
examples:
  mie bench throughput                                 the bundled model on this machine
  mie bench throughput --num-prompts 16 --output-json before.json
  mie bench serve --request-rate 8 --goodput ttft:200 tpot:20
  mie bench serve --device h200 --model-shape Llama-3.1-8B --num-prompts 1000 --request-rate 40
  mie bench serve --base-url http://127.0.0.1:8000 --request-rate 8 --output-json measured.json
  mie bench compare simulated.json measured.json
  mie bench latency --batch-size 4
  mie sim workload chats -o chats.json; mie bench serve --workload chats.json

Prompts are random tokens, and answers have the requested length. docs/glossary.md defines the
metrics, and docs/simulator.md says how accurate a simulation is.
"""


def add_parser(
    subparsers: Subparsers[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie bench`` to the command line. Each benchmark's parser sets ``run``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the engine, or simulate it on another device",
        description="Measure the engine under load, or simulate it on another device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for add_command in COMMANDS:
        add_command(benchmarks)
    return parser


# Throughput: all requests at once.


def _add_throughput(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "throughput",
        help="tokens per second when all requests arrive at once",
        description="Measure tokens per second when all requests arrive at once.",
    )
    add_place_options(parser)
    add_load_options(parser)
    add_report_options(parser)
    parser.set_defaults(run=_run_throughput)


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
_LATENCY_LOAD = (
    ("input_len", 32, "prompt tokens"),
    ("output_len", 128, "output tokens"),
    ("batch_size", 8, "requests in the batch"),
    ("num_iters_warmup", 2, "warm-up batches"),
    ("num_iters", 10, "measured batches"),
)


def _add_latency(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "latency",
        help="latency of one batch of requests",
        description="Measure the latency of one batch of requests from start to end.",
    )
    add_place_options(parser)
    add_numbers(parser.add_argument_group("load"), _LATENCY_LOAD)
    add_report_options(parser)
    parser.set_defaults(run=_run_latency)


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


COMMANDS: tuple[Callable[[Subparsers[argparse.ArgumentParser]], None], ...] = (
    _add_throughput,
    _add_latency,
    add_serve,
    add_compare,
)
"""Functions that add the benchmarks, in the order of the help."""
