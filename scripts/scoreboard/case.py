"""The parts of a suite: cases, and the rows that they yield."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Verdict = Literal["reached", "missed", "stated", "refused", "skipped", "failed"]
VERDICTS: Mapping[Verdict, str] = {
    "reached": "the figure of the published column is reached",
    "missed": "the figure is not reached",
    "stated": "a figure with nothing to reach",
    "refused": "mie refuses the input by name",
    "skipped": "an input or a package is missing",
    "failed": "the measurement raised an exception",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question with the figure measured here and the published one."""

    question: str
    ours: str = ""
    published: str = ""
    source: str = ""
    """Address of the published figure, or the name of the program that computed it."""
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    """Seconds of the case until this row. The framework fills it in."""

    @classmethod
    def compared(
        cls,
        question: str,
        ours: str,
        published: str,
        is_reached: bool,
        *,
        source: str,
        reason: str = "",
    ) -> Row:
        """Return the row of a figure to reach. ``reason`` explains a figure that is missed."""
        verdict: Verdict = "reached" if is_reached else "missed"
        return cls(
            question=question,
            ours=ours,
            published=published,
            source=source,
            verdict=verdict,
            reason=reason,
        )

    @classmethod
    def stated(
        cls, question: str, ours: str, published: str = "", *, source: str = "", reason: str = ""
    ) -> Row:
        """Return the row of a figure that has nothing to reach."""
        return cls(
            question=question,
            ours=ours,
            published=published,
            source=source,
            verdict="stated",
            reason=reason,
        )

    @classmethod
    def refused(cls, question: str, reason: str, *, source: str = "") -> Row:
        """Return the row of something that mie refuses."""
        return cls(question=question, source=source, verdict="refused", reason=reason)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of a run, and the paths of the inputs of the current case."""

    is_quick: bool
    paths: Mapping[str, Path]
    """The path of each input of the case, with unpacked contents."""
    folder: Path
    """A folder for files of the case. It stays until the case is computed again."""
    label: str = ""

    def path(self, name: str) -> Path:
        """Return the path of an input that the case names."""
        return self.paths[name]

    def progress(self, done: int, total: int) -> None:
        """Show on a terminal how much of the case is done."""
        if sys.stderr.isatty():
            print(f"\r{self.label}: {done} of {total} ", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Case:
    """A computation that yields rows."""

    name: str
    measure: Callable[[Run], Iterator[Row]]
    inputs: tuple[str, ...] = ()
    """Names in `inputs.json`."""
    packages: tuple[str, ...] = ()
    """Modules that `measure` imports and that mie does not need."""
    is_in_quick: bool = True
    """Whether a quick run has the case."""

    def rows(self, run: Run) -> Iterator[Row]:
        """Yield the rows of the measurement, each with its time."""
        start = time.perf_counter()
        for row in self.measure(run):
            yield replace(row, seconds=round(time.perf_counter() - start, 1))
            start = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The cases of a suite, and its text on the page."""

    title: str
    text: str
    """A paragraph in Markdown: the contents of the suite, and its place."""
    cases: Sequence[Case]
