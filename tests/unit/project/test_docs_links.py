"""Check that the targets of the documentation's links exist, and the tests that it names."""

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])


def prose(text: str) -> str:
    """Return a page without code blocks and spans, which may look like links."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = text.split("\n\n")
    return "\n\n".join(p for p in paragraphs if re.search(r"^(?! {4}|\t)", p, re.MULTILINE))


def links(text: str) -> Iterator[tuple[str, str]]:
    """Yield (text, target) of every link and picture."""
    text = prose(text)
    yield from re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text)
    yield from ((name, target) for name, target in re.findall(r"^\[([^\]]+)\]: (\S+)", text, re.M))


def anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.*?) *#*$", prose(text), flags=re.MULTILINE):
        title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        kept = "".join(c for c in title if c in " -_" or unicodedata.category(c)[0] in "LN")
        name, number = kept.replace(" ", "-"), 0
        while (unique := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(unique)
    return found


def definitions(path: Path) -> set[str]:
    """Return the names that a module defines, such as "Pool", "Pool.take", "SIZE"."""
    found = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    walk(ast.parse(path.read_text()).body, "")
    return found


def problems(page: Path) -> Iterator[str]:
    """Yield a sentence about each wrong link of a page."""
    for text, target in links(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.name}: {target} does not exist"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{page.name}: {file.name} has no heading #{anchor}"
        elif file.suffix == ".py" and re.fullmatch(r"`[A-Za-z_][\w.]*`", text):
            name = text.strip("`")
            if not name.endswith(".py") and name not in definitions(file):
                yield f"{page.name}: {path} does not define {name}"


TESTS = {path.name: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
FUNCTIONS = {name for text in TESTS.values() for name in re.findall(r"\bdef (test_\w+)", text)}


def unknown_tests(text: str) -> list[str]:
    """Return the tests and files of tests that a page names and that do not exist."""
    spans = [
        word for span in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"::|[ /]", span)
    ]
    named = [word for word in spans if re.fullmatch(r"test_\w+(\.py)?", word)]
    modules = {name.removesuffix(".py") for name in TESTS}
    return [name for name in named if name not in TESTS.keys() | FUNCTIONS | modules]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path):
    assert unknown_tests(page.read_text()) == []


def test_an_unknown_test_is_seen():
    text = "| `test_named_tests_exist` in `test_docs_links.py` | `unit/test_gone.py::test_lost` |"
    assert unknown_tests(text) == ["test_gone.py", "test_lost"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_targets(page: Path):
    assert list(problems(page)) == []


def test_wrong_links_are_noticed(tmp_path: Path):
    (tmp_path / "code.py").write_text("SIZE = 1\nclass Pool:\n    def take(self): pass\n")
    (tmp_path / "other.md").write_text("# Same\n# Same\n## The `key`: what, and why?\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#same-1) [c](other.md#the-key-what-and-why) [d](#here)\n"
        "[`Pool.take`](code.py) [`SIZE`](code.py) [`code.py`](code.py) [e](https://example.org)\n"
        "```\n[f](in-a-block.md)\n```\n# Here\n"
        "![g](missing.png) [h](other.md#same-2) [i](#there) [`Pool.drop`](code.py)\n"
        "[two\nlines](missing.md)\n[j]: gone.md\n"
    )
    assert list(problems(page)) == [
        "page.md: missing.png does not exist",
        "page.md: other.md has no heading #same-2",
        "page.md: page.md has no heading #there",
        "page.md: code.py does not define Pool.drop",
        "page.md: missing.md does not exist",
        "page.md: gone.md does not exist",
    ]
