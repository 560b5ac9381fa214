"""Compute the cost of a step from the work in it.

    step = step_ps + max(weights_ps, tokens * token_ps + sampled * logits_ps)
         + pairs * pair_ps + context * context_ps + seqs * seq_ps
         + copied * copy_ps + swapped * swap_ps
         + window_pairs * window_pair_ps + window_context * window_context_ps
         + states * state_ps + swapped_states * state_swap_ps

The maximum is the roofline of the matrix products. Few tokens wait for the weights to be read, and
many wait for the arithmetic. So a decode's cost hardly grows with its batch. Everything is an
integer, so a simulated run is the same on every machine.
"""

import time
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from mie.config.engine import check_integer, keyword_checked


class StepWork(NamedTuple):
    """The counts of a step's work."""

    num_tokens: int
    """Tokens that go through the layers, from prompts and decodes."""
    num_sampled: int
    """Number of rows with logits."""
    num_pairs: int
    """Pairs of a prompt token in the step and a token that it attends to, itself included.

    These and the context are counted for layers without a window.
    """
    num_context: int
    """Number of tokens with keys and values to read: all tokens of each sequence in the step."""
    num_seqs: int
    num_copied: int
    """Slots of copied blocks."""
    num_swapped: int
    """Slots of blocks that are swapped out or in."""
    num_window_pairs: int = 0
    """The pairs in layers with a window."""
    num_window_context: int = 0
    """Number of tokens with keys and values that layers with a window read."""
    num_states: int = 0
    """Times that a sequence's recurrent states are read or written. A copy does both."""
    num_swapped_states: int = 0
    """Sequences' states that are swapped out or in."""


def decode_work(num_seqs: int, num_context: int, window: int | None) -> StepWork:
    """Return the work of a step in which sequences with ``num_context`` tokens in all decode.

    They are about equally long. Layers with a window read ``window`` positions.
    """
    seen = min(num_context, num_seqs * (window or 0))
    return StepWork(
        num_tokens=num_seqs,
        num_sampled=num_seqs,
        num_pairs=0,
        num_context=num_context,
        num_seqs=num_seqs,
        num_copied=0,
        num_swapped=0,
        num_window_context=seen,
        num_states=2 * num_seqs,
    )


def causal_pairs(start: int, end: int) -> int:
    """Count the pairs of tokens start … end - 1 with themselves and all tokens before them."""
    return (end * (end + 1) - start * (start + 1)) // 2


def window_pairs(start: int, end: int, window: int) -> int:
    """Count the pairs of tokens start … end - 1 with the last ``window`` tokens up to each."""
    middle = min(max(start, window), end)  # from there on, each token sees a full window
    return causal_pairs(start, middle) + (end - middle) * window


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class Costs:
    """Picoseconds for each unit of `StepWork`, for a step itself, and for reading the weights."""

    step_ps: int = 0
    weights_ps: int = 0
    token_ps: int = 0
    logits_ps: int = 0
    pair_ps: int = 0
    context_ps: int = 0
    seq_ps: int = 0
    copy_ps: int = 0
    swap_ps: int = 0
    window_pair_ps: int = 0
    window_context_ps: int = 0
    state_ps: int = 0
    state_swap_ps: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_integer(name, value, 0)

    def step_ns(self, work: StepWork) -> int:
        """Return the whole nanoseconds that a step takes, at least one so that time passes."""
        products = work.num_tokens * self.token_ps + work.num_sampled * self.logits_ps
        if work.num_tokens:
            products = max(self.weights_ps, products)
        total = (
            self.step_ps
            + products
            + work.num_pairs * self.pair_ps
            + work.num_context * self.context_ps
            + work.num_seqs * self.seq_ps
            + work.num_copied * self.copy_ps
            + work.num_swapped * self.swap_ps
            + work.num_window_pairs * self.window_pair_ps
            + work.num_window_context * self.window_context_ps
            + work.num_states * self.state_ps
            + work.num_swapped_states * self.state_swap_ps
        )
        return max(1, total // 1000)


SECOND = 1_000_000_000
MILLISECOND = 1_000_000


class Clock(Protocol):
    """The clock that times a load."""

    def now_ns(self) -> int:
        """Return the nanoseconds since some moment. They never run backwards."""

    def wait_until(self, moment_ns: int) -> None:
        """Return at ``moment_ns``, or at once if it has passed."""


class SimClock:
    """A clock that moves only when it is moved."""

    def __init__(self) -> None:
        self._now = 0

    def now_ns(self) -> int:
        return self._now

    def seconds(self) -> float:
        """Return the same moment for an engine. Rounded to nanoseconds, it is exact for 52 days."""
        return self._now / SECOND

    def advance(self, duration_ns: int) -> None:
        """Advance the time."""
        self._now += duration_ns

    def wait_until(self, moment_ns: int) -> None:
        self._now = max(self._now, moment_ns)


class WallClock:
    """The clock that an engine reads by default."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def wait_until(self, moment_ns: int) -> None:
        time.sleep(max(0, moment_ns - self.now_ns()) / SECOND)
