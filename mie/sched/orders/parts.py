"""Divide the tokens of a step between clients."""

from collections.abc import Mapping
from typing import TypeVar

from mie.sched.draft import Budget
from mie.sched.sequence import Request

K = TypeVar("K")


class ClientBudget(Budget):
    """The tokens that a step has left, and the part of each client."""

    def __init__(self, left: int, parts: dict[str | None, int]) -> None:
        super().__init__(left)
        self._parts = parts

    def most(self, request: Request) -> int:
        """Return the number of tokens that a request may compute."""
        return min(self.left, self._parts.get(request.client, 0))

    def take(self, request: Request, count: int) -> None:
        """Take ``count`` tokens from the step and from the client's part."""
        self.left -= count
        self._parts[request.client] -= count


def split(total: int, wanted: Mapping[K, int], weights: Mapping[K, float]) -> dict[K, int]:
    """Return parts of ``total`` in proportion to the weights, but none larger than wanted.

    Tokens that one key does not need go to the others (weighted max-min fairness).
    """
    parts: dict[K, int] = {}
    left = {key: weights[key] for key in wanted}
    for key in sorted(wanted, key=lambda key: wanted[key] / weights[key]):
        share = left[key] / sum(left.values())
        parts[key] = min(wanted[key], int(total * share))
        total -= parts[key]
        del left[key]
    return parts
