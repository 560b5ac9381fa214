"""Implement the Backend contract with the NumPy operators that define every result."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mie.base.resources import available_bytes, available_cpus
from mie.errors import ConfigError
from mie.ops import attention, kv_cache, linear, norm, rope, sampling
from mie.ops.activation import Activation, activate, sigmoid, soft_cap
from mie.ops.adapters.numpy_adapters import NumpyAdapters
from mie.ops.arrays import Floats, Ints, check_dtype, zeros
from mie.ops.backend import Backend, Form, KVCacheShape, Memory, Part, Rows, StepBatch, StepSize
from mie.ops.blas import Blas
from mie.ops.kv_cache import Cache
from mie.ops.layers.numpy_layers import NumpyExperts, NumpyRecurrent
from mie.ops.sampling import RowControls
from mie.ops.weights.block_bytes import planes_of, set_bytes, to_bytes
from mie.ops.weights.packed import PackedMatrix
from mie.ops.weights.quantised_cache import new_cache

INVARIANT_ROWS = 4
"""Rows of every product with ``batch_invariant``.

BLAS chooses a kernel by the shape of a product, and computes four rows with one kernel. So products
of four rows round a row in one way.
"""
WORTH_SHARING = 1 << 26
"""Multiplications of a step's largest product from which the threads of BLAS save time.

In smaller products, threads wait for each other longer than they compute, and they spin afterwards.
"""


Matrix = Any
"""Floats, or an `ops.weights.packed.PackedMatrix` if a part of the matrix is quantised."""


class NumpyLinear(NamedTuple):
    """A matrix [K, N], the transpose of the checkpoint's, and its bias [N].

    A packed matrix stays [N, K].
    """

    weight: Matrix
    bias: Floats | None


class NumpyBackend(Backend):
    """Runs on the CPU in ``dtype``: "float32" (also "auto"), or "float64" for the oracle tests.

    "bfloat16" and "float16" keep weights and the KV cache in 16 bits, and compute in float32.
    ``weight_dtype`` does the same for a checkpoint's matrices of that dtype alone; "auto" widens
    them at load, and so does "float32". ``kv_cache_dtype``: "auto" is ``dtype``; the others
    are formats of `ops.kv_cache`. BLAS has one thread in small steps, and ``num_threads`` in large
    ones: by default one for each CPU that the process may use.

    ``activations`` "int8" rounds the inputs of products with int4 and int8 weights, as
    `ops.weights.integer` defines.

    ``batch_invariant`` makes a request's result independent of the rest of the batch, of chunks and
    of blocks, bit for bit. All products then have `INVARIANT_ROWS` rows, and attention has one
    query at a time.
    """

    name = "numpy"
    dtypes: tuple[str, ...] = ("auto", "float32", "float64", *kv_cache.HALVES)

    def __init__(
        self,
        dtype: str = "auto",
        *,
        num_threads: int | None = None,
        kv_cache_dtype: str = "auto",
        weight_dtype: str = "auto",
        batch_invariant: bool = False,
        activations: str = "float32",
    ) -> None:
        halves = kv_cache.HALVES
        check_dtype(dtype, self.dtypes, self.name)
        self.dtype: np.dtype[Any] = np.dtype("float64" if dtype == "float64" else "float32")
        """The dtype of the arithmetic."""
        self.stored_dtype: np.dtype[Any] = halves.get(dtype, self.dtype)
        """The dtype in which weights and the KV cache are kept."""
        self.kv_dtype: np.dtype[Any] = kv_cache.QUANTIZED.get(kv_cache_dtype, self.stored_dtype)
        if weight_dtype == "float32" and self.dtype == np.float64:
            raise ConfigError("weight_dtype 'float32' contradicts dtype 'float64' (leave one out)")
        if activations == "int8" and self.dtype == np.float64:
            raise ConfigError("activations 'int8' contradicts dtype 'float64' (leave one out)")
        self.activations = activations
        self._kept_dtype = weight_dtype if weight_dtype in halves else None
        self._matrix_dtype = halves.get(weight_dtype, self.stored_dtype)
        self.num_threads = num_threads or available_cpus()
        self.is_batch_invariant = batch_invariant
        self._largest = 1  # multiplications of a token in the largest product

    @cached_property
    def _blas(self) -> Blas:
        return Blas()

    def numerics(self) -> dict[str, str | int]:
        facts: dict[str, str | int] = {
            "backend": self.name,
            "dtype": self.dtype.name,
            "kv_cache_dtype": self.kv_dtype.name,
            "weight_dtype": self._matrix_dtype.name,
            "activations": self.activations,
            "numpy": np.__version__,
            "kernels": self._blas.core,
            "batch_invariant": self.is_batch_invariant,
        }
        return facts if self.is_batch_invariant else {**facts, "num_threads": self.num_threads}

    def memory(self) -> Memory:
        return Memory(available_bytes=available_bytes(), is_shared=True)

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        if form is not None:
            return int(form.num_bytes(*shape))
        dtype = self._matrix_dtype if len(shape) == 2 else self.dtype
        return math.prod(shape) * dtype.itemsize

    def step_bytes(self, size: StepSize) -> int:
        return size.num_results * self.dtype.itemsize

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        return shape.num_vectors * kv_cache.head_bytes(self.kv_dtype, shape.head_dim)

    def load_vector(self, vector: NDArray[Any]) -> Floats:
        return vector.astype(self.dtype)

    def load_embedding(
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> Matrix:
        if form is not None:
            return self._packed(shape, blocks, [(shape[0], form)])
        table = np.empty(shape, self._matrix_dtype)
        for rows, block in self._placed(blocks):
            table[rows] = block
        return table

    def load_linear(
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> NumpyLinear:
        self._largest = max(self._largest, math.prod(shape))
        bias = None if bias is None else bias.astype(self.dtype)
        if any(form is not None for _, form in parts):
            return NumpyLinear(self._packed(shape, blocks, parts), bias)
        weight = np.empty(shape[::-1], self._matrix_dtype)
        for rows, block in self._placed(blocks):
            weight[:, rows] = block.T
        return NumpyLinear(weight, bias)

    def _placed(self, blocks: Iterable[Rows]) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield the blocks of a matrix of floats, each with its rows of the matrix."""
        row = 0
        for block in self._checked(blocks):
            assert isinstance(block, np.ndarray), "a quantised matrix has a form"
            yield slice(row, row + len(block)), block
            row += len(block)

    def _checked(self, blocks: Iterable[Rows]) -> Iterator[Rows]:
        """Yield the blocks. Refuse floats of another dtype than a given ``weight_dtype``."""
        for block in blocks:
            if self._kept_dtype and isinstance(block, np.ndarray):
                linear.check_kept(block, self._kept_dtype)
            yield block

    def tie_linear(self, embedding: Matrix) -> NumpyLinear:
        self._largest = max(self._largest, math.prod(embedding.shape))
        return NumpyLinear(embedding.T if isinstance(embedding, np.ndarray) else embedding, None)

    def load_rope(
        self, inv_freq: NDArray[np.float64], scaling: rope.FloatOrFloats, num_positions: int
    ) -> Floats:
        return rope.rope_table(inv_freq, scaling, num_positions, self.dtype)

    def new_kv_cache(self, shape: KVCacheShape) -> Cache:
        s = shape
        dims = (s.num_layers, 2, s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        if self.kv_dtype != self.dtype:
            return new_cache(dims, self.kv_dtype)
        # Zeros, because masked slots go through a product before they are dropped.
        return zeros(dims, self.dtype)

    def prepare(self, *_: Any) -> None:
        """Do nothing: nothing is compiled."""

    def embed(self, token_ids: Ints, embedding: Matrix, scale: float = 1.0) -> Floats:
        if isinstance(embedding, np.ndarray):
            rows = linear.embed(token_ids, embedding)
        else:
            rows = embedding.take(token_ids)
        rows = rows.astype(self.dtype, copy=False)
        return rows if scale == 1 else rows * self.dtype.type(scale)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return norm.rms_norm(x, weight, eps)

    def norm_add(self, x: Floats, weight: Floats, eps: float, residual: Floats) -> Floats:
        return norm.rms_norm(x, weight, eps) + residual

    def linear(self, x: Floats, weight: NumpyLinear, residual: Floats | None = None) -> Floats:
        y: Floats
        num_rows = len(x)
        if self.is_batch_invariant:
            x = linear.in_groups(x, INVARIANT_ROWS)
        if isinstance(weight.weight, np.ndarray):
            y = x @ weight.weight.astype(self.dtype, copy=False)
        else:
            y = weight.weight.product(x)
        y = y.reshape(-1, y.shape[-1])[:num_rows]
        for term in (weight.bias, residual):
            if term is not None:
                y += term
        return y

    def head_norm(self, qkv: Floats, first: int, last: int, weight: Floats, eps: float) -> None:
        heads = qkv[:, first:last]
        normed = norm.rms_norm(heads.reshape(len(qkv), -1, weight.size), weight, eps)
        heads[...] = normed.reshape(heads.shape)

    def rope_write_kv(
        self, qkv: Floats, rope_table: Floats, cache: Cache, layer: int, batch: StepBatch
    ) -> Floats:
        num_kv_heads = cache.shape[-2]
        num_rotated = qkv.shape[1] - num_kv_heads
        rotated = rope.rope(qkv[:, :num_rotated], rope_table[batch.positions])
        q, keys = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
        values = qkv[:, num_rotated:]
        kv_cache.write_kv(keys, values, cache[layer, 0], cache[layer, 1], batch.slot_mapping)
        return q

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
        """Attend for all decodes in one call, and then for each chunk. The decodes come first."""
        planes, scale = (cache[layer, 0], cache[layer, 1]), q.shape[-1] ** -0.5
        starts, seq_lens, tables = batch.cu_seqlens_q, batch.seq_lens, batch.block_tables
        is_chunk = np.append(np.diff(starts) > 1, True)
        n = 0 if self.is_batch_invariant else int(np.argmax(is_chunk))  # number of decodes
        out = np.empty_like(q)
        decodes = q[:n], *planes, tables[:n], seq_lens[:n]
        if n:
            out[:n] = attention.decode_attention(*decodes, scale, window, soft_cap, sinks)
        if n < len(seq_lens):
            chunks = q[n:], *planes, tables[n:], starts[n:] - starts[n], seq_lens[n:]
            most = 1 if self.is_batch_invariant else attention.QUERY_TILE
            out[n:] = attention.paged_attention(
                *chunks, scale, window, soft_cap, sinks, max_queries=most
            )
        return out

    def activate(self, gate_up: Floats, activation: Activation) -> Floats:
        return activate(gate_up, activation)

    def soft_cap(self, x: Floats, cap: float) -> Floats:
        return soft_cap(x, cap)

    def sigmoid_mul(self, x: Floats, gate: Floats) -> Floats:
        return x * sigmoid(gate)

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        return x.take(rows, 0)  # in a quarter of the time of x[rows]

    def move_blocks(
        self, source: Cache, target: Cache, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        kv_cache.move_blocks(source, target, src, dst)

    def export_blocks(self, cache: Cache, block_ids: Sequence[int]) -> list[bytes]:
        return [to_bytes(planes_of(cache, block_id)) for block_id in block_ids]

    def import_block(self, cache: Cache, block_id: int, data: bytes) -> None:
        set_bytes(planes_of(cache, block_id), data)

    def sample(self, logits: Floats, rows: Sequence[RowControls]) -> list[int]:
        return sampling.sample(logits, rows)

    def top_logprobs(
        self, logits: Floats, row: int, token_id: int, num_top: int
    ) -> tuple[list[int], list[float], int]:
        return sampling.top_logprobs(logits[row], token_id, num_top)

    def run_step(self, forward: Callable[[StepBatch], Floats], batch: StepBatch) -> Floats:
        is_large = len(batch.token_ids) * self._largest >= WORTH_SHARING
        is_shared = is_large and not self.is_batch_invariant
        if batch.adapters is not None:
            self.adapters.slots = batch.adapters
        with self._blas.limit(self.num_threads if is_shared else 1):
            return forward(batch.with_tokens())

    # Layers and weights that not every model has.

    @property
    def experts(self) -> Any:
        return NumpyExperts(self)

    @property
    def recurrent(self) -> Any:
        return NumpyRecurrent(self.dtype)

    @cached_property
    def adapters(self) -> Any:
        return NumpyAdapters(self.dtype, INVARIANT_ROWS if self.is_batch_invariant else None)

    def _packed(
        self, shape: tuple[int, int], blocks: Iterable[Rows], parts: Sequence[Part]
    ) -> Matrix:
        """Load a matrix that has quantised parts."""
        blocks, rounds = self._checked(blocks), self.activations == "int8"
        return PackedMatrix(shape, blocks, parts, self._matrix_dtype, rounds_activations=rounds)
