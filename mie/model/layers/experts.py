"""Load the experts of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mie.model.weights import Loader


def load_experts(loader: Loader, prefix: str) -> Any:
    """Load the experts of a layer and their router."""
    experts, names = loader.config.experts, loader.config.names
    assert experts is not None
    # A matrix may have the rows of gate and up in turns.
    rows = np.arange(2 * experts.size)
    order = rows.reshape(-1, 2).T.ravel() if names.experts_take_turns else None
    gate_up, down, bias = [], [], None
    if names.router_bias is not None:
        bias = np.zeros(experts.number)
        if experts.has_router_bias:
            bias = loader.read(prefix + names.router_bias)
    for expert in range(experts.number):
        own = [(name.format(expert), order) for name in names.expert_gate_up]
        gate_up.append(loader.selected(prefix, own))
        down.append(loader.linear(prefix, names.expert_down.format(expert)))
    return loader.backend.experts.load(
        router=loader.linear(prefix, names.router),
        gate_up=gate_up,
        down=down,
        number=experts.number,
        num_chosen=experts.num_chosen,
        is_normalised=experts.is_normalised,
        activation=experts.activation,
        bias=None if bias is None else loader.backend.load_vector(bias),
    )
