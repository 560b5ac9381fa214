"""Implement ``mie diff``: compare two backends on the same workload, operator by operator."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.files import replacing
from mie.cli.options import DEFAULT_MODEL
from mie.cli.parser import add_numbers
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.diff.report import Side

DEFAULT_PROMPTS = (
    "Tell me a story about Mia the otter, the mill and a bell.",
    "Tell me a story about Mia the otter, the lake and a kite.",
)
"""The budget cuts them into chunks, and the second finds the beginning of the first in the cache.
"""

_WORKLOAD = (
    ("max_tokens", 8, "new tokens per prompt"),
    ("block_size", 8, "tokens per block of the KV cache"),
    ("max_num_batched_tokens", 8, "maximum number of tokens in a step"),
)
"""The numbers of `DiffWorkload` that have an option: name, default and help."""

_EPILOG = """\
A runs the prompts greedily. B is forced to use A's tokens on the same schedule, so that each call
has a counterpart. Differences accumulate through the layers, as they do in use. With --isolate each
operator of B gets A's results as its inputs.

  max abs   the largest absolute difference
  max rel   max abs divided by the largest magnitude in A's result
  row rel   the same for each row (token), largest value
  max ULP   distance in steps of the coarser dtype; large near zero
  allowed   the limit of row rel; docs/diff.md and the HTML report give the reasons

examples:
  mie diff --b numpy                            plain and fast NumPy operators
  mie diff                                      plain operators and emulated kernels; needs g++
  mie diff --b cupy --dtype-b float16           plain operators and a GPU
  mie diff --b numpy-plain --dtype-a float64    the error of float32
  mie diff --b numpy --kv-cache-dtype-b int8    the error of a quantised cache
  mie diff --isolate                            which operator alone is wrong?
  mie diff --inject down:2                      check that a fault in that operator is found
  mie diff --layers --html report.html          every layer, and an HTML page

exit codes:
  0  everything is within tolerance
  1  something exceeds its tolerance
  2  nothing was compared: an argument or the model is wrong, or a backend is not available
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie diff`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "diff",
        help="compare two backends, operator by operator",
        description="Run one workload on two backends, and show where and how much they differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sides = parser.add_argument_group("the two sides")
    sides.add_argument(
        "--a",
        default="numpy-plain",
        metavar="NAME",
        help="reference backend (default: numpy-plain)",
    )
    sides.add_argument(
        "--b",
        default="cupy-emulated",
        metavar="NAME",
        help="backend to check: cupy-emulated (default), cupy, jit, numpy or numpy-plain",
    )
    for name in ("a", "b"):
        sides.add_argument(
            f"--dtype-{name}", default="float32", metavar="TYPE", help="dtype (default: float32)"
        )
        sides.add_argument(
            f"--kv-cache-dtype-{name}", metavar="TYPE", help="auto (default), int8 or fp8"
        )
        sides.add_argument(
            f"--set-{name}",
            action="append",
            default=[],
            type=_setting,
            metavar="NAME=VALUE",
            help="another setting of the backend; may be repeated",
        )
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="'bundled' (default), a directory in Hugging Face format, or a hub id",
    )
    work.add_argument(
        "--prompt",
        nargs="+",
        dest="prompts",
        default=DEFAULT_PROMPTS,
        metavar="TEXT",
        help="prompts to complete (default: two with a common beginning)",
    )
    add_numbers(work, _WORKLOAD)
    parser.add_argument(
        "--inject", metavar="OP[:LAYER]", help="corrupt one element of an operator of B"
    )
    parser.add_argument(
        "--isolate", action="store_true", help="use A's results as the inputs of each operator of B"
    )
    parser.add_argument("--layers", action="store_true", help="print a line for each layer")
    parser.add_argument("--html", metavar="OUT", help="write a report as one HTML file")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and return 1 if something exceeds its tolerance, else 0.

    Raises:
        ConfigError: an argument is out of range, or a backend is not available.
        RequestError: a prompt cannot be served.
        ModelError: the model cannot be used.
    """
    from mie.diff.compare import compare
    from mie.diff.html import page
    from mie.diff.recording import Injection
    from mie.diff.text import lines
    from mie.diff.workload import workload_of_texts

    _check_target(args.html)  # fail before the work
    inject = None if args.inject is None else Injection.parse(args.inject)
    settings = {name: getattr(args, name) for name, *_ in _WORKLOAD}
    report = compare(
        workload_of_texts(args.model, args.prompts, **settings),
        *(_side(args, name) for name in ("a", "b")),
        inject=inject,
        isolate=args.isolate,
        on_side=_note_side,
    )
    if args.html is not None:
        _check_target(args.html)
        with replacing(args.html, "--html") as file:
            file.write(page(report))
    if args.json:
        print(json.dumps(report.as_json(), allow_nan=False))
    else:
        for line in lines(report, layers=args.layers):
            print(line)
    return 0 if report.is_within else 1


def _check_target(target: str | None) -> None:
    """Raise `ConfigError` if a page cannot be written there."""
    if target is not None and Path(target).is_dir():
        raise ConfigError(f"--html would overwrite the directory {target}; name a file")
    if target is not None and not Path(target).resolve().parent.is_dir():
        raise ConfigError(f"--html {target}: there is no directory {Path(target).parent}")


def _setting(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``. A value that is not a number, True or False is a string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value.lower())
    except ValueError:
        return name, value


def _side(args: argparse.Namespace, name: str) -> Side:
    from mie.diff.report import Side

    given = vars(args)
    settings = dict(given[f"set_{name}"])
    if given[f"kv_cache_dtype_{name}"] is not None:
        settings["kv_cache_dtype"] = given[f"kv_cache_dtype_{name}"]
    return Side(backend=given[name], dtype=given[f"dtype_{name}"], settings=settings)


def _note_side(name: str, side: Side) -> None:
    """Print on standard error which side is running."""
    slow = " (a GPU emulated on the CPU, which is slow)" if "emulated" in side.backend else ""
    print(f"running {name}: {side}{slow}", file=sys.stderr)
