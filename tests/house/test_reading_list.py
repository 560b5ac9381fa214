"""Check the reading list of docs/architecture.md: its functions exist, and their lines are few."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
LINKS = re.compile(r"\[([^\]]*)\]\(\.\./(mie/[^)]*\.py)\)")


def functions(path: Path) -> dict[str, ast.stmt]:
    """Return the classes and functions of a file, by their names with and without the class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        found[node.name] = node
        for own in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(own, ast.FunctionDef):
                found[f"{node.name}.{own.name}"] = own
                found.setdefault(own.name, own)
    return found


@pytest.mark.parametrize(
    ("table", "stated"),
    [
        ("| step | read |", r"about (\d+) lines in (\d+) files\. One call"),
        ("| in the shell | read |", r"with about (\d+)\nlines in (\d+) files:"),
    ],
)
def test_the_named_functions_exist_and_have_the_stated_lines(table: str, stated: str) -> None:
    links = LINKS.findall(PAGE[PAGE.index(table) :].partition("\n\n")[0])
    found: dict[tuple[str, str], ast.stmt] = {}
    for label, path in links:
        known = functions(ROOT / path)
        names = re.findall(r"`([\w.]+)`|\b([A-Z]\w+\.\w+)", label)
        assert names, label
        for name in map("".join, names):
            assert name in known, f"{path} has no {name}"
            found[path, name] = known[name]
    num_lines = sum((node.end_lineno or 0) - node.lineno + 1 for node in found.values())
    match = re.search(stated, PAGE)
    assert match is not None
    assert int(match[2]) == len({path for path, _ in found})
    assert abs(num_lines - int(match[1])) <= 50, num_lines
