"""Implement ``mie bench``: throughput, latency and serving, measured as in vLLM's benchmarks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from mie.cli.bench_files import check_files, provenance, saved_file, write_results
from mie.cli.bench_report import about, errors, exit_code, report, run_compare
from mie.cli.options import DEFAULT_MODEL, engine_options, llm_with_trace, trace_file
from mie.cli.progress import bar
from mie.config.arguments import option
from mie.config.engine import EngineConfig, EngineSettings, check_integer, check_real
from mie.config.engine_args import EngineArgs
from mie.config.settings import settings_of
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.lab.sim.driver import Bench, LoadResult, Progress
    from mie.lab.workload import Workload

_CLIENTS = (
    "vllm",
    "vllm-chat",
    "openai",
    "openai-chat",
    "openai-audio",
    "sglang",
    "tgi",
    "lmdeploy",
)
"""Values of ``--backend`` in vLLM's benchmark. They are kinds of servers."""

Number = TypeVar("Number", int, float)


def workload_of(
    args: argparse.Namespace, request_rate: float = math.inf, burstiness: float = 1.0
) -> Workload:
    """Return the load that ``args`` describes.

    Raises:
        ConfigError: an option is out of range, or the file is not a workload.
    """
    from mie.lab.draws import Uniform
    from mie.lab.loads import independent
    from mie.lab.workload import Workload

    if args.dataset_name not in (None, "random"):
        raise ConfigError(
            f"--dataset-name {args.dataset_name!r} is unknown; write random, or give a file with "
            "--workload (mie sim workload makes one)"
        )
    if args.backend in _CLIENTS:
        raise ConfigError(
            f"--backend is the engine's compute backend here, not the kind of a server; got "
            f"{args.backend!r} (leave it out; vllm bench serve or guidellm measures a server)"
        )
    if args.workload is not None:
        return Workload.load(Path(args.workload))
    ratio = args.random_range_ratio
    check_real("random_range_ratio", ratio, 0, 1)
    check_integer("random_prefix_len", args.random_prefix_len, 0)
    lengths = {}
    for name in ("random_input_len", "random_output_len"):
        length = getattr(args, name)
        check_integer(name, length, 1)
        low, high = int(length * (1 - ratio)), int(length * (1 + ratio))
        lengths[name.removeprefix("random_")] = Uniform(max(1, low), high)
    return independent(
        num_requests=args.num_prompts,
        **lengths,
        prefix_len=args.random_prefix_len,
        n=args.n,
        request_rate=None if request_rate == math.inf else request_rate,
        burstiness=burstiness,
        seed=args.seed,
        name="random",
    )


def place_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return where a benchmark runs, as fields of its results."""
    if args.device is not None:
        model = args.model_shape or DEFAULT_MODEL
        return {"simulated": True, "device": args.device, "model_id": model}
    return {"simulated": False, "model_id": args.model}


@contextmanager
def open_bench(args: argparse.Namespace) -> Iterator[Bench]:
    """Open the engine that ``args`` describes, real or simulated, with its clock.

    Raises:
        ConfigError: options contradict each other, or one is out of range.
        ModelError: the model cannot be used.
        OSError: the trace could not be written completely.
    """
    if args.model_shape and not args.device:
        raise ConfigError("--model-shape needs --device")
    if args.device and args.model != DEFAULT_MODEL:
        raise ConfigError("--model is not supported by a simulated engine; use --model-shape")
    with _simulated(args) if args.device else _real(args) as bench:
        yield bench
        if bench.engine.log_error is not None:
            raise bench.engine.log_error


def run_engine_load(
    bench: Bench, workload: Workload, progress: Progress, max_concurrency: int | None = None
) -> LoadResult:
    """Run the load with an empty prefix cache."""
    from mie.lab.sim.driver import run_load

    bench.engine.reset_prefix_cache()
    return run_load(bench, workload, max_concurrency=max_concurrency, progress=progress)


def requests_bar(workload: Workload, num_runs: int = 1) -> AbstractContextManager[Progress]:
    """Return a progress bar that counts the requests that have ended."""
    return bar("measuring", "request", len(workload.requests) * num_runs)


def simulated_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """Return the settings of a simulated engine, with ``defaults`` for missing options.

    Raises:
        ConfigError: an option is out of range, or has no effect in a simulation.
    """
    options = engine_options(args)
    EngineArgs(**options)  # refuses unknown settings
    given = {name: options[name] for name, *_ in settings_of(EngineArgs) if name in options}
    simulated = {
        name
        for name, _, declared in settings_of(EngineSettings)
        if declared.is_simulated and not declared.backends
    }
    for name in sorted(given.keys() - simulated):
        raise ConfigError(f"{option(name)} has no effect on a simulated engine (leave it out)")
    return EngineConfig(**{"event_log_steps": 0, **defaults, **given})


@contextmanager
def _real(args: argparse.Namespace) -> Iterator[Bench]:
    from mie.lab.sim.costs import WallClock
    from mie.lab.sim.driver import Bench

    with llm_with_trace(args, skip_tokenizer_init=True) as llm:
        vocab_size = llm.model_config.vocab_size
        yield Bench(engine=llm.engine, clock=WallClock(), vocab_size=vocab_size)


@contextmanager
def _simulated(args: argparse.Namespace) -> Iterator[Bench]:
    from mie.lab.sim.devices import find_device, find_shape
    from mie.lab.sim.simulated import simulated_on

    config = simulated_config(args)
    with trace_file(args.trace) as file:
        model = find_shape(args.model_shape or DEFAULT_MODEL)
        bench = simulated_on(find_device(args.device), model, config, trace=file)
        yield bench
        bench.engine.log.close()


# Throughput: all requests at once.


def _run_throughput(args: argparse.Namespace) -> int:
    from mie.lab.metrics import summarize

    check_files(args)
    workload = workload_of(args)
    with open_bench(args) as bench, requests_bar(workload) as progress:
        result = run_engine_load(bench, workload, progress)
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
    from mie.lab.loads import from_lengths
    from mie.lab.metrics import mean_and_std, percentile
    from mie.lab.sim.costs import SECOND

    for name, low in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1)):
        check_integer(name, getattr(args, name), low)
    check_integer("num_iters_warmup", args.num_iters_warmup, 0)
    check_files(args)
    workload = from_lengths([(args.input_len, args.output_len)] * args.batch_size, name="batch")
    num_runs = args.num_iters_warmup + args.num_iters
    with open_bench(args) as bench, requests_bar(workload, num_runs) as progress:
        results = [run_engine_load(bench, workload, progress) for _ in range(num_runs)]
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


def run_serve(args: argparse.Namespace) -> int:
    """Run the load, report it, and return the exit code."""
    from mie.lab.metrics import Goodput, summarize

    if args.max_concurrency is not None:
        check_integer("max_concurrency", args.max_concurrency, 1)
    goodput = Goodput.parse(args.goodput) if args.goodput else None
    wanted: dict[str, Any] = {
        "metrics": args.percentile_metrics.split(","),
        "percentiles": numbers_in(
            "--metric-percentiles", args.metric_percentiles, float, "numbers such as 50,99"
        ),
        "goodput": goodput,
    }
    summarize([], 0, **wanted)  # refuses bad values before anything is loaded
    check_files(args)
    workload = workload_of(args, args.request_rate, args.burstiness)
    with open_bench(args) as bench, requests_bar(workload) as progress:
        result = run_engine_load(bench, workload, progress, args.max_concurrency)
    results = {
        **about(place_of(args), workload, result),
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
        write_results("--save-result", saved_file(args), {**provenance(args), **results, **details})
    return exit_code(result)


def numbers_in(option: str, text: str, kind: Callable[[str], Number], example: str) -> list[Number]:
    """Return the numbers of an option. Commas separate them.

    Raises:
        ConfigError: one is no number. The message has the ``example``.
    """
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not understood; write {example}") from error


def _details(result: LoadResult) -> dict[str, list[Any]]:
    """Return a value for each request, times in seconds, as vLLM keeps them."""
    from mie.lab.sim.costs import SECOND

    return {
        "input_lens": [record.num_prompt for record in result.records],
        "output_lens": [record.num_output for record in result.records],
        "ttfts": [(record.ttft or 0) / SECOND for record in result.records],
        "itls": [[gap / SECOND for gap in record.itl] for record in result.records],
    }


run = MappingProxyType(
    {
        "throughput": _run_throughput,
        "latency": _run_latency,
        "serve": run_serve,
        "compare": run_compare,
    }
)
"""The benchmarks."""
