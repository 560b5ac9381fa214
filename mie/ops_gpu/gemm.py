"""Multiply matrices, the only operator without a kernel of our own."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from mie.ops.backend import Array
from mie.ops_gpu.queue import Task


class Gemm(Protocol):
    """Multiplies matrices. Sums are float32 for every element dtype."""

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, out: Array, first: int, *, is_added: bool
    ) -> None:
        """Compute x @ weight.T + bias, plus what is there if ``is_added``.

        x [T, K], weight [N, K] as checkpoints store it, bias [N], out [T, M]: its N columns from
        ``first`` on are written.
        """


class NumpyGemm:
    """The product of the emulator. It rounds to the elements' dtype once, at the end."""

    def __init__(self, submit: Callable[[Task], None] = lambda task: task()) -> None:
        """Set ``submit``. It runs a product now or later (`EmulatedQueue.submit`)."""
        self._submit = submit

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, out: Array, first: int, *, is_added: bool
    ) -> None:
        part = out[:, first : first + len(weight)]
        self._submit(lambda: _multiply(x, weight, bias, part, is_added=is_added))


def _multiply(x: Array, weight: Array, bias: Array | None, out: Array, *, is_added: bool) -> None:
    y = x.astype(np.float32, copy=False) @ weight.astype(np.float32, copy=False).T
    if bias is not None:
        y += bias.astype(np.float32, copy=False)
    if is_added:
        y += out.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):  # a float16 that overflows is infinite, as on the device
        out[...] = y
