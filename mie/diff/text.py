"""Render a report as lines of text of at most 80 columns, or as a self-contained HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mie.base.reprs import clipped, count
from mie.diff.report import Candidate, DiffReport, OperatorErrors, Place, TokenPart
from mie.diff.tolerances import ALONE, QUANTIZED, TOLERANCES, Tolerance

COLUMNS = ("operator", "layer", "max abs", "max rel", "row rel", "max ULP", "allowed", "")
_WIDTHS = (-15, 5, 8, 8, 8, 11, 8, 5)
"""Column widths of the table. Negative ones are left-aligned."""


def lines(report: DiffReport, *, layers: bool = False) -> Iterator[str]:
    """Yield the whole report. With ``layers`` each layer has a line, else each operator's worst."""
    title = [f"A {report.a}", f"B {report.b}", report.model]
    yield from [" · ".join(title)] if len(" · ".join(title)) <= 80 else title
    yield from coverage(report)
    if report.isolated:
        yield "Each operator alone: B's operators get A's results as inputs."
    yield ""
    yield _line(COLUMNS)
    for row in report.rows if layers else report.worst_layers:
        yield _line(cells(row))
    yield ""
    yield from verdict(report)
    for part in report.tokens[:1]:
        yield from ["", *_candidates(part)]


def coverage(report: DiffReport) -> Iterator[str]:
    """Describe the cases in the workload."""
    yield (
        f"{count(report.num_prompts, 'prompt')}, {count(report.num_tokens, 'new token')} · "
        f"{count(report.num_cached_tokens, 'prompt token')} from the cache, "
        f"{count(report.num_copies, 'block')} copied"
    )
    yield (
        f"{count(report.num_steps, 'step')}: {report.num_prefill_steps} with prompt tokens, "
        f"{report.num_decode_steps} with decodes, {report.num_mixed_steps} with both"
    )


def cells(row: OperatorErrors) -> list[str]:
    """Return one line of the table."""
    return [
        row.operator,
        "–" if row.layer is None else str(row.layer),
        number(row.max_abs),
        number(row.max_rel),
        number(row.row_rel),
        f"{row.max_ulp:,}" if row.max_ulp < 10**9 else f"{row.max_ulp:.1e}",
        number(row.limit),
        "" if row.is_within else "PAST",
    ]


def number(value: float) -> str:
    """Format with two digits, and 0 as it is."""
    return f"{value:.1e}" if value else "0"


def verdict(report: DiffReport) -> Iterator[str]:
    """State whether the two agree, and where they differ."""
    if report.inject is not None:
        yield f"B has an injected fault: one element of every result of {report.inject}."
    if report.first is None:
        worst = max(report.rows, key=lambda row: row.share)
        layer = "" if worst.layer is None else f" of layer {worst.layer}"
        share = f"{100 * worst.share:.0f} %"
        yield f"Within tolerance; closest is {worst.operator}{layer}, at {share} of its limit."
    else:
        yield "Tolerance exceeded, first at"
        yield f"  {report.first}:"
        yield f"  {difference(report.first)}."
    yield from tokens(report)


def difference(place: Place) -> str:
    """Describe the element on both sides."""
    relative = f"{number(place.relative)} of the row's largest magnitude"
    return f"A {place.a:.8g}, B {place.b:.8g}: {relative}"


def tokens(report: DiffReport) -> Iterator[str]:
    """State whether the two would have chosen the same tokens."""
    if not report.tokens:
        yield f"Tokens: both choose the same {report.num_tokens}."
        return
    part = report.tokens[0]
    num_wrong = sum(not each.is_near_tie for each in report.tokens)
    kind = f"{num_wrong} by more than a near-tie" if num_wrong else "only by near-ties"
    yield f"Tokens: {len(report.tokens)} of {report.num_tokens} differ, {kind}."
    yield f"The first is token {part.token} of prompt {part.prompt}, in step {part.step}."


def token_text(text: str) -> str:
    """Quote a token, with line breaks and the like escaped."""
    return repr(text)


def _candidates(part: TokenPart) -> Iterator[str]:
    """List the most likely tokens of both, side by side."""
    yield f"{'A':<36}  B"
    for index in range(max(len(part.a), len(part.b))):
        a, b = _candidate(part.a, index), _candidate(part.b, index)
        yield f"{a:<36}  {b}".rstrip()


def _candidate(candidates: Sequence[Candidate], index: int) -> str:
    if index >= len(candidates):
        return ""
    each = candidates[index]
    text = clipped(token_text(each.text), 18)
    return f"{each.token_id:>6} {text:<18} {each.logprob:>9.4f}"


def _line(texts: Sequence[str]) -> str:
    pairs = zip(texts, _WIDTHS, strict=True)
    padded = (f"{text:<{-w}}" if w < 0 else f"{text:>{w}}" for text, w in pairs)
    return " ".join(padded).rstrip()


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
        candidates=[row for part in report.tokens[:1] for row in _candidate_cells(part)],
        built_up=_tolerances(TOLERANCES),
        alone=_tolerances(ALONE),
        quantized=_tolerances(QUANTIZED),
    )


def _candidate_cells(part: TokenPart) -> Iterator[list[Cell]]:
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
