"""Compute the operators other than matrix products and attention, in few calls over all rows.

Every number equals that of the plain operators bit for bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.kv_cache import head_major
from mie.ops_cpu.workers import Workers

PIECE_BYTES = 1 << 20
"""Maximum bytes of a result that a thread makes at a time, so that it stays in its cache."""
TABLE_BYTES = 1 << 18
"""Maximum bytes of RoPE's tables that repeat a token's row for each head, to form one long row."""
SILU_WORTH_SHARING = 1 << 17
"""Elements of SiLU's result below which a hand-over takes longer than it saves."""
ROPE_WORTH_SHARING = 1 << 18
"""Elements of queries, keys and values below which a hand-over takes longer than it saves."""


def by_rows(
    work: Callable[..., None], workers: Workers, out: Floats, *others: NDArray[Any]
) -> None:
    """Call work(out, *others) on slices of their rows, which the threads share out.

    The slices are few and large. A thread that waits for the GIL falls asleep, and waking it takes
    as long as some 20,000 elements.
    """
    num_pieces = ceil_div(out.nbytes, workers.num_threads * PIECE_BYTES) * workers.num_threads
    size = ceil_div(len(out), num_pieces)

    def work_on(start: int) -> None:
        rows = slice(start, start + size)
        work(out[rows], *(other[rows] for other in others))

    workers.share(work_on, range(0, len(out), size))


class Rotation:
    """Applies RoPE and writes keys and values, with the tables that all layers of a step share.

    It keeps a reference to the cache of the last step.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._positions: Ints | None = None
        self._slots: dict[int, tuple[StepBatch, Ints]] = {}  # by group of layers
        self._tables: dict[int, tuple[Floats, Floats, Floats]] = {}
        self._cache: Floats | None = None

    def write(
        self, qkv: Floats, rope_table: Floats, cache: Floats, layer: int, batch: StepBatch
    ) -> Floats:
        """Apply `ops.rope.rope` to q and k in place, and write keys and values to the cache.

        Return q as a view.
        """
        if self._cache is not cache:
            self._open(cache)
        if self._positions is not batch.positions:  # the groups of a step share them
            self._positions, self._tables = batch.positions, {}
        of, slots = self._slots.get(batch.group, (None, None))
        if slots is None or of is not batch:
            slots = batch.slot_mapping[:, None] + self._heads
            self._slots[batch.group] = batch, slots
        if id(rope_table) not in self._tables:  # layers of one type share a table
            self._tables[id(rope_table)] = self._prepared(rope_table, batch, qkv.shape[1])
        _, cos, sin = self._tables[id(rope_table)]
        arrays = qkv, cos, sin, slots
        if qkv.size < ROPE_WORTH_SHARING:
            self._rotate(self._layers[layer], *arrays)
        else:
            by_rows(partial(self._rotate, self._layers[layer]), self._workers, *arrays)
        return qkv[:, : -2 * self._num_kv_heads]

    def _rotate(
        self, rows: NDArray[np.void], qkv: Floats, cos: Floats, sin: Floats, slots: Ints
    ) -> None:
        rotated = qkv[:, : -self._num_kv_heads]
        turned = qkv.view(self._half).take(self._turns[: len(qkv)]).view(qkv.dtype)
        turned *= sin  # Half of sin is negative, so this subtracts as `rope` does.
        rotated *= cos
        rotated += turned
        rows[slots] = qkv.view(self._row)[:, -2 * self._num_kv_heads :, 0]

    def _open(self, cache: Floats) -> None:
        num_layers, num_heads, head_dim = cache.shape[0], cache.shape[-2], cache.shape[-1]
        # NumPy moves a head's row, or half of it, in one go if it is one item.
        self._row = np.dtype((np.void, head_dim * cache.itemsize))
        self._half = np.dtype((np.void, head_dim // 2 * cache.itemsize))
        memory = head_major(cache).reshape(num_layers, -1, head_dim)
        layers: NDArray[np.void] = memory.view(self._row)[..., 0]
        self._layers = list(layers)
        # The rows of a layer are those of the keys' heads, and then those of the values' heads.
        self._heads = np.arange(2 * num_heads) * (cache.shape[2] * cache.shape[3])
        self._num_kv_heads = num_heads
        self._turns = np.empty((0, 0, 2), np.int64)
        self._cache, self._positions, self._slots = cache, None, {}

    def _prepared(
        self, rope_table: Floats, batch: StepBatch, num_heads: int
    ) -> tuple[Floats, Floats, Floats]:
        """Return the table, and its cosines and sines for the tokens."""
        num_rotated = num_heads - self._num_kv_heads
        cos_sin = rope_table.take(batch.positions, 0)
        num_tokens, _, half = cos_sin.shape
        is_small = cos_sin.nbytes * 2 * num_rotated <= TABLE_BYTES
        shape = 2, num_tokens, num_rotated if is_small else 1
        tables = np.empty((*shape, 2 * half), cos_sin.dtype)
        halves = tables.reshape(*shape, 2, half)
        halves[...] = cos_sin.swapaxes(0, 1)[:, :, None, None]
        np.negative(halves[1, :, :, 0], out=halves[1, :, :, 0])
        if len(self._turns) < num_tokens:
            # `take` swaps a head's halves in half the time of a view with a negative stride.
            halves = np.arange(2 * num_rotated).reshape(num_rotated, 2)[:, ::-1]
            self._turns = halves + 2 * num_heads * np.arange(num_tokens)[:, None, None]
        return rope_table, tables[0], tables[1]


def silu_mul(gate_up: Floats, workers: Workers) -> Floats:
    """Compute `ops.activation.silu_mul`, with the rows shared out among the threads."""
    y: Floats = np.empty((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
    if y.size < SILU_WORTH_SHARING:
        silu_mul_into(y, gate_up)
    else:
        by_rows(silu_mul_into, workers, y, gate_up)
    return y


# exp overflows to inf below about -88 in float32. The quotient is then the limit, -0.
@np.errstate(over="ignore")
def silu_mul_into(y: Floats, gate_up: Floats) -> None:
    """Write the result for gate_up [T, 2 F] to y [T, F]."""
    width = y.shape[1]
    gate = gate_up[:, :width]
    np.negative(gate, out=y)
    np.exp(y, out=y)
    y += 1.0
    np.divide(gate, y, out=y)
    y *= gate_up[:, width:]
