"""Print results of benchmarks as Markdown or JSON, and write them to files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.base.files import read_json_object
from mie.cli.bench_files import provenance, write_results
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.lab.sim.driver import LoadResult
    from mie.lab.workload import Workload

MAX_RESULTS_BYTES = 256 << 20
"""The longest file of results that is read. Results with details have lines for each request."""

LABELS, _DISTRIBUTIONS = json.loads(
    Path(__file__).with_name("labels.json").read_text(encoding="utf-8")
).values()
"""Words for results (vLLM's words), and for their distributions."""


def about(place: Mapping[str, Any], workload: Workload, result: LoadResult) -> dict[str, Any]:
    """Return where the load ran, the load itself, and the counts of the run."""
    return {
        "backend": "mie",
        **place,
        "workload": workload.name,
        "workload_sha256": workload.digest,
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preempted,
        "num_cached_tokens": result.num_cached_tokens,
        "peak_blocks": result.peak_blocks,
    }


def errors(result: LoadResult) -> dict[str, str]:
    """Return the reason of each refused request by its id."""
    return {record.request_id: record.error for record in result.records if record.error}


def exit_code(result: LoadResult) -> int:
    """Return 1 if a request failed, else 0."""
    return 1 if any(record.error for record in result.records) else 0


def report(args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Print the results, and write them with their provenance to the file that ``args`` names.

    Raises:
        ConfigError: the file cannot be written.
    """
    results = {**provenance(args), **results}
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print("\n".join(markdown(results)))
    if args.output_json is not None:
        write_results("--output-json", Path(args.output_json), results)


def write_text(path: Path, text: str) -> None:
    """Write a file, or raise `ConfigError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def markdown(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results as Markdown tables, after a line with the place of the measurement."""
    yield from (place_line(results), "")
    numbers = [
        (label, number(results[name]))
        for name, label in LABELS.items()
        if results.get(name) is not None
    ]
    numbers += [
        (f"{percent} % of latencies within (s)", number(value))
        for percent, value in results.get("percentiles", {}).items()
    ]
    yield from table(("", ""), numbers)
    rows = [
        (_DISTRIBUTIONS[name], *columns.values())
        for name in _DISTRIBUTIONS
        if (columns := _columns(results, name))
    ]
    heads = [what for name in _DISTRIBUTIONS for what in _columns(results, name)]
    if rows:
        yield ""
        yield from table(("ms", *dict.fromkeys(heads)), rows)


def place_line(results: Mapping[str, Any]) -> str:
    """Return a line: whether results are simulated or measured, and the device."""
    model = results["model_id"]
    if not results["simulated"]:
        return f"Measured on this machine: {model}"
    return f"Simulated: {model} on {results['device']}"


def _columns(results: Mapping[str, Any], name: str) -> dict[str, str]:
    end = f"_{name}_ms"
    return {
        field.removesuffix(end): number(value)
        for field, value in results.items()
        if field.endswith(end)
    }


def distributions(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of distributions, with a label each."""
    return {
        f"{head}_{name}_ms": f"{title}, {head} (ms)"
        for name, title in _DISTRIBUTIONS.items()
        for head in _columns(results, name)
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with aligned columns."""
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)])} |"

    yield line(heads)
    yield f"|{'|'.join(['-' * (widths[0] + 2), *('-' * (w + 1) + ':' for w in widths[1:])])}|"
    yield from map(line, rows)


def number(value: float | None) -> str:
    """Return a number for display, or a dash for None."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


# Several runs.


def run_compare(args: argparse.Namespace) -> int:
    """Print the table, and return 0."""
    results = [_read_results(Path(path)) for path in args.results]
    print("\n".join(comparison([Path(path).stem for path in args.results], results)))
    return 0


def _read_results(path: Path) -> Mapping[str, Any]:
    results = read_json_object(path, MAX_RESULTS_BYTES, ConfigError)
    if not {"simulated", "model_id"} <= results.keys():
        raise ConfigError(f"{path} holds no results of mie bench")
    return results


def comparison(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, under a line for each run with the place of the run.

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
