"""Where a request's time went and what scheduling did to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """Grows while the request runs. Moments are seconds of one monotonic clock, stamped by the
    engine; what has not happened yet is None."""

    arrival_time: float = 0.0
    first_step_time: float | None = None
    """When the first step began that computed for it."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Of any choice, as the others."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that kept the computed tokens on the host."""
    num_recomputed_tokens: int = 0
    """Tokens that were computed, lost in a preemption, and computed again."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission, whole blocks and parts."""
    num_copied_blocks: int = 0
    """Blocks copied for it: at forks, and for parts of blocks from the prefix cache."""

    @property
    def queue_time(self) -> float | None:
        """From arrival to the first step that computed for it."""
        return _between(self.arrival_time, self.first_step_time)

    @property
    def prefill_time(self) -> float | None:
        """From there to its first token."""
        return _between(self.first_step_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """From its first token to its last so far."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def time_to_first_token(self) -> float | None:
        """From arrival."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def total_time(self) -> float | None:
        """From arrival to its last token so far."""
        return _between(self.arrival_time, self.last_token_time)

    def as_dict(self) -> dict[str, float | None]:
        """Durations and counts by name."""
        names = (
            "queue_time",
            "prefill_time",
            "decode_time",
            "time_to_first_token",
            "total_time",
            "num_preemptions",
            "num_swaps",
            "num_recomputed_tokens",
            "num_cached_tokens",
            "num_copied_blocks",
        )
        return {name: getattr(self, name) for name in names}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
