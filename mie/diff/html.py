"""Write a report as one self-contained HTML page, without scripts, fonts or addresses."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from mie.diff.report import DiffReport, OperatorErrors, TokenPart
from mie.diff.text import COLUMNS, cells, coverage, difference, number, token_text, tokens, verdict
from mie.diff.tolerances import ALONE, QUANTIZED, TOLERANCES, Tolerance
from mie.errors import ConfigError

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ccc;
  --s0: #f4f4f4; --s1: #e3f1e3; --s2: #f7efc4; --s3: #f6d7a8; --s4: #f2aaa4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --line: #444;
  --s0: #222; --s1: #1d3a22; --s2: #4a4415; --s3: #5c3d10; --s4: #6e1f1b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font: 13px/1.4 ui-monospace, monospace; }
th, td { border: 1px solid var(--line); padding: .2rem .55rem; text-align: right; }
th { font-weight: 600; }
td:first-child, th:first-child, td.text { text-align: left; }
td.text { font-family: system-ui, sans-serif; max-width: 36rem; }
.verdict { border-left: .35rem solid; padding: .3rem .8rem; }
.within { border-color: #3a8f4a; } .past { border-color: #c0392b; }
.s0 { background: var(--s0); } .s1 { background: var(--s1); } .s2 { background: var(--s2); }
.s3 { background: var(--s3); } .s4 { background: var(--s4); }
"""

_SHADES = (("s0", 0.0), ("s1", 0.1), ("s2", 0.5), ("s3", 1.0))
"""Maximum share of the limit for each shade of a cell. Past the last, it is s4."""


def check_target(path: Path) -> None:
    """Raise `ConfigError` if a page cannot be written to ``path``."""
    if path.is_dir():
        raise ConfigError(f"--html would overwrite the directory {path}; name a file")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--html {path}: there is no directory {path.parent}")


def write_page(report: DiffReport, path: Path) -> None:
    """Write the page. ``path`` is unchanged until the page is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    check_target(path)
    draft = path.resolve().with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(page(report), encoding="utf-8")
        draft.replace(path.resolve())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def page(report: DiffReport) -> str:
    """Return the page."""
    title = f"{report.a} and {report.b}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>A is {escape(str(report.a))}, B is {escape(str(report.b))}; model "
        f"{escape(report.model)}.<br>{'<br>'.join(map(escape, coverage(report)))}"
        f"{'<br>Each operator alone, with A’s inputs.' if report.isolated else ''}</p>",
        *_verdict(report),
        "<h2>Operators, each at its worst layer</h2>",
        *_operators(report.worst_layers),
        "<p>max rel is the largest difference divided by the largest magnitude of A's result. row "
        "rel, which is judged, divides by the largest magnitude of the row (one token). max ULP is "
        "the distance in steps of the coarser dtype, and is large near zero.</p>",
        "<h2>Layers: row rel, shaded by the fraction of the limit</h2>",
        *_layers(report),
        *_tokens(report),
        "<h2>Tolerances</h2>",
        f"<p>{escape(report.reason)}</p>",
        *_tolerances("coarser dtype", TOLERANCES),
        "<p>For an operator alone, with A's inputs:</p>",
        *_tolerances("coarser dtype", ALONE),
        "<p>For quantised caches, where the limits are larger:</p>",
        *_tolerances("cache", QUANTIZED),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>mie diff: {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _verdict(report: DiffReport) -> Iterator[str]:
    kind = "within" if report.is_within else "past"
    yield f'<p class="verdict {kind}">'
    yield "<br>\n".join(map(escape, verdict(report)))
    yield "</p>"


def _operators(rows: Sequence[OperatorErrors]) -> Iterator[str]:
    heads = [*COLUMNS, "worst", "there"]
    body = [
        [(text, "") for text in cells(row)]
        + [(str(row.worst), "text"), (difference(row.worst), "text")]
        for row in rows
    ]
    return _table(heads, body)


def _layers(report: DiffReport) -> Iterator[str]:
    by_place = {(row.operator, row.layer): row for row in report.rows}
    operators = list(dict.fromkeys(row.operator for row in report.rows if row.layer is not None))
    layers = sorted({row.layer for row in report.rows if row.layer is not None})
    body = [
        [
            (operator, ""),
            *(
                (number(row.row_rel), _shade(row.share))
                for layer in layers
                for row in [by_place[operator, layer]]
            ),
        ]
        for operator in operators
    ]
    outside = [row for row in report.rows if row.layer is None]
    yield from _table(["operator", *map(str, layers)], body)
    yield "<p>Outside the layers:</p>"
    shaded = [[(row.operator, ""), (number(row.row_rel), _shade(row.share))] for row in outside]
    yield from _table(["operator", "row rel"], shaded)


def _shade(share: float) -> str:
    return next((name for name, most in _SHADES if share <= most), "s4")


def _tokens(report: DiffReport) -> Iterator[str]:
    yield "<h2>Tokens</h2>"
    yield f"<p>{'<br>'.join(map(escape, tokens(report)))}</p>"
    for part in report.tokens[:1]:
        yield from _table(["A", "", "logprob", "B", "", "logprob"], _candidates(part))


def _candidates(part: TokenPart) -> Iterator[list[tuple[str, str]]]:
    for index in range(max(len(part.a), len(part.b))):
        row: list[tuple[str, str]] = []
        for side in (part.a, part.b):
            if index < len(side):
                each = side[index]
                logprob = f"{each.logprob:.4f}"
                row += [(str(each.token_id), ""), (token_text(each.text), "text"), (logprob, "")]
            else:
                row += [("", "")] * 3
        yield row


def _tolerances(what: str, table: Mapping[str, Tolerance]) -> Iterator[str]:
    heads = [what, "embed", "layers", "gates", "logits", "reason"]
    body = []
    for name, tolerance in table.items():
        *limits, reason = asdict(tolerance).values()
        body.append([(name, ""), *((number(limit), "") for limit in limits), (reason, "text")])
    return _table(heads, body)


def _table(heads: Iterable[str], body: Iterable[Iterable[tuple[str, str]]]) -> Iterator[str]:
    """Render a table whose cells are (text, class)."""
    yield '<div class="scroll"><table>'
    yield "<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
    for row in body:
        made = (
            f'<td class="{name}">{escape(text)}</td>' if name else f"<td>{escape(text)}</td>"
            for text, name in row
        )
        yield "<tr>" + "".join(made) + "</tr>"
    yield "</table></div>"
