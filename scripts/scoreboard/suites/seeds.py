"""Figures that small engines have published, as the book of benchmarks repeats them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ..case import Case, Row, Run, Suite

BOOK = Path(__file__).parents[3] / "docs/book/README.md"
SOURCES = {
    "a": "https://github.com/WeishuZ/mini-vllm",
    "b": "https://github.com/shekkari1999/mini-vllm",
    "c": "https://kobeyoung.net/projects/mini-inference-engine",
    "d": "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release",
}
"""The letters of the book."""
_ROW = re.compile(r"\| (?P<what>.+) \| (?P<here>.+) \| (?P<published>.+) \[(?P<letter>[a-z])\] \|")


def measure(run: Run) -> Iterator[Row]:
    """Read the chapters' tables, where they have a published figure."""
    chapter = ""
    for line in BOOK.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            chapter = line.removeprefix("## ")
        found = _ROW.fullmatch(line)
        if not chapter or found is None:
            continue
        question = f"{chapter}: {found['what']}"
        here, published = found["here"], found["published"]
        source = SOURCES[found["letter"]]
        if here.startswith(published):
            yield Row.compared(question, here, published, True, source=source)
        else:
            yield Row.stated(question, here, published, source=source)


SUITE = Suite(
    title="Figures of small engines",
    text="Figures that small engines have published, and the same ones from the "
    "[book of benchmarks](book/README.md), which repeats their loads on a simulated clock. The "
    "book's chapters have the conditions. Equal figures are reached; the others are stated, "
    "because their exact loads are not published.",
    cases=[Case("book", measure)],
)
