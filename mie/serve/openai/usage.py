"""How many tokens a request took, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mie.frontend.outputs import RequestOutput


def usage_of(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's ``usage``."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def metrics_of(
    outputs: Sequence[RequestOutput], num_tokens: Sequence[int]
) -> dict[str, Any] | None:
    """Return the times and counts of a request whose prompts gave these final outputs.

    Times are of all prompts together: from the arrival to the first token of any, and so on.
    ``num_tokens`` has the number of tokens of each choice.
    """
    each = [output.metrics for output in outputs if output.metrics is not None]
    if not each:
        return None
    arrival = min(m.arrival_time for m in each)
    started = [m.first_step_time for m in each if m.first_step_time is not None]
    first = min((m.first_token_time for m in each if m.first_token_time is not None), default=None)
    last = max((m.last_token_time for m in each if m.last_token_time is not None), default=None)
    times: dict[str, Any] = {
        "queue_time_ms": _ms(max(started) - arrival) if started else None,
        "time_to_first_token_ms": None,
        "generation_time_ms": None,
        "mean_itl_ms": None,
        "tokens_per_second": None,
    }
    if first is not None and last is not None:
        times["time_to_first_token_ms"] = _ms(first - arrival)
        times["generation_time_ms"] = _ms(last - first)
        longest = max(num_tokens, default=0)
        if longest > 1:
            times["mean_itl_ms"] = _ms((last - first) / (longest - 1))
        if last > arrival:
            times["tokens_per_second"] = round(sum(num_tokens) / (last - arrival), 2)
    names = ("num_preemptions", "num_swaps", "num_recomputed_tokens", "num_copied_blocks")
    return {**times, **{name: sum(getattr(m, name) for m in each) for name in names}}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
