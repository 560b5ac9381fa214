"""Define a plan while it is made, and the tokens that it may still compute."""

from dataclasses import dataclass, field

from mie.sched.plan import Chunk
from mie.sched.sequence import Request, Sequence


class Budget:
    """The tokens that a step has left, for any request."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def most(self, request: Request) -> int:
        """Return how many tokens a request's sequences may take."""
        return self.left

    def take(self, request: Request, count: int) -> None:
        """Take tokens for a sequence of a request."""
        self.left -= count


@dataclass(slots=True)
class StepDraft:
    """A plan while it is made."""

    budget: Budget
    only: Sequence | None
    """The only sequence that may be admitted, because others were preempted for it."""
    is_short_of_blocks: bool = False
    """Whether a sequence was preempted because a decode needed a block."""
    decodes: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
