"""Check that the glossary explains the terms that a newcomer meets."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = re.findall(
    r"^\| (.+?) \| .+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE
)
TERMS = {term.strip("` ") for row in ROWS for term in re.split(r", |: |\(|\)", row.lower())}


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def columns_of_the_trace() -> list[str]:
    table = read("mie/cli/trace.py").partition("_WIDTHS = {")[2].partition("}")[0]
    return re.findall(r'"(\w+)":', table)


def titles_of_the_story() -> list[str]:
    return re.findall(r'title: "([^"]+)"', read("mie/page/web/chapters.js"))


def views_of_the_page() -> list[str]:
    return re.findall(r"<h2[^>]*>([A-Z][\w ]+)", read("mie/page/web/index.html"))


def numbers_of_the_page() -> list[str]:
    tiles = read("mie/page/web/bars.js").partition("const tiles = [")[2].partition("];")[0]
    return re.findall(r'^ +\["([^"]+)",', tiles, re.MULTILINE)


def states_of_blocks() -> list[str]:
    line = re.search(r"KINDS = \[(.+)\];", read("mie/page/web/state.js"))
    assert line
    return re.findall(r'"([^"]+)"', line[1])


OTHER_WORDS = {
    "preempted": "preemption",
    "done": "finish reason",
    "shared": "shared block",
    "a block": "block",
    "a table": "block table",
    "a prefix hit": "prefix hit",
    "drafts": "draft",
    "free": "free block",
    "in use": "kv use",
    "only cached": "cached block",
    "prefix hits": "prefix hit",
    "saved by sharing": "sharing",
    "tokens/s": "output throughput",
}
OF_NO_ENTRY = {"all together", "selection", "playground", "the same as tables"}
OF_NO_ENTRY |= {"keys and legend"}


@pytest.mark.parametrize(
    "term",
    sorted(
        {*columns_of_the_trace(), *titles_of_the_story(), *views_of_the_page()}
        | {*numbers_of_the_page(), *states_of_blocks()}
    ),
)
def test_a_term_of_trace_story_or_page_is_in_the_glossary(term: str):
    word = OTHER_WORDS.get(term.lower(), term.lower())
    assert word in TERMS or word in OF_NO_ENTRY


def test_terms_are_found_in_all_places():
    assert "waste" in columns_of_the_trace()
    assert "Copy-on-write" in titles_of_the_story()
    assert "Prefix tree" in views_of_the_page()
    assert "empty slots" in numbers_of_the_page()
    assert "held for a copy" in states_of_blocks()
