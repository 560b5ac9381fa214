"""Implement ``mie doctor``: the backends that this machine can run, its problems, and remedies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from mie.cli.declared import Commands, declared
from mie.cli.diagnosis.diagnosis import BACKENDS, compile_for_gpu, compile_kernels, examine
from mie.cli.diagnosis.machine import Machine
from mie.cli.diagnosis.survey import Check
from mie.errors import ConfigError
from mie.version import __version__

_LINE = "{:<8} {:<14} {}"


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``mie doctor`` to the command line."""
    declared(commands, "doctor", run, backends=_add_backends)


def _add_backends(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(BACKENDS)
    text = f"try only this one, and exit with 1 if it does not work: {names}"
    parser.add_argument("--backend", choices=BACKENDS, metavar="NAME", help=text)


def run(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Print the report on ``machine``, by default this one, and return the exit code.

    It is 1 if the requested backend does not work, else 0.

    Raises:
        ConfigError: kernels were to be compiled, and the backend cannot run here.
        ModelError: the model whose kernels were to be compiled is wrong.
    """
    if args.model is not None and not args.compile:
        raise ConfigError("--model needs --compile")
    if args.compile:
        return _compile_for_gpu(args) if args.backend == "cupy" else _compile(args)
    machine = machine or Machine()
    checks, reasons = examine(
        machine, [args.backend] if args.backend else BACKENDS, partial(_bar, "examining", "check")
    )
    if args.json:
        trials = [{"name": x, "works": why is None, "reason": why} for x, why in reasons.items()]
        report = {"mie": __version__, "checks": list(map(asdict, checks)), "backends": trials}
        print(json.dumps(report, indent=2))
    else:
        print(render(checks, reasons))
    return 1 if args.backend and reasons[args.backend] else 0


def _compile(args: argparse.Namespace) -> int:
    """Compile the kernels of backend jit, and return the exit code."""
    compiled = compile_kernels(
        partial(_bar, "compiling kernels", "kernel"),
        *([] if args.model is None else _dtypes_of(args.model)),
    )
    print(json.dumps(asdict(compiled), indent=2) if args.json else compiled)
    return 0 if compiled.is_kept else 1


def _compile_for_gpu(args: argparse.Namespace) -> int:
    """Compile the kernels of a model on backend cupy by loading it, and return the exit code."""
    if args.model is None:
        raise ConfigError("--compile --backend cupy needs --model: its kernels follow the model")
    compiled = compile_for_gpu(args.model)
    print(json.dumps(asdict(compiled), indent=2) if args.json else compiled)
    return 0 if compiled.is_kept else 1


def _dtypes_of(model: str) -> tuple[set[str], set[str]]:
    """Return the dtypes of a model's matrices, and of its cache."""
    from mie.checkpoint.config import ModelConfig
    from mie.checkpoint.locate import locate_model
    from mie.checkpoint.weights import Checkpoint, expected_tensors

    directory = locate_model(model)
    config = ModelConfig.load(directory)
    checkpoint = Checkpoint.open(directory, expected_tensors(config), config.quantisation)
    return checkpoint.matrix_dtypes, {"float32"}


@contextmanager
def _bar(what: str, unit: str, number: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda num_new: None
        return
    from tqdm import tqdm

    with tqdm(total=number, desc=what, unit=unit, leave=False) as bar:
        yield bar.update


def render(checks: Sequence[Check], reasons: Mapping[str, str | None]) -> str:
    """Return the report as text, one fact per line, with remedies below problems.

    ``reasons`` says of each backend why it does not work, or None if it does.
    """
    lines = []
    for check in checks:
        lines.append(_LINE.format(check.status, check.name, check.value))
        if check.remedy is not None:
            lines.append(_LINE.format("", "", f"remedy: {check.remedy}"))
    lines.append("")
    for name, reason in reasons.items():
        verdict = "works" if reason is None else f"does not work: {reason}"
        lines.append(_LINE.format("backend", name, verdict))
    return "\n".join(lines)
