"""The time of a step by its number of rows, for each backend."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mie.speculate.rule import RowCosts

_JIT = (1, 1.12, 1.38, 1.63, 1.89, 2.06, 2.23, 2.4, 3.65, 3.73, 3.8, 3.9, 4.0, 4.1, 4.2, 4.3, 4.57)
"""Measured with SmolLM2 135M (Q4_1) on two threads. A step of 9 rows needs a second tile."""
_NUMPY = (1, 1.6, 1.8, 2, 2.2, 2.4, 2.6, 2.8, 3)
_GPU = (1, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.1, 1.13)

COSTS: Mapping[str, RowCosts] = MappingProxyType(
    {
        "jit": RowCosts(_JIT),
        "numpy": RowCosts(_NUMPY),
        "cupy": RowCosts(_GPU),
        "cupy-emulated": RowCosts(_GPU),
    }
)
