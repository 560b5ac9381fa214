"""Define the sizes of attention's products, and the constants that they follow from.

docs/cpu-attention.md says where the constants were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.samples import samples

TILE = 128
"""Positions of a tile, unless blocks or `MAX_UNPACKED_SCORES` need another size."""
MAX_UNPACKED_SCORES = 1200
"""Scores of a product up to which OpenBLAS's small-matrix kernels multiply by keys in place."""
SPLIT_SCORES = 1 << 17
"""Scores of a split, over all KV heads. As float32 they take half of a core's L2."""
SPLIT_TILES = 32
"""Maximum number of tiles of a split, so that threads can share the keys of one long sequence."""
MAX_SINGLE_ROWS = 3
"""Query heads of a KV head up to which products of one row pay where small products are packed."""
LEAST_SINGLE_DIM = 64
"""Head size from which they pay. With smaller heads, prefills would take longer."""
FAST_ROWS = 64
"""Rows of a prefill's product where it need not equal a decode's bit for bit."""
PARTIAL_SUMS = 8
"""Parts in which NumPy sums a row. Padding it with a multiple of this many zeros is exact."""


class Form(NamedTuple):
    """The form of an item's products."""

    num_rows: int
    rows_per_query: int
    """Rows of a product for each query, of which the last may be padding."""
    transposes: bool
    """Whether keys are transposed first, which makes the products faster."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that all products of a model's attention share."""

    num_kv_heads: int
    heads_per_kv: int
    """Number of query heads that share a KV head."""
    head_dim: int
    block_size: int
    dtype: np.dtype[Any]

    @cached_property
    def num_rows(self) -> int:
        """The rows of a product: a KV head's query heads, rounded up to what kernels compute."""
        multiple = 4 if self.heads_per_kv <= 4 else 8
        return ceil_div(self.heads_per_kv, multiple) * multiple

    @cached_property
    def tile(self) -> int:
        """The number of positions of a tile, which is whole blocks."""
        wanted = TILE if self.num_rows * TILE <= MAX_UNPACKED_SCORES else TILE // 2
        return self.block_size * max(1, wanted // self.block_size)

    @cached_property
    def tiles_per_split(self) -> int:
        """The number of tiles of a split."""
        fitting = SPLIT_SCORES // (self.num_kv_heads * self.num_rows * self.tile)
        return max(1, min(fitting, SPLIT_TILES))

    @cached_property
    def width_step(self) -> int:
        """The number of positions that a shortened tile is a multiple of."""
        return math.lcm(self.block_size, PARTIAL_SUMS)

    @cached_property
    def decode_form(self) -> Form:
        """The form of a decode, without padding if that costs nothing."""
        if self.has_single_rows:
            return Form(1, self.heads_per_kv, transposes=False)
        num_rows = max(2, self.heads_per_kv)
        if not self.padding_is_exact:
            num_rows = self.num_rows
        return Form(num_rows, num_rows, transposes=False)

    @cached_property
    def prefill_form(self) -> Form:
        """The form of a prefill that gives a query the bits of a decode.

        What is padding in a decode's product holds other queries, if that changes no bit.
        """
        if self.has_single_rows:
            return self.decode_form
        rows_per_query = self.heads_per_kv if self.rows_are_alike else self.num_rows
        return Form(self.num_rows, rows_per_query, transposes=False)

    @cached_property
    def has_single_rows(self) -> bool:
        """Whether each product has one row, because those of more rows are packed.

        OpenBLAS packs small products too if it has no kernels for them, as for AVX2. Packed
        products of 3 rows give other bits than those of 4.
        """
        may_pay = self.heads_per_kv <= MAX_SINGLE_ROWS and self.head_dim >= LEAST_SINGLE_DIM
        return may_pay and not self._is_exact_without_others(3)

    @cached_property
    def padding_is_exact(self) -> bool:
        """Whether a KV head's query heads give the same bits without further rows.

        Kernels for AVX-512 compute them so, and as fast. Others take longer for an odd number.
        """
        return self._is_exact_without_others(max(2, self.heads_per_kv))

    def _is_exact_without_others(self, few: int) -> bool:
        """Return whether the first few rows of a product give the same bits alone."""
        queries, keys = self._samples()
        weights = np.exp(queries @ keys.T)
        same_scores = queries[:few] @ keys.T == (queries @ keys.T)[:few]
        same_sums = weights[:few] @ keys == (weights @ keys)[:few]
        return bool(same_scores.all() and same_sums.all())

    @cached_property
    def short_tiles_are_exact(self) -> bool:
        """Whether a tile's first positions give the same bits as all, if other weights are 0."""
        forms = self.decode_form, self.prefill_form
        return all(map(self._are_short_tiles_exact, {form.num_rows for form in forms}))

    def _are_short_tiles_exact(self, num_rows: int) -> bool:
        queries, keys = self._samples()
        scores = queries[:num_rows] @ keys.T
        for width in range(self.width_step, self.tile, self.width_step):
            weights = np.exp(scores)
            weights[:, width:] = 0
            first, read = weights[:, :width], keys[:width]
            same_scores = (queries[:num_rows] @ read.T == scores[:, :width]).all()
            same_sums = (first.sum(-1) == weights.sum(-1)).all()
            if not (same_scores and same_sums and (first @ read == weights @ keys).all()):
                return False
        return True

    @cached_property
    def short_sums_are_exact(self) -> bool:
        """Whether a decode's products need no values whose weight is 0 at the end of a tile."""
        queries, keys = self._samples()
        weights = np.exp(queries[: self.decode_form.num_rows] @ keys.T)
        for filled in range(self.tile - 1, 0, -1):
            weights[:, filled:] = 0
            if (weights[:, :filled] @ keys[:filled] != weights @ keys).any():
                return False
        return True

    @cached_property
    def rows_are_alike(self) -> bool:
        """Whether a query gives the same bits in each row of a product."""
        queries, keys = self._samples()
        for left, right in ((queries, keys.T), (np.exp(queries @ keys.T), keys)):
            product = left @ right
            for by in range(1, self.num_rows):
                if (np.roll(left, by, 0) @ right != np.roll(product, by, 0)).any():
                    return False
        return True

    def _samples(self) -> tuple[Floats, Floats]:
        """Return scaled queries and keys of one product."""
        numbers = samples(self.num_rows + self.tile, self.head_dim).astype(self.dtype)
        return numbers[: self.num_rows] * self.head_dim**-0.5, numbers[self.num_rows :]
