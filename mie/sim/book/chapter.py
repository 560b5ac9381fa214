"""What a chapter of the book is: functions from plain data to plain data, text and panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mie.config import EngineConfig
from mie.sim.costs import Costs
from mie.sim.driver import LoadResult, run_load
from mie.sim.simulated import simulated
from mie.sim.workload import Workload

Scale = Literal["full", "small"]
"""As in the book, or small: the same in seconds, for tests and for a first look."""

Result = dict[str, Any]
"""What a chapter found, the same as JSON."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A finding in a line, beside what others published for the same conditions."""

    what: str
    here: str
    published: str = "–"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that belong together; None where nothing was measured."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot. Where x are words there are bars instead of lines."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


class Chapter(Protocol):
    """A module of the book. All but ``run`` are made from its result alone."""

    def run(self, scale: Scale) -> Result:
        """Do the work; the same result on every machine, unless it measures the real engine."""

    def headlines(self, result: Result) -> list[Headline]:
        """What to take home, the most important first."""

    def describe(self, result: Result) -> str:
        """What was run, what came out, and what it does not show: Markdown."""

    def panels(self, result: Result) -> list[Panel]:
        """What to plot."""


def simulate(
    costs: Costs, workload: Workload, *, num_host_blocks: int = 0, **settings: Any
) -> LoadResult:
    """The load on a simulated engine with these settings of `EngineConfig`."""
    config = EngineConfig(event_log_steps=0, **settings)
    return run_load(simulated(costs, config, num_host_blocks=num_host_blocks), workload)


def times(more: float, less: float, digits: int = 2) -> str:
    """How many times ``less`` goes into ``more``, for people."""
    return f"{more / less:.{digits}f} ×"


def percent(share: float, digits: int = 0) -> str:
    """A share of 1, for people."""
    return f"{100 * share:.{digits}f} %"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def by(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """A column of a table."""
    return [row[name] for row in rows]
