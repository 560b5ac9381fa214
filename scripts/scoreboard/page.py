"""Write the rows as docs/scoreboard.json and as docs/scoreboard.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .case import VERDICTS, Row, Suite
from .inputs import Input

Results = dict[str, dict[str, Any]]
"""For each suite: commit, date, processor, python, and the rows."""

REASON_LENGTH = 300


def write_results(folder: Path, new: Results, suites: Mapping[str, Suite], inputs: str) -> Results:
    """Write both files in a folder, where other suites keep their results. Return all results."""
    path = folder / "scoreboard.json"
    results = {**read_results(folder), **new}
    results = {name: results[name] for name in sorted(results) if name in suites}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
    page = markdown(results, suites, inputs)
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    return results


def read_results(folder: Path) -> Results:
    """Return the results of scoreboard.json in a folder, or none."""
    path = folder / "scoreboard.json"
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results


def worse(new: Results, old: Results) -> list[str]:
    """Return the rows that failed, or that are missed now and were not missed before."""
    missed = {
        (name, row["question"])
        for name, result in old.items()
        for row in result["rows"]
        if row["verdict"] == "missed"
    }
    return [
        f"{name}: {row['question']}"
        for name, result in new.items()
        for row in result["rows"]
        if row["verdict"] == "failed"
        or (row["verdict"] == "missed" and (name, row["question"]) not in missed)
    ]


def markdown(results: Results, suites: Mapping[str, Suite], inputs: str) -> str:
    """Return the page. Its text is in `page.md`."""
    rows = [row for result in results.values() for row in result["rows"]]
    counts = Counter(row["verdict"] for row in rows)
    meanings = "\n".join(
        f"| {verdict} | {counts[verdict]} | {text} |" for verdict, text in VERDICTS.items()
    )
    sections = "\n".join(_section(suites[name], result) for name, result in results.items())
    template = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    values = {"verdicts": meanings, "suites": sections, "inputs": inputs}
    for name, value in values.items():
        template = template.replace(f"<!-- {name} -->", value)
    return template


def _section(suite: Suite, result: Mapping[str, Any]) -> str:
    lines = [
        f"## {suite.title}\n",
        f"{suite.text.strip()}\n",
        f"Commit {result['commit']}, {result['date']}, {result['processor']}, "
        f"Python {result['python']}.\n",
        "| question | mie | published | verdict | seconds |",
        "|---|---|---|---|---|",
    ]
    for values in result["rows"]:
        row = Row(**values)
        verdict = f"{row.verdict}: {_cut(row.reason)}" if row.reason else row.verdict
        cells = [row.question, row.ours, _published(row), verdict, f"{row.seconds:.1f}"]
        lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    return "\n".join(lines) + "\n"


def _published(row: Row) -> str:
    source = f"[source]({row.source})" if row.source.startswith("https://") else row.source
    return f"{row.published} ({source})" if row.published and source else row.published or source


def _cut(text: str) -> str:
    return text if len(text) <= REASON_LENGTH else f"{text[:REASON_LENGTH]}…"


def _escaped(cell: str) -> str:
    """Return a cell whose characters do not end the cell or begin a tag."""
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def inputs_table(inputs: Mapping[str, Input]) -> str:
    """Return the table of inputs as Markdown. Inputs of one place share a line."""
    places: dict[str, list[str]] = {}
    for each in inputs.values():
        name = Path(each.name).name
        places.setdefault(each.origin.removesuffix(name), []).append(each.name)
    return "\n".join(_input_lines(places))


def _input_lines(places: Mapping[str, list[str]]) -> Iterator[str]:
    yield "| input | from |\n|---|---|"
    for place, names in places.items():
        shown = ", ".join(f"`{name}`" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"| {shown}{more} | {place} |"
