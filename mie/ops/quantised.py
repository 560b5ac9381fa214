"""Define matrices of small numbers in groups, and their exact float32 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats

Codes = Literal["int4", "int8", "float8_e4m3fn"]

GROUPS = (16, 32, 64, 128)
"""Inputs that may share a scale."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a matrix keeps its weights: the type of a code, and the inputs that share a scale."""

    codes: Codes
    group: int
    has_offsets: bool

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix with float32 scales. Its last group may be short."""
        groups = ceil_div(columns, self.group)
        code_bytes = self.group // 2 if self.codes == "int4" else self.group
        return rows * groups * (code_bytes + (8 if self.has_offsets else 4))


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedRows:
    """Whole rows of a matrix [N, K], where G = ceil(K / group):

        w[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group]

    Products and sums are float32, each rounded once. With offsets, every product must be exact, so
    that a fused multiply-add gives the same weights. Codes of "int4" are -8 … 7 without offsets and
    0 … 15 with them.
    """

    form: Form
    codes: NDArray[Any]  # [n, K], int8 or float8_e4m3fn
    scales: Floats  # [n, G], float32
    offsets: Floats | None = None  # [n, G], float32

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and K."""
        rows, columns = self.codes.shape
        return rows, columns


def dequantise(rows: QuantisedRows) -> Floats:
    """Return the weights [n, K] in float32."""
    columns = rows.shape[1]
    scales = np.repeat(rows.scales, rows.form.group, axis=1)[:, :columns]
    weights: Floats = rows.codes.astype(np.float32) * scales
    if rows.offsets is not None:
        weights += np.repeat(rows.offsets, rows.form.group, axis=1)[:, :columns]
    return weights
