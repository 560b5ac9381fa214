"""Read the options that benchmarks share: where to run, and which load to send."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.options import (
    DEFAULT_MODEL,
    engine_options,
    llm_with_trace,
    trace_file,
)
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.config.engine import EngineConfig
    from mie.sim.driver import Bench, LoadResult
    from mie.sim.workload import Workload


def workload_of(
    args: argparse.Namespace, request_rate: float = math.inf, burstiness: float = 1.0
) -> Workload:
    """Return the load that ``args`` describes.

    Raises:
        ConfigError: an option is out of range, or the file is not a workload.
    """
    from mie.config.engine import check_integer, check_real
    from mie.sim.draws import Uniform
    from mie.sim.loads import independent
    from mie.sim.workload import Workload

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
    if args.costs is not None:
        return costs_as_place(args.costs)
    if args.device is not None:
        model = args.model_shape or DEFAULT_MODEL
        return {"simulated": True, "device": args.device, "model_id": model}
    return {"simulated": False, "model_id": args.model}


def costs_as_place(path: str) -> dict[str, Any]:
    """Return the place of a simulation with a cost file.

    The costs imply the device and the model of the recorded run.
    """
    from mie.sim.calibrate import read_costs

    source = read_costs(Path(path))[1].get("trace", "a run that the file does not name")
    place = f"as recorded in {source}"
    return {"simulated": True, "device": place, "model_id": place, "costs": path}


@contextmanager
def open_bench(args: argparse.Namespace) -> Iterator[Bench]:
    """Open the engine that ``args`` describes, real or simulated, with its clock.

    Raises:
        ConfigError: options contradict each other, or one is out of range.
        ModelError: the model cannot be used.
        OSError: the trace could not be written completely.
    """
    _refuse_contradictions(args)
    with _simulated(args) if args.device or args.costs else _real(args) as bench:
        yield bench
        if bench.engine.log_error is not None:
            raise bench.engine.log_error


def run_engine_load(
    bench: Bench, workload: Workload, max_concurrency: int | None = None
) -> LoadResult:
    """Run the load with an empty prefix cache."""
    from mie.sim.driver import run_load

    bench.engine.reset_prefix_cache()
    return run_load(bench, workload, max_concurrency=max_concurrency)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    for is_wrong, message in (
        (args.device and args.costs, "--device and --costs both define the costs; pass one"),
        (args.model_shape and not args.device, "--model-shape needs --device"),
        (
            (args.device or args.costs) and args.model != DEFAULT_MODEL,
            "--model is not supported by a simulated engine; use --model-shape",
        ),
    ):
        if is_wrong:
            raise ConfigError(message)


def simulated_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """Return the settings of a simulated engine, with ``defaults`` for missing options.

    Raises:
        ConfigError: an option is out of range, or has no effect in a simulation.
    """
    from mie.config.arguments import option
    from mie.config.engine import EngineConfig, EngineSettings
    from mie.config.engine_args import EngineArgs
    from mie.config.settings import settings_of

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
    from mie.sim.clock import WallClock
    from mie.sim.driver import Bench

    with llm_with_trace(args, skip_tokenizer_init=True) as llm:
        vocab_size = llm.model_config.vocab_size
        yield Bench(engine=llm.engine, clock=WallClock(), vocab_size=vocab_size)


@contextmanager
def _simulated(args: argparse.Namespace) -> Iterator[Bench]:
    from mie.sim.calibrate import read_costs
    from mie.sim.devices import find_device
    from mie.sim.shapes import find_shape
    from mie.sim.simulated import simulated, simulated_on

    config = simulated_config(args)
    with trace_file(args.trace) as file:
        if args.costs is not None:
            costs, _ = read_costs(Path(args.costs))
            bench = simulated(costs, config, trace=file)
        else:
            model = find_shape(args.model_shape or DEFAULT_MODEL)
            bench = simulated_on(find_device(args.device), model, config, trace=file)
        yield bench
        bench.engine.log.close()
