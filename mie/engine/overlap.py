"""Launch a step before the previous one is done.

While a device computes a step, the host can plan the next one, except for its tokens. If only
decodes can follow, the tokens are not needed: their ids stay on the device, and the host reads them
while the next step runs. The launched step is then the next plan. The work for rows of ended
sequences is discarded, and no sequence is admitted.
"""

from collections.abc import Callable

from mie.engine.runner import Launched, ModelRunner
from mie.sched.plan import StepPlan
from mie.sched.result import StepResult


class OverlappingRunner:
    """A `ModelRunner` with steps that overlap with the host's work between them.

    ``rows_after`` returns the rows that decode after a plan (`Scheduler.ahead`).
    """

    def __init__(
        self, runner: ModelRunner, rows_after: Callable[[StepPlan], tuple[int, ...]]
    ) -> None:
        self.runner = runner
        self._rows_after = rows_after
        self._launched: Launched | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is already launched."""
        return self._launched is not None

    def run(self, plan: StepPlan) -> StepResult:
        """Launch the plan if necessary, launch the step after it, and wait for the first."""
        launched, self._launched = self._launched, None
        if launched is not None and (plan.chunks or not plan.decodes):
            self.runner.discard(launched)  # all of its sequences have ended
            launched = None
        assert launched is None or {*plan.decodes} <= {*launched.rows}, (
            "the launched step does not match the plan"
        )
        self.runner.prepare(plan)
        if plan.is_empty:
            return StepResult(token_ids=[], logprobs=[], chunks=[])
        if launched is None:
            launched = self.runner.launch(plan)
        rows = self._rows_after(plan)
        if rows:
            self._launched = self.runner.launch_ahead(rows, launched)
        return self.runner.collect(plan, launched)
