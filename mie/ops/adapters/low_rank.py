"""Define the low-rank change of a matrix, and the operators that a backend with adapters has.

An adapter changes a matrix W to W + s B A, with A [r, K] and B [N, r] of a small rank r. The change
is computed beside the matrix: y = x W^T + s (x A^T) B^T. So requests with and without adapters
share a batch and the memory of W.

Source: LoRA, https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mie.ops.arrays import Floats
from mie.ops.backend import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """The change s B A of the rows of a matrix that come from one tensor."""

    a: Floats
    """[r, K] in float32."""
    b: Floats
    """[N, r] in float32."""
    scale: float

    @property
    def rank(self) -> int:
        """The rank r."""
        return len(self.a)


@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """The sizes of the adapters' slots of one matrix [N, K]."""

    num_inputs: int
    counts: tuple[int, ...]
    """Number of rows from each tensor. Their sum is N."""
    num_slots: int
    max_rank: int


def low_rank(x: Floats, change: LowRank) -> Floats:
    """Return the change s (x A^T) B^T of a product [T, N], of x [T, K]."""
    y: Floats = (x @ change.a.T) @ change.b.T * x.dtype.type(change.scale)
    return y


class AdapterOperators(Protocol):
    """The operators of matrices with slots of adapters.

    Slots have the numbers 1 … ``num_slots``. A token with slot 0 has no adapter. A batch has the
    slot of each token in `StepBatch.adapters`. A row of a product depends on nothing but its own
    inputs and its own adapter, as far as the backend's products do.
    """

    def slot_bytes(self, shape: SlotShape) -> int:
        """Return the bytes of all slots of a matrix."""

    def step_bytes(self, shapes: Sequence[SlotShape], num_tokens: int) -> int:
        """Return the bytes by which adapters of these matrices enlarge a step."""

    def with_slots(self, weight: Array, shape: SlotShape) -> Array:
        """Return the matrix of `Backend.load_linear` with empty slots, for `Backend.linear`."""

    def put(self, weight: Array, slot: int, changes: Sequence[LowRank | None]) -> None:
        """Replace the contents of a slot by a change for each of the ``counts`` of its shape.

        No running step may have tokens of the slot.
        """
