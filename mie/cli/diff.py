"""Implement ``mie diff``: compare two backends on the same workload, operator by operator."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mie.lab.diff.report import Side


_WORKLOAD = ("max_tokens", "block_size", "max_num_batched_tokens")
"""The numbers of `DiffWorkload` that have an option."""


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and return 1 if something exceeds its tolerance, else 0."""
    from mie.lab.diff.compare import compare, workload_of_texts
    from mie.lab.diff.text import lines

    settings = {name: getattr(args, name) for name in _WORKLOAD}
    report = compare(
        workload_of_texts(args.model, args.prompts, **settings),
        *(_side(args, name) for name in ("a", "b")),
        isolate=args.isolate,
        on_side=_note_side,
    )
    if args.json:
        print(json.dumps(report.as_json(), allow_nan=False))
    else:
        for line in lines(report, layers=args.layers):
            print(line)
    return 0 if report.is_within else 1


def _side(args: argparse.Namespace, name: str) -> Side:
    from mie.lab.diff.report import Side

    given = vars(args)
    settings = dict(given[f"set_{name}"])
    if given[f"kv_cache_dtype_{name}"] is not None:
        settings["kv_cache_dtype"] = given[f"kv_cache_dtype_{name}"]
    return Side(backend=given[name], dtype=given[f"dtype_{name}"], settings=settings)


def _note_side(name: str, side: Side) -> None:
    """Print the running side on standard error."""
    slow = " (a GPU emulated on the CPU, which is slow)" if "emulated" in side.backend else ""
    print(f"running {name}: {side}{slow}", file=sys.stderr)
