"""Count rooms, arrows, lines and sentences of one or several checkouts of this repository.

    python scripts/house_figures.py .                           print the tables of this checkout
    python scripts/house_figures.py BEFORE .                    compare two checkouts
    python scripts/house_figures.py BEFORE . --page docs/house.md    write them into a page

A page gets the tables between ``<!-- house figures -->`` and ``<!-- end of house figures -->``.
The script parses the checkouts and imports nothing from them.

A *room* is a folder or a file at the top of mie/, other than ``__init__`` and ``__main__``. An
*arrow* leads from a room to another room that it imports, also inside a function or for type
checkers. *Lines of code* leave out docstrings, comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median

MAX_LINES = 300
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h"}
NO_ROOM = {"__init__", "__main__"}

CORE = {
    "memory": r"memory/(?!audit|stats)\w+",
    "sched": r"sched/(?!audit|metrics|bad_words|beam_params|checks|params|unsupported|values)\w+",
    "engine": r"(engine/)?engine",
    "runner": r"(engine/)?runner",
    "overlap": r"(engine/)?overlap",
    "decoder": r"model/decoder",
    "RoPE": r"model/rope",
}
"""Parts of the core, and patterns of their files in this and in earlier layouts."""

BESIDE = {
    "parameters of requests": r"params/\w+|sched/(bad_words|beam_params|checks|params|unsupported"
    r"|values)|engine/bad_words",
    "statistics": r"stats/\w+|memory/stats|sched/metrics|(engine/)?(meter|metrics|step)",
    "invariant checkers": r"audit/\w+|(memory|sched)/audit",
    "rows of the runner": r"(engine/)?rows",
}
"""What stands beside the core, and stood in the same folders before."""

Table = list[list[str]]


# Code.


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def code_lines(path: Path) -> set[int]:
    """Return the numbers of the lines that contain code."""
    text = path.read_text(encoding="utf-8")
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank | {tokenize.ENDMARKER}:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):  # a docstring
            found.difference_update(range(node.lineno, node.end_lineno + 1))
    return found


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (lines of code, name) of each function."""
    lines = code_lines(path)

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                span = range(child.lineno, child.end_lineno + 1)
                yield len(lines.intersection(span)), prefix + child.name
            is_named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            yield from walk(child, f"{prefix}{child.name}." if is_named else prefix)

    yield from walk(tree_of(path), "")


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).with_suffix("").parts[0]


def arrows(package: Path) -> set[tuple[str, str]]:
    """Return (room, room that it imports)."""
    rooms = rooms_of(package)
    found = set()
    for path in package.rglob("*.py"):
        room = room_of(path, package)
        for name in imported(path, package):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top == package.name and room in rooms and other in rooms - {room}:
                found.add((room, other))
    return found


def imported(path: Path, package: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports, such as "mie.ops.backend.Backend"."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: -node.level]] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def rooms_of(package: Path) -> set[str]:
    return {room_of(path, package) for path in package.rglob("*.py")} - NO_ROOM


def circles(found: set[tuple[str, str]]) -> set[str]:
    """Return the rooms that import themselves through other rooms."""
    reached = set(found)
    while more := {(a, d) for a, b in reached for c, d in found if b == c} - reached:
        reached |= more
    return {a for a, b in reached if a == b}


# Prose.


def pages_of(root: Path) -> list[str]:
    """Return the Markdown pages of a checkout that git tracks."""
    command = ["git", "-C", str(root), "ls-files", "*.md"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return sorted(name for name in names if not name.startswith((".github/", "mie/")))


def sentence_lengths(text: str) -> list[int]:
    """Return the number of words of each sentence, without code, tables and headings."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|\||#|<!--|!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[*-] ", text)
    counts = [len(re.findall(r"[A-Za-z][\w'’-]*|\d[\d,.]*", part)) for part in parts]
    return [count for count in counts if count >= 3]


# Tables.


def house(root: Path) -> dict[str, str]:
    """Return the figures of a checkout by their names."""
    package = root / "mie"
    sources = [path for path in package.rglob("*") if path.suffix in SUFFIXES]
    python = [path for path in sources if path.suffix == ".py"]
    lengths = [length for path in python for length, _ in functions(path)]
    found = arrows(package)
    long = long_files(sources)
    core = sum(lines_of(package, CORE).values())
    return {
        "rooms": f"{len(rooms_of(package))}",
        "arrows": f"{len(found)}",
        "rooms in a circle of imports": f"{len(circles(found))}",
        "lines of code of the core": f"{core:,}",
        "lines of code of the core and what stands beside it": (
            f"{core + sum(lines_of(package, BESIDE).values()):,}"
        ),
        "lines of code in Python": f"{sum(len(code_lines(path)) for path in python):,}",
        f"files of more than {MAX_LINES} lines": f"{len(long)} of {len(sources)}",
        "lines of code of a function: median, longest": f"{median(lengths):g}, {max(lengths)}",
        "words in a sentence of a page, mean": f"{mean_words(pages(root).values()):.1f}",
    }


def lines_of(package: Path, parts: dict[str, str]) -> dict[str, int]:
    """Return the lines of code of each part."""
    counts = dict.fromkeys(parts, 0)
    for path in package.rglob("*.py"):
        name = path.relative_to(package).with_suffix("").as_posix()
        for part, pattern in parts.items():
            if re.fullmatch(pattern, name):
                counts[part] += len(code_lines(path))
    return counts


def long_files(sources: Iterable[Path]) -> dict[Path, int]:
    """Return the lines of each file that has more than `MAX_LINES`, the longest first."""
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    ordered = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    return {path: count for path, count in ordered if count > MAX_LINES}


def pages(root: Path) -> dict[str, list[int]]:
    """Return the lengths of the sentences of each page that has any."""
    found = {
        name: sentence_lengths((root / name).read_text(encoding="utf-8")) for name in pages_of(root)
    }
    return {name: lengths for name, lengths in found.items() if lengths}


def mean_words(pages: Iterable[list[int]]) -> float:
    return mean(length for lengths in pages for length in lengths)


def columns(names: Iterable[str], *values: dict[str, str]) -> Table:
    """Return a row for each name, with a dash where a checkout has no such value."""
    return [[name, *(each.get(name, "–") for each in values)] for name in names]


def longest_functions(root: Path, count: int = 8) -> list[str]:
    package = root / "mie"
    found = [
        (length, f"`{path.relative_to(package).as_posix()}`: {name}")
        for path in package.rglob("*.py")
        for length, name in functions(path)
    ]
    return [f"{length} {name}" for length, name in sorted(found, reverse=True)[:count]]


def longest_files(root: Path) -> list[str]:
    package = root / "mie"
    found = long_files(path for path in package.rglob("*") if path.suffix in SUFFIXES)
    return [f"{count} `{path.relative_to(package).as_posix()}`" for path, count in found.items()]


def side_by_side(lists: list[list[str]]) -> Table:
    """Return lists of different lengths as columns."""
    most = max(map(len, lists))
    filled = [[*each, *[""] * (most - len(each))] for each in lists]
    return [list(row) for row in zip(*filled, strict=True)]


def markdown(header: list[str], rows: Table) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines)


def report(roots: list[Path], labels: list[str]) -> str:
    """Return all tables, in Markdown."""
    figures = [house(root) for root in roots]
    parts = {}
    for part in (CORE, BESIDE):
        counts = [lines_of(root / "mie", part) for root in roots]
        parts.update({name: [f"{each[name]:,}" for each in counts] for name in part})
    texts = [{name: f"{mean(n):.1f}" for name, n in pages(root).items()} for root in roots]
    names = sorted(set().union(*texts))
    return "\n\n".join(
        [
            markdown(["", *labels], columns(figures[0], *figures)),
            markdown(["lines of code", *labels], [[name, *row] for name, row in parts.items()]),
            markdown(
                [f"files of more than {MAX_LINES} lines: {label}" for label in labels],
                side_by_side([longest_files(root) for root in roots]),
            ),
            markdown(
                [f"functions by lines of code: {label}" for label in labels],
                side_by_side([longest_functions(root) for root in roots]),
            ),
            markdown(["words in a sentence, mean", *labels], columns(names, *texts)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Count rooms, arrows, lines and sentences.")
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--page", type=Path, help="Markdown page to write the tables into")
    options = parser.parse_args()
    labels = (
        ["before", "after"] if len(options.checkouts) == 2 else list(map(str, options.checkouts))
    )
    tables = report(options.checkouts, labels)
    if not options.page:
        print(tables)
        return
    page = options.page.read_text(encoding="utf-8")
    marks = r"(<!-- house figures -->\n).*(\n<!-- end of house figures -->)"
    written, count = re.subn(marks, lambda m: f"{m[1]}\n{tables}\n{m[2]}", page, flags=re.DOTALL)
    if not count:
        parser.error(f"{options.page} has no line <!-- house figures -->")
    options.page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
