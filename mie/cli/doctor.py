"""Implement ``mie doctor``: the backends that this machine can run, its problems, and remedies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from mie.cli.diagnosis.diagnosis import BACKENDS, compile_kernels, examine
from mie.cli.diagnosis.machine import Machine
from mie.cli.diagnosis.survey import Check
from mie.errors import ConfigError
from mie.version import __version__

_LINE = "{:<8} {:<14} {}"

_EPILOG = """\
Each line is "ok", a "note" (something is slow or missing, and may not be needed) or a "problem"
(something is installed and does not work). The line below it is the remedy. Each backend is tried
on a small step. All are asked at once, in processes of their own, which takes about two seconds.
The first time, jit and cupy-emulated compile kernels, which takes some seconds more.

--compile examines nothing. It compiles the kernels of backend jit for all data types, or for those
of a model, so that none is compiled when a model is loaded.

exit codes:
  0  the machine was examined, whatever was found
  1  --backend NAME was given, and that backend does not work here; or --compile could not keep
     the kernels
  2  --compile was given, and backend jit cannot run here, or the model is wrong
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie doctor`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine can run, and how to fix the rest",
        description=(
            "Examine Python, NumPy, Numba, CPUs, memory, the compiler, the NVIDIA driver, GPUs, "
            "CuPy, NVRTC and, on a Jetson, JetPack and the power mode, and try the backends."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        metavar="NAME",
        help="try only this one, and exit with 1 if it does not work: " + ", ".join(BACKENDS),
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the kernels of backend jit ahead"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="with --compile: only the kernels of this model, which is 'bundled', a directory in "
        "Hugging Face format, or a hub id",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Print the report on ``machine``, by default this one, and return the exit code.

    It is 1 if the requested backend does not work, else 0.

    Raises:
        ConfigError: kernels were to be compiled, and backend jit cannot run here.
        ModelError: the model whose kernels were to be compiled is wrong.
    """
    if args.model is not None and not args.compile:
        raise ConfigError("--model needs --compile")
    if args.compile:
        return _compile(args)
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
