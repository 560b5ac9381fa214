"""The time of a step by its number of rows, for each backend and kind of activations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mie.speculate.rule import RowCosts

_JIT = (1, 1.13, 1.35, 1.57, 1.8, 2.05, 2.28, 2.5, 2.8, 3.03, 3.26, 3.5, 3.75, 4, 4.25, 4.5, 4.75)
"""Between the weights and CPUs of the table "The cost of a few rows" in docs/jit.md."""
_JIT_INT8 = (1, 1.04, 1.11, 1.19, 1.26, 1.35, 1.43, 1.52, 1.61, 1.71, 1.81, 1.9, 2.08, 2.2, 2.3)
"""With ``activations="int8"``. Weights of 4 bits, measured as in docs/speculation.md."""
_NUMPY = (1, 1.6, 1.8, 2, 2.2, 2.4, 2.6, 2.8, 3)
_GPU = (1, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.1, 1.13)

COSTS: Mapping[str, RowCosts] = MappingProxyType(
    {
        "jit": RowCosts(_JIT),
        "jit int8": RowCosts(_JIT_INT8),
        "numpy": RowCosts(_NUMPY),
        "cupy": RowCosts(_GPU),
        "cupy-emulated": RowCosts(_GPU),
    }
)


def costs_of(backend: str, activations: str) -> RowCosts:
    """Return the costs of a backend's steps. A backend of others costs as much as ``jit``."""
    return COSTS.get(f"{backend} {activations}") or COSTS.get(backend) or COSTS["jit"]
