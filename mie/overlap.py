"""Launching a step before the one before it is done.

While a device computes a step, the host could plan the next one, but for the tokens. They are not
needed where nothing but decodes can follow: the ids stay on the device, and the host learns them
while the next step runs. What was launched is the next plan's, whatever else has happened: rows
whose sequences have ended since are computed in vain, and nobody is admitted.
"""

from __future__ import annotations

from collections.abc import Callable

from mie.runner import Launched, ModelRunner
from mie.sched.plan import StepPlan
from mie.sched.result import StepResult


class OverlappingRunner:
    """A `ModelRunner` whose steps overlap with what the host does between them.

    ``rows_after`` tells which rows decode after a plan (`Scheduler.ahead`).
    """

    def __init__(
        self, runner: ModelRunner, rows_after: Callable[[StepPlan], tuple[int, ...]]
    ) -> None:
        self._runner = runner
        self._rows_after = rows_after
        self._launched: Launched | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is on its way."""
        return self._launched is not None

    def run(self, plan: StepPlan) -> StepResult:
        """Launch the plan, if that was not done, and what comes after it; wait for the first."""
        launched, self._launched = self._launched, None
        if launched is not None and not self._fits(plan, launched):
            self._runner.discard(launched)  # all of its sequences have ended
            launched = None
        self._runner.prepare(plan)
        if plan.is_empty:
            return StepResult(token_ids=[], logprobs=[], chunks=[])
        if launched is None:
            launched = self._runner.launch(plan)
        rows = self._rows_after(plan)
        if rows:
            self._launched = self._runner.launch_ahead(rows, launched)
        return self._runner.collect(plan, launched)

    def _fits(self, plan: StepPlan, launched: Launched) -> bool:
        is_alike = not plan.chunks and bool(plan.decodes)
        assert not is_alike or {*plan.decodes} <= {*launched.rows}, "another step was foretold"
        return is_alike
