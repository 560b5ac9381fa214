"""Multiply matrices, which is the one operator without a kernel of our own."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from mie.ops.backend import Array
from mie.ops_gpu.queue import Task


class Gemm(Protocol):
    """Multiplies matrices. Sums are float32 for every element dtype."""

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
    ) -> None:
        """Compute out = x @ weight.T + bias + residual.

        x [T, K], weight [N, K] as checkpoints store it, bias [N], residual and out [T, N]. If there
        is a residual, it is the same array as out.
        """


class NumpyGemm:
    """The product of the emulator. It rounds to the elements' dtype once, at the end."""

    def __init__(self, submit: Callable[[Task], None] = lambda task: task()) -> None:
        """Set ``submit``, which runs a product now or later (`EmulatedQueue.submit`)."""
        self._submit = submit

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
    ) -> None:
        assert residual is None or residual is out
        self._submit(lambda: _multiply(x, weight, bias, residual, out))


def _multiply(
    x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
) -> None:
    y = x.astype(np.float32, copy=False) @ weight.astype(np.float32, copy=False).T
    if bias is not None:
        y += bias.astype(np.float32, copy=False)
    if residual is not None:
        y += residual.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):  # a float16 that overflows is infinite, as on the device
        out[...] = y
