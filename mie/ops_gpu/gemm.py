"""The matrix product, the one operator that is not a kernel of ours: a seam with two sides."""

from typing import Any, Protocol

import numpy as np

from mie.ops.backend import Array


class Gemm(Protocol):
    """Multiplies matrices; sums are float32 whatever the dtype of the elements is."""

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
    ) -> None:
        """out = x @ weight.T + bias + residual.

        x [T, K], weight [N, K] as checkpoints store it, bias [N], residual and out [T, N], which
        may be the same array.
        """


class NumpyGemm:
    """The product of the emulator. It rounds to the elements' dtype once, at the end."""

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
    ) -> None:
        y = x.astype(np.float32, copy=False) @ weight.astype(np.float32, copy=False).T
        if bias is not None:
            y += bias.astype(np.float32, copy=False)
        if residual is not None:
            y += residual.astype(np.float32, copy=False)
        with np.errstate(over="ignore"):  # a float16 that overflows is infinite, as on the device
            out[...] = y


class CupyGemm:
    """The product through CuPy, hence cuBLAS with float32 sums.

    CuPy does not allow this inside a stream capture; graphs will need cuBLAS called directly.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, residual: Array | None, out: Array
    ) -> None:
        if len(x) == 0:
            return
        # The residual may lie where the result goes: it must be read before that is written.
        y = self._xp.matmul(x, weight.T, out=out if residual is None else None)
        if bias is not None:
            y += bias
        if residual is not None:
            self._xp.add(y, residual, out=out)
