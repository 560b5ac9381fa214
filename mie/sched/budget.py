"""Divide the tokens of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from mie.sched.sequence import Request

K = TypeVar("K")


@dataclass(slots=True)
class Budget:
    """The tokens that a step has left, and each client's part if all want more than there are."""

    left: int
    parts: dict[str | None, int] | None = None

    def most(self, request: Request) -> int:
        """Return how many tokens a request's sequences may take."""
        if self.parts is None:
            return self.left
        return min(self.left, self.parts.get(request.client, 0))

    def take(self, request: Request, count: int) -> None:
        """Take tokens for a sequence of a request."""
        self.left -= count
        if self.parts is not None:
            self.parts[request.client] -= count


def split(total: int, wanted: Mapping[K, int], weights: Mapping[K, float]) -> dict[K, int]:
    """Return parts of ``total`` in proportion to the weights, but none larger than wanted.

    Tokens that one does not want go to the others (weighted max-min fairness).
    """
    parts: dict[K, int] = {}
    weight = sum(weights[key] for key in wanted)
    in_order = sorted(wanted, key=lambda key: wanted[key] / weights[key])
    for key in in_order:
        is_last = key == in_order[-1]
        part = total if is_last else int(total * weights[key] / weight)
        parts[key] = min(wanted[key], part)
        total -= parts[key]
        weight -= weights[key]
    return parts
