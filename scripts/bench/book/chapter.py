"""Define a chapter of the book, and the helpers of all chapters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from mie.config.engine import EngineConfig
from mie.lab.sim.costs import Costs
from mie.lab.sim.devices import costs_on, find_device, find_shape
from mie.lab.sim.driver import LoadResult, run_load
from mie.lab.sim.simulated import simulated
from mie.lab.workload import Workload

Scale = Literal["full", "small"]
"""Full size as in the book, or small: the same within seconds, for tests and a first look."""

Result = dict[str, Any]
"""The result of a chapter, the same as in JSON."""

DEVICE, MODEL = "a10g", "Llama-3.1-8B"
"""The simulated device and model of the chapters that need one."""


class Chapter(Protocol):
    """A module of the book. Facts depend on its result alone."""

    TITLE: str

    def run(self, scale: Scale) -> Result:
        """Run the benchmark, with the same result on every machine."""

    def facts(self, result: Result) -> dict[str, str]:
        """Return the texts for the chapter's placeholders in `page.md`."""


def simulate(
    costs: Costs, workload: Workload, *, num_host_blocks: int = 0, **settings: Any
) -> LoadResult:
    """Run the load on a simulated engine with these settings of `EngineConfig`."""
    config = EngineConfig(event_log_steps=0, **settings)
    return run_load(simulated(costs, config, num_host_blocks=num_host_blocks), workload)


def device_costs() -> Costs:
    """Return the costs of the steps of `MODEL` on `DEVICE`."""
    return costs_on(find_device(DEVICE), find_shape(MODEL))


def times(more: float, less: float, digits: int = 2) -> str:
    """Format ``more / less``."""
    return f"{more / less:.{digits}f} ×"


def percent(share: float, digits: int = 0) -> str:
    """Format a fraction as percent."""
    return f"{100 * share:.{digits}f} %"


def rows(cells: Iterable[Sequence[str]]) -> str:
    """Format the rows of a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def column(table: Sequence[Mapping[str, Any]], *names: str) -> list[Any]:
    """Return a column of a table. More than one name leads into nested tables."""
    values: list[Any] = list(table)
    for name in names:
        values = [value[name] for value in values]
    return values
