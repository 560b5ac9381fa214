"""Give the matrices of attention and MLPs slots for adapters, and fill the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.model.config import ModelConfig
from mie.ops.adapters.low_rank import AdapterOperators, LowRank, SlotShape
from mie.ops.backend import Array

Order = NDArray[np.intp]
"""Rows of a matrix, in an order."""


def adapted_matrices(config: ModelConfig) -> list[tuple[str, ...]]:
    """Return the names of the tensors of each matrix that adapters can change.

    These are the matrices of attention and of MLPs, also of an MLP beside experts.
    """
    matrices = []
    for layer, is_recurrent in enumerate(config.layers_recurrent):
        names, own = config.names_of(layer), []
        if not is_recurrent:
            own += [names.qkv, (names.attention_out,)]
            if config.gates_attention:
                own.append(names.qkv[:1])
        if config.has_mlp(layer):
            own += [names.gate_up, (names.down,)]
        matrices += [tuple(f"model.layers.{layer}.{name}.weight" for name in each) for each in own]
    return matrices


@dataclass(frozen=True, kw_only=True, eq=False)
class _Matrix:
    """A loaded matrix with slots, and the rows that it takes of each tensor. None: all rows."""

    weight: Array
    parts: Sequence[tuple[str, Order | None]]


class AdapterSlots:
    """The slots of all matrices of a decoder."""

    def __init__(self, operators: Any, config: ModelConfig, num_slots: int, max_rank: int) -> None:
        """``operators`` are the `AdapterOperators` of the backend that loads the decoder."""
        self._operators: AdapterOperators = operators
        self._names = {name for matrix in adapted_matrices(config) for name in matrix}
        self._num_slots, self._max_rank = num_slots, max_rank
        self._matrices: list[_Matrix] = []

    def with_slots(
        self,
        weight: Array,
        num_inputs: int,
        parts: Sequence[tuple[str, Order | None]],
        counts: Sequence[int],
    ) -> Array:
        """Return a loaded matrix with slots, if adapters can change it.

        ``parts`` are the tensors of the matrix and the rows that it takes of each, and ``counts``
        the numbers of these rows.
        """
        if not self._names.issuperset(name for name, _ in parts):
            return weight
        shape = SlotShape(
            num_inputs=num_inputs,
            counts=tuple(counts),
            num_slots=self._num_slots,
            max_rank=self._max_rank,
        )
        weight = self._operators.with_slots(weight, shape)
        self._matrices.append(_Matrix(weight=weight, parts=parts))
        return weight

    def put(self, slot: int, changes: Mapping[str, LowRank]) -> None:
        """Fill a slot with an adapter's changes by tensor. No running step may use the slot."""
        for matrix in self._matrices:
            own = [_ordered(changes.get(name), order) for name, order in matrix.parts]
            self._operators.put(matrix.weight, slot, own)


def _ordered(change: LowRank | None, order: Order | None) -> LowRank | None:
    """Return the change of the rows that a matrix takes of a tensor."""
    if change is None or order is None:
        return change
    return LowRank(a=change.a, b=change.b[order], scale=change.scale)
