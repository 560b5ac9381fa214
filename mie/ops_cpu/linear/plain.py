"""Implement the plan `plain`: a matrix [K, N] as it is, whose columns the threads share out.

BLAS could share them out itself. But its threads would then spin for tens of milliseconds while
they wait for more work, on the CPUs that the next operators need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator, WeightAllocator
from mie.ops_cpu.linear.matrix import work_bytes
from mie.ops_cpu.threads.workers import Workers

BYTES_PER_THREAD = 5 << 18
"""Bytes of weights from which on another thread saves more than its hand-over costs.

It is not learned as for `tiled`, because the number of threads may change how a row is rounded.
"""


class PlainMatrix:
    """Weights [K, N] and a bias [N]."""

    def __init__(self, plan: PlainPlan, weight: Floats, bias: Floats | None) -> None:
        self._plan = plan
        self.weight = weight
        self.bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def apply(self, x: Floats, residual: Floats | None, *, is_brief: bool = False) -> Floats:
        """Compute `ops.linear.linear`. The result always lasts."""
        return self._plan.apply(x, self, residual)


class PlainPlan:
    """Computes one product for each thread.

    The number of rows selects the BLAS kernel, and so how a row is rounded.
    """

    name = "plain"

    def __init__(
        self,
        dtype: np.dtype[Any],
        workers: Workers,
        bytes_per_thread: int = BYTES_PER_THREAD,
        allocator: CachingAllocator | None = None,
        weights: WeightAllocator | None = None,
    ) -> None:
        self.dtype = dtype
        self._allocator = allocator or CachingAllocator()
        self._weights = weights or WeightAllocator()
        self._workers = workers
        self._bytes_per_thread = bytes_per_thread

    def load(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> PlainMatrix:
        """Load a matrix from the rows of a checkpoint's (N, K), block by block."""
        weight = self._weights.empty(shape[::-1], self.dtype)
        column = 0
        for block in blocks:
            weight[:, column : column + len(block)] = block.astype(self.dtype, copy=False).T
            column += len(block)
        return PlainMatrix(self, weight, None if bias is None else bias.astype(self.dtype))

    def apply(self, x: Floats, matrix: PlainMatrix, residual: Floats | None) -> Floats:
        """Compute `ops.linear.linear`."""
        weight, bias = matrix.weight, matrix.bias
        y = self._allocator.empty((len(x), weight.shape[1]), x.dtype)
        num_shares = work_bytes(weight.nbytes, len(x)) // self._bytes_per_thread
        num_parts = self._workers.at_most(num_shares)

        def work(part: int) -> None:
            columns = _share(weight.shape[1], part, num_parts)
            out = np.matmul(x, weight[:, columns], out=y[:, columns])
            if bias is not None:
                out += bias[columns]
            if residual is not None:
                out += residual[:, columns]

        self._workers.run(work, num_parts)
        return y


def _share(num_columns: int, part: int, num_parts: int) -> slice:
    return slice(num_columns * part // num_parts, num_columns * (part + 1) // num_parts)
