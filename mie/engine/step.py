"""Define the result of a step of the engine, and measure the step."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import attrgetter, sub

from mie.base.stats.request import RequestMetrics
from mie.base.stats.step import StepStats
from mie.sched.plan import StepPlan
from mie.sched.result import TokenLogprobs
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import FinishReason, Sequence


@dataclass(slots=True)
class SequenceOutput:
    """The new tokens of one choice."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    """The request's own object, which keeps changing."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The choices with new tokens, the prompt log-probabilities by request, and the numbers."""

    outputs: tuple[SequenceOutput, ...]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    failed: tuple[str, ...] = ()
    """The requests that failed because of an error of their own (`Request.error`)."""
    stats: StepStats


def outputs_of(sampled: Iterable[Sequence]) -> tuple[SequenceOutput, ...]:
    """Return the tokens that each sequence got since its last output."""
    outputs = []
    for seq in sampled:
        first, seq.num_given = seq.num_given, seq.num_final
        start = seq.request.num_prompt
        output = SequenceOutput(
            seq.request.request_id,
            seq.index,
            tuple(seq.token_ids[start + first : start + seq.num_given]),
            tuple(seq.logprobs[first:]),
            seq.finish_reason,
            seq.stop_reason,
            seq.request.metrics,
        )
        outputs.append(output)
    return tuple(outputs)


_moved_by = attrgetter("num_copies", "num_evictions", "num_exported", "num_imported")


class StepMeter:
    """Computes the `StepStats` of an engine's steps."""

    def __init__(self, scheduler: Scheduler, *, began: float) -> None:
        """Create a meter that counts the start of steps from the time ``began``."""
        self._scheduler = scheduler
        self._began = began
        self._moved = (0, 0, 0, 0)  # up to the last step

    def count_blocks(self, plan: StepPlan) -> None:
        """Count the blocks before the step computes."""
        manager = self._scheduler.manager
        self._blocks = {
            "num_blocks_used": manager.num_used,
            "num_blocks_cached": manager.num_cached,
            "num_blocks_saved": manager.num_saved,
            "num_slots_empty": manager.num_slots_empty - plan.num_tokens,
        }

    def stats(self, plan: StepPlan, times: Items[float], num_finished: int) -> StepStats:
        """Return a step's numbers. ``times`` are when it began, was planned, had run, and ended."""
        scheduler, before = self._scheduler, self._moved
        self._moved = now = _moved_by(scheduler.manager.stats)
        num_copies, num_evicted, num_exported, num_imported = map(sub, now, before)
        start, planned, ran, end = times
        return StepStats(
            step=plan.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=len(plan.decodes),
            num_preempted=len(plan.preempted),
            num_finished=num_finished,
            **self._blocks,
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
