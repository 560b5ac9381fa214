"""``mie bench compare``: the results of several runs, simulated or measured, in one table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.cli.bench_report import LABELS, distributions, number, place_line, table
from mie.errors import ConfigError


def run_compare(args: argparse.Namespace) -> int:
    """Print the table, and return 0."""
    results = [_read(Path(path)) for path in args.results]
    print("\n".join(comparison([Path(path).stem for path in args.results], results)))
    return 0


def _read(path: Path) -> Mapping[str, Any]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot read the results {path}: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"cannot read the results {path}: {error}") from error
    if not isinstance(results, dict) or not {"simulated", "model_id"} <= results.keys():
        raise ConfigError(f"{path} holds no results of mie bench")
    return results


def comparison(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, under a line for each run that says where it ran.

    A last line warns if the runs are not of one load.
    """
    for name, each in zip(names, results, strict=True):
        yield f"{name}: {place_line(each)}"
    yield ""
    fields = dict(LABELS)
    for each in results:
        fields |= distributions(each)
    rows = [
        (label, *(number(each.get(name)) for each in results))
        for name, label in fields.items()
        if any(each.get(name) is not None for each in results)
    ]
    yield from table(("", *names), rows)
    if len({each.get("workload_sha256") for each in results}) > 1:
        yield "\nThe runs are of different loads: their workload_sha256 differ."
