"""Implement ``mie bench``: throughput, latency and serving, measured as in vLLM's benchmarks.

Each function in `COMMANDS` adds the parser of a benchmark and sets its ``run``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.bench_book import add_book
from mie.cli.bench_options import (
    add_load_options,
    add_place_options,
    open_bench,
    place_of,
    workload_of,
)
from mie.cli.bench_report import add_report_options, report, write_results
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.sim.driver import Bench, LoadResult
    from mie.sim.workload import Workload

Subparsers = argparse._SubParsersAction  # the result of add_subparsers has no public type

_EPILOG = """\
examples:
  mie bench throughput                                 the bundled model on this machine
  mie bench throughput --num-prompts 16 --output-json before.json
  mie bench serve --request-rate 8 --goodput ttft:200 tpot:20
  mie bench serve --device h200 --model-shape Llama-3.1-8B --num-prompts 1000 --request-rate 40
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
        result = _run_load(bench, workload)
    summary = summarize(result.records, result.duration_ns, metrics=())
    num_tokens = int(summary["total_input_tokens"] or 0) + int(summary["total_output_tokens"] or 0)
    report(
        args,
        {
            **_about(args, workload, result),
            "elapsed_time": summary["duration"],
            "num_requests": len(result.records),
            "total_num_tokens": num_tokens,
            "requests_per_second": summary["request_throughput"],
            "tokens_per_second": summary["total_token_throughput"],
            **summary,
            "errors": _errors(result),
        },
    )
    return _exit_code(result)


# Latency: one batch, repeated.

_LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def _add_latency(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "latency",
        help="latency of one batch of requests",
        description="Measure the latency of one batch of requests from start to end.",
    )
    add_place_options(parser)
    group = parser.add_argument_group("load")
    for name, default, what in (
        ("--input-len", 32, "prompt tokens"),
        ("--output-len", 128, "output tokens"),
        ("--batch-size", 8, "requests in the batch"),
        ("--num-iters-warmup", 2, "warm-up batches"),
        ("--num-iters", 10, "measured batches"),
    ):
        group.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
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
            _run_load(bench, workload) for _ in range(args.num_iters_warmup + args.num_iters)
        ]
    latencies = [result.duration_ns / SECOND for result in results[args.num_iters_warmup :]]
    report(
        args,
        {
            **_about(args, workload, results[-1]),
            "avg_latency": mean_and_std(latencies)[0],
            "latencies": latencies,
            "percentiles": {
                str(percent): percentile(latencies, percent) for percent in _LATENCY_PERCENTILES
            },
            "errors": _errors(results[-1]),
        },
    )
    return _exit_code(results[-1])


# Serving: requests arrive over time.


def _add_serve(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="latencies and goodput while requests arrive over time",
        description="Measure latencies and goodput while requests arrive over time, without HTTP.",
    )
    add_place_options(parser)
    add_load_options(parser)
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests per second (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less is burstier, more is steadier (default: 1)",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="maximum number of unfinished requests"
    )
    _add_metric_options(parser)
    add_report_options(parser)
    group = parser.add_argument_group("result files in vLLM's format")
    group.add_argument(
        "--save-result", action="store_true", help="write the results to a JSON file"
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="include the numbers of every request"
    )
    group.add_argument(
        "--result-dir", default=".", metavar="DIR", help="directory of the file (default: .)"
    )
    group.add_argument(
        "--result-filename",
        default="mie-serve.json",
        metavar="NAME",
        help="name of the file (default: mie-serve.json)",
    )
    parser.set_defaults(run=_run_serve)


def _add_metric_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics", "Defined in docs/glossary.md.")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within these limits in ms: ttft, tpot, e2el",
    )
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el,queue",
        metavar="NAMES",
        help="metrics whose percentiles are reported (default: ttft,tpot,itl,e2el,queue)",
    )
    group.add_argument(
        "--metric-percentiles",
        default="99",
        metavar="LIST",
        help="percentiles, such as 50,90,99.9 (default: 99)",
    )


def _run_serve(args: argparse.Namespace) -> int:
    from mie.config.engine import check_integer
    from mie.sim.metrics import Goodput, summarize

    if args.max_concurrency is not None:
        check_integer("max_concurrency", args.max_concurrency, 1)
    goodput = Goodput.parse(args.goodput) if args.goodput else None
    wanted: dict[str, Any] = {
        "metrics": args.percentile_metrics.split(","),
        "percentiles": _percentiles(args.metric_percentiles),
        "goodput": goodput,
    }
    summarize([], 0, **wanted)  # checks the options before anything is loaded
    workload = workload_of(args, args.request_rate, args.burstiness)
    with open_bench(args) as bench:
        result = _run_load(bench, workload, args.max_concurrency)
    results = {
        **_about(args, workload, result),
        "num_prompts": len(result.records),
        "request_rate": args.request_rate if args.request_rate < math.inf else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summarize(result.records, result.duration_ns, **wanted),
        "errors": _errors(result),
    }
    report(args, results)
    if args.save_result or args.save_detailed:
        details = _details(result) if args.save_detailed else {}
        write_results(Path(args.result_dir, args.result_filename), {**results, **details})
    return _exit_code(result)


def _percentiles(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--metric-percentiles must be numbers such as 50,99; got {text!r}"
        ) from error


def _details(result: LoadResult) -> dict[str, list[Any]]:
    """Return lists with one value per request, in vLLM's format. Times are in seconds."""
    from mie.sim.clock import SECOND

    return {
        "input_lens": [record.num_prompt for record in result.records],
        "output_lens": [record.num_output for record in result.records],
        "ttfts": [(record.ttft or 0) / SECOND for record in result.records],
        "itls": [[gap / SECOND for gap in record.itl] for record in result.records],
    }


# Shared by all benchmarks.


def _run_load(bench: Bench, workload: Workload, max_concurrency: int | None = None) -> LoadResult:
    """Run the load with an empty prefix cache."""
    from mie.sim.driver import run_load

    bench.engine.reset_prefix_cache()
    return run_load(bench, workload, max_concurrency=max_concurrency)


def _about(args: argparse.Namespace, workload: Workload, result: LoadResult) -> dict[str, Any]:
    return {
        "backend": "mie",
        **place_of(args),
        "workload": workload.name,
        "workload_sha256": workload.digest,
        "num_steps": len(result.steps),
        "num_preemptions": result.num_preempted,
        "num_cached_tokens": result.num_cached_tokens,
        "peak_blocks": result.peak_blocks,
    }


def _errors(result: LoadResult) -> dict[str, str]:
    """Return the reason why each refused request was refused."""
    return {record.request_id: record.error for record in result.records if record.error}


def _exit_code(result: LoadResult) -> int:
    return 1 if any(record.error for record in result.records) else 0


COMMANDS: tuple[Callable[[Subparsers[argparse.ArgumentParser]], None], ...] = (
    _add_throughput,
    _add_latency,
    _add_serve,
    add_book,
)
"""Functions that add the benchmarks, in the order of the help."""
