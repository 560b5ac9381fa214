"""Render a report as lines of text of at most 80 columns."""

from collections.abc import Iterator, Sequence

from mie.base.reprs import clipped, count
from mie.lab.diff.report import Candidate, DiffReport, OperatorErrors, Place, TokenPart

COLUMNS = ("operator", "layer", "max abs", "max rel", "row rel", "max ULP", "allowed", "")
MANY_ULP = 1000
"""A maximum of ULP that needs an explanation where the numbers are within tolerance."""
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
    """Format with two digits, and 0 as "0"."""
    return f"{value:.1e}" if value else "0"


def verdict(report: DiffReport) -> Iterator[str]:
    """State whether the two agree, and where they differ."""
    if report.first is None:
        worst = max(report.rows, key=lambda row: row.share)
        layer = "" if worst.layer is None else f" of layer {worst.layer}"
        share = f"{100 * worst.share:.0f} %"
        yield f"Within tolerance; closest is {worst.operator}{layer}, at {share} of its limit."
        if max(row.max_ulp for row in report.rows) >= MANY_ULP:
            yield "A limit is a share of the largest magnitude of a row. ULP are units of each"
            yield "number, so a number near zero may differ by many ULP within the limit."
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
