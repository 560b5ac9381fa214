"""Define the result of a step of the engine, and measure the step."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, sub

from mie.base.stats.step import StepStats
from mie.sched.plan import StepPlan
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The requests that a step changed, by their ids, and the numbers of the step.

    It refers to no request. The caller that added a request holds it, and reads its tokens there.
    """

    request_ids: tuple[str, ...]
    """The requests that got tokens, in the order of the step's rows. Some of them have ended."""
    failed: tuple[str, ...] = ()
    """The requests that failed because of an error of their own (`Request.error`)."""
    stats: StepStats


_moved_by = attrgetter("num_copies", "num_evictions", "num_exported", "num_imported")


class StepMeter:
    """Measures the steps of an engine: the time of each phase, the blocks, and the moves."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        """Create a meter that counts the start of steps from now."""
        self._scheduler = scheduler
        self._clock = clock
        self._began = clock()
        self._laps: deque[float] = deque(maxlen=4)  # when the step began, was planned, ran, ended
        self._moved = (0, 0, 0, 0)  # up to the last step

    def lap(self) -> None:
        """Note the time at which a phase of the step begins."""
        self._laps.append(self._clock())

    def count_blocks(self) -> None:
        """Count the blocks before the step computes."""
        manager = self._scheduler.manager
        self._blocks = {
            "num_blocks_used": manager.num_used,
            "num_blocks_cached": manager.num_cached,
            "num_blocks_saved": manager.num_saved,
        }
        self._num_slots_empty = manager.num_slots_empty

    def stamp(self, plan: StepPlan, sequences: Iterable[Sequence]) -> list[float]:
        """Note the times of a step's tokens, and return the seconds since the tokens before them.

        ``sequences`` got tokens.
        """
        start, now, gaps = self._laps[0], self._laps[-1], []
        owners = [self._scheduler.owner_of(each.row) for each in plan.chunks if not each.choices]
        begun = [request for request in owners if request is not None]
        for seq in sequences:
            metrics, last = seq.request.metrics, seq.last_token_time
            if last:
                gaps.append(now - last)
            metrics.last_token_time = seq.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                begun.append(seq.request)
        for request in begun:
            if request.metrics.first_step_time is None:
                request.metrics.first_step_time = start
        return gaps

    def stats(self, plan: StepPlan, num_finished: int) -> StepStats:
        """Return the numbers of the step."""
        scheduler, before = self._scheduler, self._moved
        self._moved = now = _moved_by(scheduler.manager.stats)
        num_copies, num_evicted, num_exported, num_imported = map(sub, now, before)
        start, planned, ran, end = self._laps
        return StepStats(
            step=plan.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=plan.num_tokens - plan.num_prefill_tokens,
            num_preempted=len(plan.preempted),
            num_finished=num_finished,
            **self._blocks,
            num_slots_empty=self._num_slots_empty - plan.num_tokens,
            num_copies=num_copies,
            num_evicted=num_evicted,
            num_exported=num_exported,
            num_imported=num_imported,
            start=start - self._began,
            schedule_seconds=planned - start,
            run_seconds=ran - planned,
            update_seconds=end - ran,
            seconds=end - start,
        )
