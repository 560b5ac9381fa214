"""Launch our own matrix products, for steps of few rows and for results that no batch changes.

With few rows a product waits for its weights, and each launch of a small operator costs as much as
a part of them. These kernels normalise, multiply, and rotate, gate or add in one launch
(kernels/few_rows.cuh). Their order of summation is the same for every number of rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.errors import UnsupportedModelError
from mie.ops.backend import Array, StepBatch
from mie.ops_gpu.arrays import kernel_type
from mie.ops_gpu.launcher import Launcher

MAX_ROWS = 16
"""Most rows of a block. A step of more is cuBLAS's, if its results may depend on the batch."""

PAIRS = 8
"""Pairs of outputs of a block."""

MAX_OUTPUTS = 65_535 * 2 * PAIRS
"""Most outputs of a product: CUDA allows 65,535 blocks in the second direction of a grid."""

MAX_WARPS, STRETCHES = 8, {"float": 16, "f16": 128, "bf16": 128}
"""Most warps of a block, and the elements of K that a warp takes at a time.

For 16-bit rows that are not a multiple of 16 bytes it takes fewer, so some warps have more turns.
"""


def check_outputs(num_outputs: int, backend: str) -> None:
    """Raise `UnsupportedModelError` if a matrix has too many outputs."""
    if num_outputs > MAX_OUTPUTS:
        raise UnsupportedModelError(
            f"a matrix has {num_outputs:,} outputs; the {backend} backend takes up to "
            f"{MAX_OUTPUTS:,} (choose backend numpy)"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """The RMS norm that is applied to the rows before a product."""

    weight: Array  # [K]
    eps: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """Where query, key and value heads go (`rope_write_kv`)."""

    q: Array  # [T, Hq, Dh], written
    kv: Array  # [N, 2, Hkv, B, Dh], written
    rope_table: Array  # [P, 2, Dh / 2]
    batch: StepBatch


class FewRows:
    """Launches the products. Arguments as in the contract's operators, results rounded once."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def linear(
        self,
        x: Array,
        weight: Array,
        out: Array,
        *,
        bias: Array | None = None,
        norm: Norm | None = None,
        is_added: bool = False,
    ) -> None:
        """Compute out = norm(x) @ weight.T + bias, plus the old ``out`` if ``is_added``.

        x [R, K], weight [N, K], bias [N], out [R, N].
        """
        width = np.int32(len(weight))
        self._launch("linear", x, norm, [weight, bias, out], [width, np.int32(is_added)])

    def gated(
        self,
        x: Array,
        weight: Array,
        out: Array,
        *,
        bias: Array | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Compute the gated activation of a product. weight [2 F, K], bias [2 F], out [R, F]."""
        self._launch("gated", x, norm, [weight, bias, out], [np.int32(len(weight) // 2)])

    def heads(
        self, x: Array, weight: Array, to: Heads, *, bias: Array | None, norm: Norm | None
    ) -> None:
        """Compute query, key and value heads, rotate them, and write keys and values."""
        batch, num_heads, head_dim = to.batch, to.q.shape[1], to.q.shape[2]
        places = [to.rope_table, batch.positions, batch.slot_mapping]
        sizes = (num_heads, to.kv.shape[2], head_dim, to.kv.shape[3])
        arrays = [weight, bias, *places, to.q, to.kv]
        self._launch("qkv", x, norm, arrays, [np.int32(size) for size in sizes])

    def _launch(
        self,
        name: str,
        x: Array,
        norm: Norm | None,
        arrays: list[Array | None],
        sizes: list[np.generic],
    ) -> None:
        num_rows, depth = x.shape
        element = kernel_type(x)
        parameters: list[Any] = [element, 1 if num_rows <= 8 else 2]
        parameters += [_word(norm is not None), _word(depth * x.dtype.itemsize % 16 == 0)]
        kernel = self._launcher.kernel(
            "few_rows.cu", f"few_rows_{name}<{', '.join(map(str, parameters))}>"
        )
        weight = arrays[0]
        assert weight is not None
        assert weight.shape[1] == depth
        num_blocks = ceil_div(len(weight), 2 * PAIRS)
        counts = [np.int32(num_rows), np.int32(depth), *sizes]
        eps = np.float32(0 if norm is None else norm.eps)
        args = (x, None if norm is None else norm.weight, *arrays, *counts, eps)
        num_warps = min(MAX_WARPS, ceil_div(depth, STRETCHES[element]))
        kernel((ceil_div(num_rows, MAX_ROWS), num_blocks), (32 * num_warps,), args)


def _word(condition: bool) -> str:
    return "true" if condition else "false"
