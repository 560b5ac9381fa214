"""``mie diff``: the same workload on two backends, operator by operator."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from mie.diff.report import Side

DEFAULT_PROMPTS = (
    "Tell me a story about Mia the otter, the mill and a bell.",
    "Tell me a story about Mia the otter, the lake and a kite.",
)
"""Cut into chunks by the budget; the second finds the beginning of the first in the cache."""

EXIT_PAST = 1

_EPILOG = """\
A runs the prompts greedily; B is forced to A's tokens, on the same schedule, so that each call has
its counterpart. The differences build up through the layers, as they do in use; with --isolate each
operator of B has A's results as its inputs.

  max abs   the largest difference
  max rel   that, over the largest magnitude of A's result
  row rel   over the largest magnitude of its row, one token's
  max ULP   the numbers of the coarser dtype between two elements; large near zero
  allowed   what row rel may be: see docs/diff.md, or the HTML report, for the reasons

examples:
  mie diff --b numpy                            the plain operators and the fast ones
  mie diff                                      the plain ones and the emulated kernels; needs g++
  mie diff --b cupy --dtype-b float16           the plain ones and a GPU
  mie diff --b numpy-plain --dtype-a float64    what float32 costs
  mie diff --b numpy --kv-cache-dtype-b int8    what a quantised cache costs
  mie diff --isolate                            which operator is off by itself?
  mie diff --inject down:2                      is a fault in that operator found?
  mie diff --layers --html report.html          each layer, and a page to look at

exit codes:
  0  everything is within tolerance
  1  something is past it
  2  nothing was compared: an argument or the model is wrong, or a backend is not available
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds ``mie diff`` to the command line; its arguments carry ``run``."""
    parser = subparsers.add_parser(
        "diff",
        help="compare two backends, operator by operator",
        description="Runs one workload on two backends and says where and how far they part.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sides = parser.add_argument_group("the two sides")
    sides.add_argument(
        "--a",
        default="numpy-plain",
        metavar="NAME",
        help="the reference: numpy-plain (the default)",
    )
    sides.add_argument(
        "--b",
        default="cupy-emulated",
        metavar="NAME",
        help="what is checked: cupy-emulated (the default), cupy, numpy or numpy-plain",
    )
    for name in ("a", "b"):
        sides.add_argument(
            f"--dtype-{name}", default="float32", metavar="TYPE", help="float32 (the default), …"
        )
        sides.add_argument(f"--kv-cache-dtype-{name}", metavar="TYPE", help="auto, int8 or fp8")
        sides.add_argument(
            f"--set-{name}",
            action="append",
            default=[],
            type=_setting,
            metavar="NAME=VALUE",
            help="another setting of the backend's own; repeatable",
        )
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="'bundled' (the default), a directory in Hugging Face format, or a hub id",
    )
    work.add_argument(
        "--prompt",
        nargs="+",
        dest="prompts",
        default=DEFAULT_PROMPTS,
        metavar="TEXT",
        help="texts to go on with (two that begin alike)",
    )
    for flag, default, what in (
        ("--max-tokens", 8, "new tokens for each prompt"),
        ("--block-size", 8, "tokens in a block of the KV cache"),
        ("--max-num-batched-tokens", 8, "tokens that a step computes at most"),
    ):
        work.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument(
        "--inject", metavar="OP[:LAYER]", help="make one element of an operator of B wrong"
    )
    parser.add_argument(
        "--isolate", action="store_true", help="give each operator of B the results of A as inputs"
    )
    parser.add_argument("--layers", action="store_true", help="a line for each layer")
    parser.add_argument("--html", metavar="OUT", help="write a report as one HTML file")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; 0, or 1 if something is past its tolerance.

    Raises:
        ConfigError: an argument is out of range, or a backend is not available.
        RequestError: a prompt cannot be served.
        ModelError: the model cannot be used.
    """
    from mie.diff.compare import compare
    from mie.diff.html import check_target, write_page
    from mie.diff.inject import Injection
    from mie.diff.text import lines
    from mie.diff.workload import workload_of_texts

    target = None if args.html is None else Path(args.html)
    if target is not None:
        check_target(target)  # before the work
    inject = None if args.inject is None else Injection.parse(args.inject)
    workload = workload_of_texts(
        args.model,
        args.prompts,
        max_tokens=args.max_tokens,
        block_size=args.block_size,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    report = compare(
        workload,
        *(_side(args, name) for name in ("a", "b")),
        inject=inject,
        isolate=args.isolate,
        on_side=_note_side,
    )
    if target is not None:
        write_page(report, target)
    if args.json:
        print(json.dumps(report.as_json(), allow_nan=False))
    else:
        for line in lines(report, layers=args.layers):
            print(line)
    return 0 if report.is_within else EXIT_PAST


def _setting(text: str) -> tuple[str, Any]:
    """Return ``NAME=VALUE``; a value that is no number, True or False is a word."""
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
    """Say on standard error which side runs now."""
    slow = " (a GPU played by the CPU, which takes its time)" if "emulated" in side.backend else ""
    print(f"running {name}: {side}{slow}", file=sys.stderr)
