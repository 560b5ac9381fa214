"""Multiply matrices, which is the one operator without a kernel of our own."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.backend import Array
from mie.ops_gpu.arrays import block_threads, kernel_type
from mie.ops_gpu.cublas import Cublas
from mie.ops_gpu.launcher import Launcher
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


class CublasGemm:
    """The product by cuBLAS.

    ``out`` holds the addend beforehand: the residual, the bias, or both (then their sum is rounded
    once more).
    """

    def __init__(self, launcher: Launcher, cublas: Cublas) -> None:
        self._launcher = launcher
        self._cublas = cublas

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
    ) -> None:
        assert residual is None or residual is out
        if bias is not None:
            self._add_bias(bias, out, has_residual=residual is not None)
        is_added = bias is not None or residual is not None
        self._cublas.multiply(x, weight, out, is_added=is_added)

    def _add_bias(self, bias: Array, out: Array, *, has_residual: bool) -> None:
        num_tokens, width = out.shape
        threads = block_threads(width)
        kernel = self._launcher.kernel("add_bias.cu", f"add_bias<{kernel_type(out)}>")
        kernel(
            (num_tokens, ceil_div(width, threads)),
            (threads,),
            (bias, out, np.int32(width), np.int32(has_residual)),
        )
