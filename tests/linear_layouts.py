"""The layouts of tiles, by name, for the tests that hold for each of them."""

from __future__ import annotations

import pytest

from mie.ops_cpu.linear.kernel import numpy_kernel
from mie.ops_cpu.linear.layout import Layout
from mie.ops_cpu.linear.tiled import TiledPlan

KERNEL = numpy_kernel()
needs_kernel = pytest.mark.skipif(
    KERNEL is None, reason="NumPy's BLAS has no inner kernel that multiplies by packed tiles"
)
PACKED = [pytest.param(name, marks=needs_kernel) for name in ("packed", "packed-invariant")]
TILED = ["tiled", "tiled, 32 wide"]
LAYOUTS = [*TILED, *PACKED]


def layout_of(plan: TiledPlan, name: str, shape: tuple[int, ...]) -> Layout:
    """Return a layout for a matrix (N, K)."""
    if name in ("packed", "packed-invariant"):
        num_outputs, num_inputs = shape
        return plan.packed(num_inputs, num_outputs, is_invariant=name == "packed-invariant")
    return plan.layouts[64 if name == "tiled" else 32]
