"""Render a report as one self-contained HTML page, without scripts, fonts or addresses."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from mie.diff.report import DiffReport, TokenPart
from mie.diff.text import COLUMNS, cells, coverage, difference, number, tokens, verdict
from mie.diff.tolerances import ALONE, QUANTIZED, TOLERANCES, Tolerance

Cell = tuple[str, str]
"""A text, and the class of its cell."""

_SHADES = (("s0", 0.0), ("s1", 0.1), ("s2", 0.5), ("s3", 1.0))
"""Maximum share of the limit for each shade of a cell. Past the last, it is s4."""


def page(report: DiffReport) -> str:
    """Return the page."""
    from jinja2 import Environment

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text())
    in_layers: dict[str, list[Cell]] = {}
    outside: dict[str, list[Cell]] = {}
    for row in report.rows:
        shade = next((name for name, most in _SHADES if row.share <= most), "s4")
        rows = outside if row.layer is None else in_layers
        rows.setdefault(row.operator, [(row.operator, "")]).append((number(row.row_rel), shade))
    return template.render(
        report=report,
        COLUMNS=[*COLUMNS],
        coverage=[*coverage(report)],
        verdict=[*verdict(report)],
        tokens=[*tokens(report)],
        operators=[
            [(text, "") for text in cells(row)]
            + [(str(row.worst), "text"), (difference(row.worst), "text")]
            for row in report.worst_layers
        ],
        layers=sorted({row.layer for row in report.rows if row.layer is not None}),
        in_layers=[*in_layers.values()],
        outside=[*outside.values()],
        candidates=[row for part in report.tokens[:1] for row in _candidates(part)],
        built_up=_tolerances(TOLERANCES),
        alone=_tolerances(ALONE),
        quantized=_tolerances(QUANTIZED),
    )


def _candidates(part: TokenPart) -> Iterator[list[Cell]]:
    for index in range(max(len(part.a), len(part.b))):
        row: list[Cell] = []
        for side in (part.a, part.b):
            for each in side[index : index + 1]:
                row += [(str(each.token_id), ""), (repr(each.text), "text")]
                row += [(f"{each.logprob:.4f}", "")]
            row += [("", "")] * (3 if index >= len(side) else 0)
        yield row


def _tolerances(table: Mapping[str, Tolerance]) -> list[list[Cell]]:
    return [
        [(name, ""), *((number(limit), "") for limit in limits), (reason, "text")]
        for name, (*limits, reason) in table.items()
    ]
