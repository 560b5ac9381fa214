"""Implement the Backend contract for fast CPU inference on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.errors import ConfigError
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import HeadWeights, KVCacheShape, StepBatch
from mie.ops.composed import rotate_heads
from mie.ops.kv_cache import Cache
from mie.ops.numpy_backend import NumpyBackend
from mie.ops.sampling import RowControls
from mie.ops_cpu import elementwise, kv_cache, sampling
from mie.ops_cpu.allocator import CachingAllocator, WeightAllocator
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.crew import Crew
from mie.ops_cpu.embedding import Embedding
from mie.ops_cpu.linear.kernel import numpy_kernel
from mie.ops_cpu.linear.layout import Layout
from mie.ops_cpu.linear.matrix import Matrix
from mie.ops_cpu.linear.plain import PlainMatrix, PlainPlan
from mie.ops_cpu.linear.plan_answers import PLANS_CACHE, PlanAnswers
from mie.ops_cpu.linear.probe import Probe, machine_key
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers
from mie.system.cache_dir import CacheError, open_cache
from mie.system.resources import available_cpus


class CpuBackend(NumpyBackend):
    """`NumpyBackend` with faster plans for the expensive operators.

    The dtype is "float32" (also "auto") or "float64". ``num_threads`` defaults to one thread for
    each CPU that it may run on.

    ``linear_plan`` sets how matrices are kept and multiplied: "plain", "tiled", "packed", or
    "auto". "auto" takes what `Probe` found to be fastest here for each shape. ``weight_dtype``
    "bfloat16" or "float16" keeps matrices of that dtype as they are, in tiles, while "auto" widens
    them at load.
    ``batch_invariant`` True makes a request's result independent of the rest of the batch, bit for
    bit. "auto" does so if every shape's plan allows it.
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
        batch_invariant: bool | str = "auto",
    ) -> None:
        super().__init__(dtype, kv_cache_dtype=kv_cache_dtype)
        if batch_invariant is True and (linear_plan == "plain" or self.kv_dtype != self.dtype):
            raise ConfigError(
                "batch_invariant=True needs linear_plan 'tiled', 'packed' or 'auto' and "
                f"kv_cache_dtype 'auto' on the {self.name} backend; got {linear_plan!r} and "
                f"{kv_cache_dtype!r}"
            )
        self.workers = Workers(num_threads or available_cpus())
        self.blas = Blas()
        self._allocator = allocator = CachingAllocator()
        self.linear_plans: dict[tuple[int, int], str] = {}
        """The plan of every shape (K, N) that was loaded."""
        self.linear_is_batch_invariant = True
        """Whether every matrix was loaded under a plan whose rows do not depend on each other."""
        self.is_batch_invariant = batch_invariant is not False and self.kv_dtype == self.dtype
        """Whether a request's result is independent of the rest of the batch, bit for bit."""
        self._weights = weights = WeightAllocator()
        self._plain = PlainPlan(self.dtype, self.workers, allocator=allocator, weights=weights)
        self._tiled = TiledPlan(
            self.dtype,
            self.workers,
            weight_dtype,
            allocator=allocator,
            weights=weights,
            kernel=numpy_kernel() if self.dtype == np.float32 else None,
        )
        if linear_plan == "packed" and not self._tiled.has_packed:
            raise ConfigError(
                f"linear_plan 'packed' needs dtype float32 and the inner kernel of OpenBLAS; got "
                f"{self.dtype.name} and BLAS {self.blas.version!r} (use 'auto')"
            )
        self._linear_plan = linear_plan
        self._must_be_invariant = batch_invariant is True
        self._weight_dtype = weight_dtype
        self._probe: Probe | None = None
        self.cache_error: str | None = None
        """Why the probe's answers are not remembered, once `find_probe` was called."""
        self._attention = Attention(self.workers, allocator)
        self._rms_norm = elementwise.RmsNorm(self.dtype, allocator)
        self._rotation = elementwise.Rotation(self.workers)
        self._crew = Crew(self.workers, self._tiled, self._attention, allocator)

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        is_kept = len(shape) > 1 and self._weight_dtype != "auto"
        return math.prod(shape) * (2 if is_kept else self.dtype.itemsize)

    def load_embedding(self, shape: tuple[int, int], blocks: Iterable[NDArray[Any]]) -> Embedding:  # type: ignore[override]  # an opaque weight is a backend's own
        return Embedding(shape, blocks, self.dtype, self._weight_dtype, self._weights)

    def load_linear(  # type: ignore[override]  # as above
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> Matrix:
        layout = self._layout_for(shape)
        if layout is None:
            return self._plain.load(shape, blocks, bias)
        return self._tiled.load(shape, blocks, bias, layout)

    def tie_linear(self, embedding: Embedding) -> Matrix:  # type: ignore[override]  # as above
        layout = self._layout_for(embedding.shape)
        if layout is None:
            return PlainMatrix(self._plain, embedding.rows.T, None)
        tiles = embedding.as_tiles(layout)
        return TiledMatrix(self._tiled, layout, tiles, embedding.shape[0], None)

    def embed(self, token_ids: Ints, embedding: Embedding) -> Floats:  # type: ignore[override]  # as above
        return embedding.take(token_ids)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return self._rms_norm(x, weight, eps)

    def linear(self, x: Floats, weight: Matrix, residual: Floats | None = None) -> Floats:  # type: ignore[override]  # as above
        return weight.apply(x, residual)

    def norm_linear(self, x: Floats, norm: Floats, eps: float, weight: Matrix) -> Floats:
        return weight.apply(self.rms_norm(x, norm, eps), None, is_brief=True)

    def norm_gate_up(self, x: Floats, norm: Floats, eps: float, weight: Matrix) -> Floats:
        gate_up = self.norm_linear(x, norm, eps, weight)
        shared = self._tiled.shared
        y = None if shared is None else shared.silu_mul(gate_up)
        return self.silu_mul(gate_up) if y is None else y

    def norm_heads(
        self,
        x: Floats,
        weights: HeadWeights,
        rope: Floats,
        kv_cache: Cache,
        layer: int,
        batch: StepBatch,
    ) -> Floats:
        # The heads are changed in place, which a brief result does not allow.
        qkv = self.linear(self.rms_norm(x, weights.norm, weights.eps), weights.qkv)
        q: Floats = rotate_heads(self, qkv, weights, rope, kv_cache, layer, batch)
        return q

    def new_kv_cache(self, shape: KVCacheShape) -> Cache:
        if self.kv_dtype != self.dtype:
            return kv_cache.new_quantized_cache(shape, self.kv_dtype)
        return kv_cache.new_cache(shape, self.dtype)

    def rope_write_kv(
        self, qkv: Floats, rope_table: Floats, cache: Cache, layer: int, batch: StepBatch
    ) -> Floats:
        if not isinstance(cache, np.ndarray):
            return super().rope_write_kv(qkv, rope_table, cache, layer, batch)
        return self._rotation.write(qkv, rope_table, cache, layer, batch)

    def paged_attention(
        self, q: Floats, cache: Cache, layer: int, batch: StepBatch, window: int | None
    ) -> Floats:
        if not isinstance(cache, np.ndarray):
            return super().paged_attention(q, cache, layer, batch, window)
        return self._attention(
            q, cache, layer, batch, window, is_batch_invariant=self.is_batch_invariant
        )

    def silu_mul(self, gate_up: Floats) -> Floats:
        return elementwise.silu_mul(gate_up, self.workers, self._allocator)

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        by_token = self._tiled.by_token
        return super().take_rows(x, rows) if by_token is None else by_token.take_rows(x, rows)

    def sample(self, logits: Floats, rows: Sequence[RowControls]) -> list[int]:
        return sampling.sample(logits, rows, self.workers)

    def run_step(self, forward: Callable[[StepBatch], Floats], batch: StepBatch) -> Floats:
        """Run a step with a single-threaded BLAS, because threads or processes share the work."""
        with self.blas.threads(1):
            return super().run_step(partial(self._crew.run, forward), batch)

    def _layout_for(self, shape: tuple[int, int]) -> Layout | None:
        """Return how a matrix (N, K) is kept in tiles, or None if it is kept plain."""
        num_outputs, num_inputs = shape
        with self.blas.threads(1):
            layout = self._find_layout(num_inputs, num_outputs)
        self.linear_plans[num_inputs, num_outputs] = "plain" if layout is None else layout.name
        if layout is None:
            self._crew.may_share_tokens = False  # the number of rows would change their bits
        if layout is None or not layout.is_batch_invariant:
            self.linear_is_batch_invariant = self.is_batch_invariant = False
        return layout

    def _find_layout(self, num_inputs: int, num_outputs: int) -> Layout | None:
        if self._linear_plan == "plain":
            return None
        probe = self.find_probe()
        if self._linear_plan == "tiled":
            return self._tiled.layouts[probe.width(num_inputs)]
        if self._linear_plan == "packed":
            invariant: Layout = self._tiled.packed(num_inputs, num_outputs, is_invariant=True)
        else:
            invariant = probe.invariant(num_inputs, num_outputs)
        if self._must_be_invariant:
            return invariant
        fastest = probe.fastest(num_inputs, num_outputs)
        if probe.plan(num_inputs, num_outputs).choice not in ("plain", "packed"):
            return invariant
        # 16-bit weights are only kept in tiles.
        return invariant if fastest is None and self._weight_dtype != "auto" else fastest

    def find_probe(self) -> Probe:
        """Return the probe that chooses the plans, with its answers from this machine."""
        if self._probe is None:
            machine = machine_key(self.blas, self.workers.num_threads)
            folder: Path | None = None
            try:
                folder = open_cache(PLANS_CACHE)
            except CacheError as error:
                self.cache_error = str(error)
            answers = (
                PlanAnswers(folder, f"{machine}{what}") for what in ("", ", layouts", ", widths")
            )
            self._probe = Probe(self._plain, self._tiled, *answers)
        return self._probe
