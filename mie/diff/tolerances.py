"""How far two backends may lie apart: one table, with its reasons.

The numbers bound what builds up: B computes each operator from its own earlier results, through all
layers. They are for the largest difference of a result over its largest magnitude: ten times what
the bundled model and random models of every family show between NumPy and the emulated kernels in
float32, and about three times that in 16 bits. What one operator alone may be off by, from equal
inputs, is a narrower matter: tests/parity/test_backend_contract.py.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mie.diff.measure import coarser


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits of the relative difference, for each class of operators."""

    embed: float
    """Rows of the embedding: each side rounds it once at most."""
    layers: float
    """Norms, products, rotations, and rows that are taken: sums that carry on what came before."""
    gates: float
    """`paged_attention` and `silu_mul`: exponentials, in which an absolute error of the score is a
    relative one of the result."""
    logits: float
    """The head, and what the step returns."""
    reason: str


TOLERANCES = MappingProxyType(
    {
        "float64": Tolerance(
            embed=2.5e-16,
            layers=4e-14,
            gates=8e-14,
            logits=4e-14,
            reason=(
                "The numbers of float32, less 29 bits of mantissa. Sums in another order are all "
                "that sets two float64 sides apart."
            ),
        ),
        "float32": Tolerance(
            embed=1.2e-7,
            layers=2e-5,
            gates=4e-5,
            logits=2e-5,
            reason=(
                "A rounding is 6e-8. Seen were up to 2e-6 in sums and logits and 4e-6 in attention "
                "and gates, after two to four layers; ten times that leaves room for deeper "
                "models, whose errors grow about as the root of the depth. A sum kept in 16 bits, "
                "or in TF32, is off by 1e-4 and more."
            ),
        ),
        "float16": Tolerance(
            embed=1e-3,
            layers=2e-2,
            gates=4e-2,
            logits=2e-2,
            reason=(
                "A rounding is 5e-4, and every operator rounds its result. Seen were up to 7e-3 in "
                "sums and logits and 1.3e-2 in attention and gates, on random weights; the bundled "
                "model stays below a half of that."
            ),
        ),
        "bfloat16": Tolerance(
            embed=8e-3,
            layers=0.12,
            gates=0.25,
            logits=0.2,
            reason=(
                "A rounding is 4e-3, eight times float16's. Seen were up to 5e-2 in sums, 7e-2 in "
                "attention, gates and logits, on random weights. This finds gross faults only: to "
                "check a kernel, compare it in float32 or float16."
            ),
        ),
    }
)
"""By the coarser dtype of the two: its rounding is what sets them apart."""

CLASSES = MappingProxyType(
    {
        "embed": "embed",
        "paged_attention": "gates",
        "silu_mul": "gates",
        "head": "logits",
        "logits": "logits",
    }
)
"""The class of an operator; of all others it is ``layers``."""


def tolerance_of(a: np.dtype[Any], b: np.dtype[Any]) -> Tolerance:
    """The row of the table for results in these dtypes."""
    return TOLERANCES[coarser(a, b).name]


def limit_of(a: np.dtype[Any], b: np.dtype[Any], operator: str) -> float:
    """What the relative difference of an operator's results may be."""
    limit: float = getattr(tolerance_of(a, b), CLASSES.get(operator, "layers"))
    return limit
