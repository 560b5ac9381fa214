"""Implement ``mie doctor``: the backends that this machine can run, its problems, and remedies."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mie.base.cache_dir import CacheError, open_cache
from mie.base.version import __version__
from mie.cli.diagnosis.cpu import CPU_CHECKS
from mie.cli.diagnosis.gpu import GPU_CHECKS, JETSON_CHECKS
from mie.cli.diagnosis.machine import ASK_SECONDS, Check, Facts, Machine, Survey, Topic
from mie.cli.parser import Commands, declared
from mie.cli.progress import bar
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.ops.backend import Progress  # imports NumPy, which may be broken


BACKENDS = ("numpy", "jit", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, from those that every machine can run to those that few can.
"""


TRIAL_SECONDS = 3.0
"""Timeout in seconds of a trial that nobody asked for. A first compilation takes longer."""


def examine(
    machine: Machine,
    backends: Sequence[str],
    progress: Progress,
    trial_seconds: float = TRIAL_SECONDS,
) -> tuple[list[Check], dict[str, Facts]]:
    """Return the results in the order of the tables of checks, and of each backend's trial.

    A trial's result is empty if the backend works. Otherwise "error" is the reason, or, with
    "is_late", the trial had not ended after ``trial_seconds``. No backend works if a public name of
    mie cannot be loaded.
    """
    trials = {name: ("backend", name) for name in backends}
    package: Topic = ("package",)
    topics: dict[Topic, float] = dict.fromkeys((*Survey.topics, package), ASK_SECONDS)
    topics |= dict.fromkeys(trials.values(), trial_seconds)
    with progress(len(topics)) as count:
        facts = machine.ask_all(topics, count)
    survey = Survey(machine, facts)
    checks = {**CPU_CHECKS, **GPU_CHECKS, **(JETSON_CHECKS if survey.is_jetson else {})}
    results = [Check(name, *found) for name, check in checks.items() for found in check(survey)]
    return results, {name: facts[topic] or facts[package] for name, topic in trials.items()}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of a compilation, and its folder."""

    num_compiled: int
    num_present: int
    """Kernels that had been compiled before."""
    seconds: float
    folder: str
    """Where they are kept, or why they are not."""
    is_kept: bool

    def __str__(self) -> str:
        before = f"; {self.num_present} had been before" if self.num_present else ""
        return (
            f"compiled {self.num_compiled} kernels in {self.seconds:.1f} s{before}; "
            f"they are {'kept in' if self.is_kept else 'not kept:'} {self.folder}"
        )


def compile_kernels(
    progress: Progress,
    weight_dtypes: Collection[str] | None = None,
    cache_dtypes: Collection[str] | None = None,
) -> Compiled:
    """Compile the kernels for these dtypes of weights and KV caches, by default for all.

    Raises:
        ConfigError: backend jit cannot run here.
    """
    from mie.ops_jit.kernel_cache import CACHE_DTYPES, WEIGHT_DTYPES, Kernels, kernel_names

    began = time.perf_counter()
    names = kernel_names(weight_dtypes or WEIGHT_DTYPES, cache_dtypes or CACHE_DTYPES)
    kernels = Kernels()
    num_compiled = kernels.prepare(names, progress)
    seconds = time.perf_counter() - began
    is_kept = kernels.num_kept(names) == len(names)
    try:
        folder = str(open_cache("jit"))
        folder = folder if is_kept else f"{folder} cannot be written"
    except CacheError as error:
        folder = str(error)
    return Compiled(
        num_compiled=num_compiled,
        num_present=len(names) - num_compiled,
        seconds=seconds,
        folder=folder,
        is_kept=is_kept,
    )


_LINE = "{:<8} {:<14} {}"


def compile_for_gpu(model: str) -> Compiled:
    """Compile the kernels of a model for this machine's GPU, by loading it.

    Raises:
        ConfigError: backend cupy cannot run here.
        ModelError: the model cannot be used.
    """
    from mie.frontend.llm import LLM

    try:
        folder, is_kept = open_cache("cubins"), True
    except CacheError as error:
        folder, is_kept = Path(str(error)), False
    began, num_before = time.perf_counter(), len(list(folder.glob("*.cubin")))
    LLM(model, backend="cupy")
    return Compiled(
        num_compiled=len(list(folder.glob("*.cubin"))) - num_before,
        num_present=num_before,
        seconds=time.perf_counter() - began,
        folder=str(folder),
        is_kept=is_kept,
    )


def add_parser(commands: Commands) -> None:
    """Add ``mie doctor`` to the command line."""
    declared(commands, "doctor", run, backends=_add_backends)


def _add_backends(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(BACKENDS)
    text = f"try only this one, and exit with 1 if it does not work: {names}"
    parser.add_argument("--backend", choices=BACKENDS, metavar="NAME", help=text)


def run(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Print the report on ``machine``, by default this one, and return the exit code.

    It is 1 if the requested backend does not work, else 0.
    """
    if args.model is not None and not args.compile:
        raise ConfigError("--model needs --compile")
    if args.compile:
        return _compile(args)
    progress = partial(bar, "examining", "check")
    names = [args.backend] if args.backend else BACKENDS
    patience = ASK_SECONDS if args.backend else TRIAL_SECONDS
    checks, trials = examine(machine or Machine(), names, progress, patience)
    if args.json:
        backends = [
            {
                "name": name,
                "works": None if "is_late" in trial else "error" not in trial,
                "reason": trial.get("error"),
            }
            for name, trial in trials.items()
        ]
        report = {"mie": __version__, "checks": list(map(asdict, checks)), "backends": backends}
        print(json.dumps(report, indent=2))
    else:
        print(render(checks, trials))
    return 1 if args.backend and trials[args.backend] else 0


def _compile(args: argparse.Namespace) -> int:
    """Compile the kernels of backend jit, or of a model on a GPU, and return the exit code."""
    if args.backend != "cupy":
        compiled = compile_kernels(
            partial(bar, "compiling kernels", "kernel"),
            *([] if args.model is None else _dtypes_of(args.model)),
        )
    elif args.model is None:
        raise ConfigError("--compile --backend cupy needs --model: its kernels follow the model")
    else:
        compiled = compile_for_gpu(args.model)
    print(json.dumps(asdict(compiled), indent=2) if args.json else compiled)
    return 0 if compiled.is_kept else 1


def _dtypes_of(model: str) -> tuple[set[str], set[str]]:
    """Return the dtypes of a model's matrices, and of its cache."""
    from mie.checkpoint.config import load_model_config
    from mie.checkpoint.locate import locate_model
    from mie.checkpoint.weights import Checkpoint, expected_tensors

    directory = locate_model(model)
    config = load_model_config(directory)
    checkpoint = Checkpoint.open(directory, expected_tensors(config), config.quantisation)
    return checkpoint.matrix_dtypes, {"float32"}


def render(checks: Sequence[Check], trials: Mapping[str, Facts]) -> str:
    """Return the report as text, one fact per line, with remedies below problems.

    ``trials`` are the trials of `examine`.
    """
    lines = []
    for check in checks:
        lines.append(_LINE.format(check.status, check.name, check.value))
        if check.remedy is not None:
            lines.append(_LINE.format("", "", f"remedy: {check.remedy}"))
    lines.append("")
    for name, trial in trials.items():
        verdict = f"does not work: {trial['error']}" if trial else "works"
        if "is_late" in trial:
            why = f"no answer within {TRIAL_SECONDS:g} s (it compiles, or the machine is busy)"
            verdict = f"unknown: {why}; mie doctor --backend {name} waits for one"
        lines.append(_LINE.format("backend", name, verdict))
    return "\n".join(lines)
