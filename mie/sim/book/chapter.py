"""Define a chapter of the book: functions between plain data, text and panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mie.config.engine import EngineConfig
from mie.sim.costs import Costs
from mie.sim.driver import LoadResult, run_load
from mie.sim.simulated import simulated
from mie.sim.workload import Workload

Scale = Literal["full", "small"]
"""Full size as in the book, or small: the same within seconds, for tests and a first look."""

Result = dict[str, Any]
"""The result of a chapter, which is the same in JSON."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A finding in one line, beside figures that others published for the same conditions."""

    what: str
    here: str
    published: str = "–"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one line. None is a missing value."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot. If x is text, it has bars instead of lines."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


class Chapter(Protocol):
    """A module of the book. Everything but ``run`` depends on its result alone."""

    def run(self, scale: Scale) -> Result:
        """Run the benchmark. Only measurements of the real engine differ between machines."""

    def headlines(self, result: Result) -> list[Headline]:
        """Return the findings, most important first."""

    def describe(self, result: Result) -> str:
        """Return Markdown that says what was run, what came out, and what it does not show."""

    def panels(self, result: Result) -> list[Panel]:
        """Return the plots."""


def simulate(
    costs: Costs, workload: Workload, *, num_host_blocks: int = 0, **settings: Any
) -> LoadResult:
    """Run the load on a simulated engine with these settings of `EngineConfig`."""
    config = EngineConfig(event_log_steps=0, **settings)
    return run_load(simulated(costs, config, num_host_blocks=num_host_blocks), workload)


def times(more: float, less: float, digits: int = 2) -> str:
    """Format ``more / less``."""
    return f"{more / less:.{digits}f} ×"


def percent(share: float, digits: int = 0) -> str:
    """Format a fraction as percent."""
    return f"{100 * share:.{digits}f} %"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def by(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return a column of a table."""
    return [row[name] for row in rows]
