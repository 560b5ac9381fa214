"""``mie bench serve``: latencies and goodput of the engine, or of a server, under a load."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.bench_options import (
    add_load_options,
    add_place_options,
    open_bench,
    place_of,
    run_engine_load,
    workload_of,
)
from mie.cli.bench_report import (
    about,
    add_report_options,
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

Subparsers = argparse._SubParsersAction  # the result of add_subparsers has no public type


def add_serve(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add ``mie bench serve``."""
    parser = subparsers.add_parser(
        "serve",
        help="latencies and goodput while requests keep coming",
        description="Latencies and goodput while requests keep coming: of the engine without the"
        " HTTP edge, or with --base-url of any server that speaks OpenAI's API.",
    )
    add_place_options(parser)
    _add_server_options(parser)
    add_load_options(parser)
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests a second (inf: all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 (the default): a Poisson process; less is burstier, more is steadier",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests that are out at once at most"
    )
    _add_metric_options(parser)
    add_report_options(parser)
    group = parser.add_argument_group("results as vLLM keeps them")
    group.add_argument("--save-result", action="store_true", help="write the JSON object to a file")
    group.add_argument("--save-detailed", action="store_true", help="with every request's numbers")
    group.add_argument("--result-dir", default=".", metavar="DIR", help="where (here)")
    group.add_argument(
        "--result-filename", default="mie-serve.json", metavar="NAME", help="(mie-serve.json)"
    )
    parser.set_defaults(run=_run_serve)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "Measure a server instead of an engine here.")
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="its address, such as http://127.0.0.1:8000; --model is then the name to ask for"
        " (default: the first that the server lists)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="its key (default: the environment's OPENAI_API_KEY)"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="draw the prompts' token ids below N (default: what /tokenizer_info says)",
    )
    group.add_argument(
        "--openai-only",
        action="store_true",
        help="send no field that OpenAI's API lacks, such as ignore_eos; answers may end early",
    )
    group.add_argument(
        "--reset-prefix-cache", action="store_true", help="empty the server's prefix cache first"
    )


def _add_metric_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics", "Defined in docs/glossary.md.")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep these limits: ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el,queue",
        metavar="NAMES",
        help="whose distribution is told (ttft,tpot,itl,e2el,queue)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="LIST", help="such as 50,90,99.9 (99)"
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
