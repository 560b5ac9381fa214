"""What stands between the matrix products and the attention of a step, and after them, in few calls
over all its rows. Every number equals that of the plain operators bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mie.ops import sampling
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops.sampling import RowControls
from mie.ops_cpu.attention_cache import head_major, slot_rows
from mie.ops_cpu.workers import Workers

ROWS_BYTES = 1 << 18
"""Of gate and up that a thread takes at a time, so that they stay in its cache."""
WORTH_SHARING = 1 << 16
"""Elements below which a hand-over to other threads takes longer than it saves."""


ROWS_SAMPLED = 4
"""By a thread at a time."""


class Rotation:
    """RoPE and the writing of keys and values, with what all layers of a step share."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._table: Floats | None = None
        self._shape: tuple[int, ...] = ()

    def write(
        self, qkv: Floats, rope_table: Floats, cache: Floats, layer: int, batch: StepBatch
    ) -> Floats:
        """`ops.rope.rope` of q and k; keys and values go to the cache of `attention_cache`."""
        num_kv_heads, head_dim = cache.shape[-2:]
        same = self._batch is batch and self._table is rope_table and self._shape == cache.shape
        if not same:
            self._prepare(rope_table, cache, batch)
        rotated = qkv[:, :-num_kv_heads]
        half = head_dim // 2
        y = rotated * self._cos
        turned = rotated * self._sin
        y[..., :half] -= turned[..., half:]
        y[..., half:] += turned[..., :half]
        rows = head_major(cache).reshape(-1, head_dim)
        stride = cache[0, 0].size // head_dim
        rows[self._rows + 2 * layer * stride] = y[:, -num_kv_heads:]
        rows[self._rows + (2 * layer + 1) * stride] = qkv[:, -num_kv_heads:]
        q: Floats = y[:, :-num_kv_heads]
        return q

    def _prepare(self, rope_table: Floats, cache: Floats, batch: StepBatch) -> None:
        cos_sin = rope_table[batch.positions]
        self._cos: Floats = np.concatenate([cos_sin[:, :1], cos_sin[:, :1]], axis=-1)
        self._sin: Floats = np.concatenate([cos_sin[:, 1:], cos_sin[:, 1:]], axis=-1)
        self._rows: Ints = slot_rows(cache, batch.slot_mapping)
        self._batch, self._table, self._shape = batch, rope_table, cache.shape


def silu_mul(gate_up: Floats, workers: Workers) -> Floats:
    """`ops.activation.silu_mul`, some rows at a time, shared out among the threads."""
    num_rows, width = gate_up.shape
    y = np.empty((num_rows, width // 2), gate_up.dtype)
    size = max(1, ROWS_BYTES // (width * gate_up.itemsize))
    starts = iter(range(0, num_rows, size))

    def work(_: int) -> None:
        # exp overflows to inf below about -88 in float32; the quotient is then the limit, -0.
        with np.errstate(over="ignore"):
            for start in starts:  # each is taken by one thread
                rows = slice(start, start + size)
                gate, up = gate_up[rows, : width // 2], gate_up[rows, width // 2 :]
                part = y[rows]
                np.negative(gate, out=part)
                np.exp(part, out=part)
                part += 1.0
                np.divide(gate, part, out=part)
                part *= up

    if y.size < WORTH_SHARING:
        work(0)
    else:
        workers.run(work)
    return y


def sample(logits: Floats, rows: Sequence[RowControls], workers: Workers) -> list[int]:
    """`ops.sampling.sample`, the rows shared out among the threads."""
    if logits.size < WORTH_SHARING or not any(row.temperature for row in rows):
        return sampling.sample(logits, rows)
    token_ids = [0] * len(rows)
    starts = iter(range(0, len(rows), ROWS_SAMPLED))

    def work(_: int) -> None:
        for start in starts:  # each is taken by one thread
            some = slice(start, start + ROWS_SAMPLED)
            token_ids[some] = sampling.sample(logits[some], rows[some])

    workers.run(work)
    return token_ids
