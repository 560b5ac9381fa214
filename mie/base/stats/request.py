"""Record where a request's time went and how it was scheduled."""

from dataclasses import dataclass, fields

from mie.base.refusals import refuses_names
from mie.base.stats.departure import Departure


@refuses_names
@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """The times and counts of a request, updated while it runs.

    Times are seconds of one monotonic clock, stamped by the engine. A time is None until it is
    known.
    """

    arrival_time: float = 0.0
    first_step_time: float | None = None
    """When the first step that computed for it began."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """When the latest token of any choice was sampled."""
    finished_time: float | None = None
    """When the last choice ended."""
    num_generation_tokens: int = 0
    """Tokens of all choices so far."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that kept the computed tokens on the host."""
    num_recomputed_tokens: int = 0
    """Tokens that were computed, lost in a preemption, and computed again."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission, in full blocks or in part."""
    num_disk_tokens: int = 0
    """Prompt tokens in blocks that were read from a disk for it."""
    departure: Departure | None = None
    """Where the prompt departs from the prefix cache. None if it is cached, or without a cache."""
    num_forced_tokens: int = 0
    """Tokens of structured outputs that were determined, and were not sampled."""
    num_draft_tokens: int = 0
    """Guesses of its next tokens that were computed."""
    num_accepted_tokens: int = 0
    """Guesses that the model drew too, so that they were kept."""
    num_copied_blocks: int = 0
    """Blocks copied for it, at forks and for partial hits in the prefix cache."""
    num_reasoning_tokens: int = 0
    """Tokens of its answer's reasoning, counted at its end."""
    num_tool_calls: int = 0
    """Calls of tools in its answer, counted at its end."""
    num_unparsed_calls: int = 0
    """Opening tags of calls in its answer that no call followed, so that they stayed text."""

    @property
    def queue_time(self) -> float | None:
        """Time from arrival to the first step that computed for it."""
        return _between(self.arrival_time, self.first_step_time)

    @property
    def prefill_time(self) -> float | None:
        """Time from the first step that computed for it to its first token."""
        return _between(self.first_step_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Time from its first token to its latest."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Time from arrival to its first token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def total_time(self) -> float | None:
        """Time from arrival to its latest token."""
        return _between(self.arrival_time, self.last_token_time)

    # vLLM's names. A request that arrives is queued at once. The getters are functions of Python,
    # because newer releases of Python read the code of each getter of a dataclass with slots.
    queued_ts = property(lambda self: self.arrival_time)
    scheduled_ts = first_scheduled_time = property(lambda self: self.first_step_time)
    first_token_ts = property(lambda self: self.first_token_time)
    last_token_ts = property(lambda self: self.last_token_time)
    first_token_latency = time_to_first_token
    time_in_queue = queue_time

    def as_dict(self) -> dict[str, float | None]:
        """Return durations and counts by name."""
        counts = [name for name in _COUNTS if name != "num_generation_tokens"]
        return {name: getattr(self, name) for name in (*_DURATIONS, *counts)}


_DURATIONS = ("queue_time", "prefill_time", "decode_time", "time_to_first_token", "total_time")
_COUNTS = tuple(each.name for each in fields(RequestMetrics) if each.name.startswith("num_"))


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
