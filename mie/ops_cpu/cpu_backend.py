"""Implement the Backend contract for fast CPU inference on NumPy arrays."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.errors import ConfigError
from mie.ops import sampling
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops.kv_cache import HALVES, LARGEST, Cache, QuantizedCache
from mie.ops.linear import check_kept
from mie.ops.numpy_backend import NumpyBackend
from mie.ops.packed import PackedMatrix
from mie.ops.quantised import Form, Part, QuantisedRows, Rows, only_floats
from mie.ops.sampling import RowControls
from mie.ops_cpu import elementwise, kv_cache
from mie.ops_cpu.attention import Attention
from mie.ops_cpu.blas import Blas
from mie.ops_cpu.embedding import Embedding
from mie.ops_cpu.linear import Matrix, PackedTiles, PlainMatrix, TiledMatrix
from mie.ops_cpu.products import Groups
from mie.ops_cpu.weights import widened
from mie.ops_cpu.workers import Workers
from mie.system.resources import available_cpus

ROW_WORTH_SHARING = 1 << 14
"""Logits of the shortest rows that threads share.

NumPy's calls for shorter rows are so short that threads wait for each other's GIL. For rows of
2,048 and 8,192 logits, two threads took 1.1 to 1.3 times as long as one.
"""
ROWS_DRAWN = 4
"""Rows that a thread samples at a time."""


class CpuBackend(NumpyBackend):
    """`NumpyBackend` with threads, and with faster forms of the expensive operators.

    The dtype is "float32" (also "auto") or "float64". ``num_threads`` defaults to one thread for
    each CPU that it may run on.

    ``linear_plan`` is how matrices are kept: "plain", "tiled", or "auto". "auto" is "tiled" if the
    BLAS has small-matrix kernels for this CPU, if weights have 16 bits, or with
    ``batch_invariant``. Else it is "plain". ``weight_dtype`` "bfloat16" or "float16" keeps matrices
    of that dtype as they are, in tiles, while "auto" widens them at load, and so does "float32" if
    that is the dtype.

    ``batch_invariant`` makes a request's result independent of the rest of the batch, of the number
    of threads and of the process, bit for bit. No choice reads a clock.
    """

    name = "numpy"

    def __init__(
        self,
        dtype: str = "auto",
        *,
        num_threads: int | None = None,
        kv_cache_dtype: str = "auto",
        linear_plan: str = "auto",
        weight_dtype: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(dtype, kv_cache_dtype=kv_cache_dtype)
        if weight_dtype == "float32":
            if self.dtype == np.float64:
                raise ConfigError(
                    "weight_dtype 'float32' contradicts dtype 'float64' (leave one out)"
                )
            weight_dtype = "auto"
        self._has_scales = self.kv_dtype in LARGEST
        if batch_invariant and (linear_plan == "plain" or self._has_scales):
            raise ConfigError(
                f"batch_invariant=True needs linear_plan 'tiled' or 'auto' and kv_cache_dtype "
                f"'auto' on the {self.name} backend; got {linear_plan!r} and {kv_cache_dtype!r}"
            )
        self.workers = Workers(num_threads or available_cpus())
        self.blas = Blas()
        self.is_batch_invariant = batch_invariant
        """Whether a request's result is independent of the rest of the batch, bit for bit."""
        if linear_plan == "auto":
            needs_tiles = batch_invariant or weight_dtype != "auto"
            linear_plan = "tiled" if needs_tiles or self.blas.has_small_products else "plain"
        self.linear_plan = linear_plan
        """How matrices are kept: "plain" or "tiled"."""
        self._weight_dtype = weight_dtype
        self._groups = Groups(self.dtype)
        self._turned_groups = Groups(self.dtype, is_turned=True)
        self._attention = Attention(self.workers, is_batch_invariant=batch_invariant)
        self._rotation = elementwise.Rotation(self.workers)

    def numerics(self) -> dict[str, str | int]:
        facts = super().numerics() | {
            "kernels": self.blas.core,
            "linear_plan": self.linear_plan,
            "weight_dtype": self.stored_dtype.name,
            "batch_invariant": self.is_batch_invariant,
        }
        # Without invariance, each thread's columns of a plain product are a product of their own.
        return (
            facts if self.is_batch_invariant else {**facts, "num_threads": self.workers.num_threads}
        )

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        if form is not None:
            return super().weight_bytes(shape, form)
        is_kept = len(shape) == 2 and self._weight_dtype != "auto"
        return math.prod(shape) * (2 if is_kept else self.dtype.itemsize)

    def load_embedding(  # type: ignore[override]  # an opaque weight is a backend's own
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> Embedding | PackedMatrix:
        if form is not None:
            return self._packed(shape, blocks, [(shape[0], form)])
        return Embedding(shape, only_floats(blocks), self.dtype, self._weight_dtype)

    def load_linear(  # type: ignore[override]  # as above
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> Matrix:
        if any(form is not None for _, form in parts):
            return self._tiled(self._packed(shape, blocks, parts), bias)
        blocks = only_floats(blocks)
        if self.linear_plan == "plain":
            return PlainMatrix.load(shape, blocks, bias, self.dtype, self.workers)
        return TiledMatrix.load(shape, blocks, bias, self._groups, self.workers, self._weight_dtype)

    def _packed(
        self, shape: tuple[int, int], blocks: Iterable[Rows], parts: Sequence[Part]
    ) -> PackedMatrix:
        if self._weight_dtype in HALVES:
            blocks = (
                block if isinstance(block, QuantisedRows) else check_kept(block, self._weight_dtype)
                for block in blocks
            )
        return PackedMatrix(shape, blocks, parts, HALVES.get(self._weight_dtype, self.dtype))

    def _tiled(self, matrix: PackedMatrix, bias: NDArray[Any] | None = None) -> Matrix:
        tiles = PackedTiles(matrix)
        return TiledMatrix(tiles, matrix.shape[0], bias, self._turned_groups, self.workers)

    def tie_linear(self, embedding: Embedding | PackedMatrix) -> Matrix:  # type: ignore[override]  # as above
        if isinstance(embedding, PackedMatrix):
            return self._tiled(embedding)
        if self.linear_plan == "plain":
            return PlainMatrix(embedding.rows.T, None, self.workers)
        num_outputs = embedding.shape[0]
        return TiledMatrix(embedding.as_tiles(), num_outputs, None, self._groups, self.workers)

    def embed(  # type: ignore[override]  # as above
        self, token_ids: Ints, embedding: Embedding | PackedMatrix, scale: float = 1.0
    ) -> Floats:
        rows = widened(embedding.take(token_ids), self.dtype)
        return rows if scale == 1 else rows * self.dtype.type(scale)

    def linear(self, x: Floats, weight: Matrix, residual: Floats | None = None) -> Floats:  # type: ignore[override]  # as above
        return weight.apply(x, residual)

    def new_kv_cache(self, shape: KVCacheShape) -> Cache:
        if self._has_scales:
            return super().new_kv_cache(shape)
        cache = kv_cache.new_cache(shape, self.kv_dtype)
        return cache if self.kv_dtype == self.dtype else QuantizedCache(cache, None)

    def rope_write_kv(
        self, qkv: Floats, rope_table: Floats, cache: Cache, layer: int, batch: StepBatch
    ) -> Floats:
        if not isinstance(cache, np.ndarray):
            return super().rope_write_kv(qkv, rope_table, cache, layer, batch)
        return self._rotation.write(qkv, rope_table, cache, layer, batch)

    def paged_attention(
        self,
        q: Floats,
        cache: Cache,
        layer: int,
        batch: StepBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Floats | None = None,
    ) -> Floats:
        if self._has_scales:
            return super().paged_attention(q, cache, layer, batch, window, soft_cap, sinks)
        memory = cache.elements if isinstance(cache, QuantizedCache) else cache
        return self._attention(q, memory, layer, batch, window, soft_cap, sinks)

    def silu_mul(self, gate_up: Floats) -> Floats:
        return elementwise.silu_mul(gate_up, self.workers)

    def sample(self, logits: Floats, rows: Sequence[RowControls]) -> list[int]:
        """Share long rows out among the threads."""
        if logits.shape[1] < ROW_WORTH_SHARING or not any(row.temperature for row in rows):
            return super().sample(logits, rows)
        token_ids = [0] * len(rows)

        def work(start: int) -> None:
            some = slice(start, start + ROWS_DRAWN)
            token_ids[some] = sampling.sample(logits[some], rows[some])

        self.workers.share(work, range(0, len(rows), ROWS_DRAWN))
        return token_ids

    def run_step(self, forward: Callable[[StepBatch], Floats], batch: StepBatch) -> Floats:
        """Run a step with a single-threaded BLAS, because the threads of mie share the work."""
        with self.blas.threads(1):
            try:
                return super().run_step(forward, batch)
            finally:
                self._attention.forget()
