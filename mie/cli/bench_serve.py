"""``mie bench serve``: latencies and goodput of the engine, or of a server, under a load."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.bench_options import (
    open_bench,
    place_of,
    run_engine_load,
    workload_of,
)
from mie.cli.bench_report import (
    about,
    errors,
    exit_code,
    report,
    write_results,
)
from mie.cli.options import DEFAULT_MODEL, engine_options
from mie.config.arguments import option
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.cli.bench_report import AnyResult
    from mie.sim.workload import Workload


def run_serve(args: argparse.Namespace) -> int:
    """Run the load, report it, and return the exit code."""
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
    summarize([], 0, **wanted)  # refuses bad values before anything is loaded
    workload = workload_of(args, args.request_rate, args.burstiness)
    place, result = _served(args, workload) if args.base_url else _stepped(args, workload)
    results = {
        **about(place, workload, result),
        "num_prompts": len(result.records),
        "request_rate": args.request_rate if args.request_rate < math.inf else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summarize(result.records, result.duration_ns, **wanted),
        "errors": errors(result),
    }
    report(args, results)
    if args.save_result or args.save_detailed:
        details = _details(result) if args.save_detailed else {}
        write_results(Path(args.result_dir, args.result_filename), {**results, **details})
    return exit_code(result)


def _stepped(args: argparse.Namespace, workload: Workload) -> tuple[dict[str, Any], AnyResult]:
    """Run the load on an engine in this process."""
    for name in ("api_key", "vocab_size", "openai_only", "reset_prefix_cache"):
        if getattr(args, name):
            raise ConfigError(f"{option(name)} needs --base-url")
    with open_bench(args) as bench:
        return place_of(args), run_engine_load(bench, workload, args.max_concurrency)


def _served(args: argparse.Namespace, workload: Workload) -> tuple[dict[str, Any], AnyResult]:
    """Run the load on the server that ``--base-url`` names."""
    from mie.config.engine import check_integer
    from mie.sim.remote import Server, run_load_on

    refused = [name for name in ("device", "model_shape", "costs", "trace") if getattr(args, name)]
    refused += engine_options(args)
    if refused:
        raise ConfigError(
            f"{option(refused[0])} has no effect on the server at --base-url (leave it out)"
        )
    if args.vocab_size is not None:
        check_integer("vocab_size", args.vocab_size, 1)
    server = Server(
        base_url=args.base_url,
        model=None if args.model == DEFAULT_MODEL else args.model,
        vocab_size=args.vocab_size,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        openai_only=args.openai_only,
    )
    result = run_load_on(
        server,
        workload,
        max_concurrency=args.max_concurrency,
        reset_prefix_cache=args.reset_prefix_cache,
    )
    place = {
        "backend": "openai",
        "simulated": False,
        "base_url": server.root,
        "model_id": result.model,
    }
    return place, result


def _percentiles(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--metric-percentiles {text!r} is not understood; write numbers such as 50,99"
        ) from error


def _details(result: AnyResult) -> dict[str, list[Any]]:
    """Return a value for each request, times in seconds, as vLLM keeps them."""
    from mie.sim.clock import SECOND

    return {
        "input_lens": [record.num_prompt for record in result.records],
        "output_lens": [record.num_output for record in result.records],
        "ttfts": [(record.ttft or 0) / SECOND for record in result.records],
        "itls": [[gap / SECOND for gap in record.itl] for record in result.records],
    }
