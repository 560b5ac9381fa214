"""Implement the Backend contract with the plain NumPy operators, as the oracle."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mie.errors import ConfigError
from mie.ops import activation, attention, experts, kv_cache, linear, norm, rope, sampling
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import KVCacheShape, Memory, Progress, StepBatch, StepSize
from mie.ops.expert_operators import ExpertWeights
from mie.ops.kv_cache import Cache, QuantizedCache
from mie.ops.numpy_recurrent import NumpyRecurrent
from mie.ops.packed import PackedMatrix, linear_packed
from mie.ops.quantised import Form, Part, Rows, only_floats
from mie.ops.sampling import RowControls
from mie.system.resources import available_bytes


class NumpyLinear(NamedTuple):
    """A matrix [K, N], the transpose of the checkpoint's, and its bias [N].

    A matrix with quantised parts stays [N, K].
    """

    weight: Floats | PackedMatrix
    bias: Floats | None


class NumpyBackend(NumpyRecurrent):
    """Runs on the CPU in ``dtype``: "float32" (also "auto"), or "float64" for the oracle tests.

    "bfloat16" and "float16" keep weights and the KV cache in 16 bits, and compute in float32.
    ``kv_cache_dtype``: "auto" is ``dtype``; "int8" and "fp8" are the formats of `ops.kv_cache`.
    """

    name = "numpy-plain"
    is_asynchronous = False
    dtypes: tuple[str, ...] = ("auto", "float32", "float64", *kv_cache.HALVES)

    def __init__(self, dtype: str = "auto", *, kv_cache_dtype: str = "auto") -> None:
        halves = kv_cache.HALVES
        if dtype not in self.dtypes:
            *others, last = self.dtypes
            raise ConfigError(
                f"dtype {dtype!r} is not supported by the {self.name} backend; "
                f"choose {', '.join(others)} or {last}"
            )
        self.dtype: np.dtype[Any] = np.dtype("float64" if dtype == "float64" else "float32")
        """The dtype of the arithmetic."""
        self.stored_dtype: np.dtype[Any] = halves.get(dtype, self.dtype)
        """The dtype in which weights and the KV cache are kept."""
        self.kv_dtype: np.dtype[Any] = kv_cache.QUANTIZED.get(kv_cache_dtype, self.stored_dtype)
        self.itemsize: int = self.kv_dtype.itemsize

    def numerics(self) -> dict[str, str | int]:
        return {
            "backend": self.name,
            "dtype": self.dtype.name,
            "kv_cache_dtype": self.kv_dtype.name,
            "numpy": np.__version__,
        }

    def memory(self) -> Memory:
        return Memory(available_bytes=available_bytes(), is_shared=True)

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        if form is not None:
            return form.num_bytes(*shape)
        return math.prod(shape) * self.stored_dtype.itemsize

    def step_bytes(self, size: StepSize) -> int:
        return size.num_results * self.dtype.itemsize

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        scale_bytes = kv_cache.SCALE_BYTES if self.kv_dtype in kv_cache.LARGEST else 0
        return shape.num_elements * self.itemsize + shape.num_scales * scale_bytes

    def load_vector(self, vector: NDArray[Any]) -> Floats:
        return vector.astype(self.dtype)

    def load_embedding(
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> Floats | PackedMatrix:
        if form is not None:
            return PackedMatrix(shape, blocks, [(shape[0], form)], self.stored_dtype)
        table = np.empty(shape, self.stored_dtype)
        row = 0
        for block in only_floats(blocks):
            table[row : row + len(block)] = block
            row += len(block)
        return table

    def load_linear(
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> NumpyLinear:
        bias = None if bias is None else bias.astype(self.dtype)
        if any(form is not None for _, form in parts):
            return NumpyLinear(PackedMatrix(shape, blocks, parts, self.stored_dtype), bias)
        weight = np.empty(shape[::-1], self.stored_dtype)
        row = 0
        for block in only_floats(blocks):
            weight[:, row : row + len(block)] = block.astype(self.stored_dtype).T
            row += len(block)
        return NumpyLinear(weight, bias)

    def tie_linear(self, embedding: Floats | PackedMatrix) -> NumpyLinear:
        if isinstance(embedding, PackedMatrix):
            return NumpyLinear(embedding, None)
        return NumpyLinear(embedding.T, None)

    def load_rope(
        self, inv_freq: NDArray[np.float64], scaling: rope.FloatOrFloats, num_positions: int
    ) -> Floats:
        return rope.rope_table(inv_freq, scaling, num_positions, self.dtype)

    def new_kv_cache(self, shape: KVCacheShape) -> Cache:
        s = shape
        dims = (s.num_layers, 2, s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        # Zeros, because masked slots go through a product before they are dropped.
        if self.kv_dtype == self.dtype:
            return np.zeros(dims, self.dtype)
        return QuantizedCache.zeros(dims, self.kv_dtype)

    def new_host_cache(self, shape: KVCacheShape) -> Cache:
        return self.new_kv_cache(shape)  # a second arena, because the host is the device

    def prepare(
        self, progress: Progress, forward: Callable[[StepBatch], Any], size: StepSize
    ) -> None:
        """Do nothing: nothing is compiled."""

    def embed(
        self, token_ids: Ints, embedding: Floats | PackedMatrix, scale: float = 1.0
    ) -> Floats:
        if isinstance(embedding, PackedMatrix):
            rows = embedding.take(token_ids).astype(self.dtype, copy=False)
        else:
            rows = linear.embed(token_ids, embedding).astype(self.dtype, copy=False)
        return rows if scale == 1 else rows * self.dtype.type(scale)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return norm.rms_norm(x, weight, eps)

    def norm_add(self, x: Floats, weight: Floats, eps: float, residual: Floats) -> Floats:
        return norm.rms_norm(x, weight, eps) + residual

    def linear(self, x: Floats, weight: NumpyLinear, residual: Floats | None = None) -> Floats:
        if isinstance(weight.weight, PackedMatrix):
            return linear_packed(x, weight.weight, weight.bias, residual)
        matrix = weight.weight.astype(self.dtype, copy=False)
        return linear.linear(x, matrix, weight.bias, residual)

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
        """Attend for all decode rows in one call, and for the other sequences one at a time."""
        k_cache, v_cache = cache[layer, 0], cache[layer, 1]
        scale = q.shape[-1] ** -0.5
        starts, seq_lens, tables = batch.cu_seqlens_q, batch.seq_lens, batch.block_tables
        if window is not None and seq_lens.max() <= window:
            window = None
        decode = np.diff(starts) == 1
        if window is not None or not decode.any():
            return attention.paged_attention(
                q, k_cache, v_cache, tables, starts, seq_lens, scale, window, soft_cap, sinks
            )
        if decode.all():
            return attention.decode_attention(
                q, k_cache, v_cache, tables, seq_lens, scale, soft_cap, sinks
            )
        out = np.empty_like(q)
        rows = starts[:-1][decode]
        out[rows] = attention.decode_attention(
            q[rows], k_cache, v_cache, tables[decode], seq_lens[decode], scale, soft_cap, sinks
        )
        for s in np.flatnonzero(~decode).tolist():
            begin, end = int(starts[s]), int(starts[s + 1])
            out[begin:end] = attention.paged_attention(
                q[begin:end],
                k_cache,
                v_cache,
                tables[s : s + 1],
                np.array([0, end - begin]),
                seq_lens[s : s + 1],
                scale,
                soft_cap=soft_cap,
                sinks=sinks,
            )
        return out

    def silu_mul(self, gate_up: Floats) -> Floats:
        return activation.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Floats) -> Floats:
        return activation.gelu_mul(gate_up)

    def load_experts(self, matrices: Sequence[Any]) -> Any:
        return matrices

    def route(self, x: Floats, weights: ExpertWeights) -> Floats:
        logits = self.linear(x, weights.router)
        if weights.bias is not None:
            return experts.route_by_sigmoid(logits, weights.bias, weights.num_chosen)
        return experts.route(logits, weights.num_chosen, weights.is_normalised)

    def experts(
        self, x: Floats, routed: Floats, weights: ExpertWeights, residual: Floats
    ) -> Floats:
        def compute(expert: int, rows: Floats) -> Floats:
            gate_up = self.linear(rows, weights.gate_up[expert])
            return self.linear(self.activate(gate_up, weights.activation), weights.down[expert])

        return experts.experts(x, routed, compute, residual)

    def clamped_silu_mul(self, gate_up: Floats) -> Floats:
        return activation.clamped_silu_mul(gate_up)

    def soft_cap(self, x: Floats, cap: float) -> Floats:
        return activation.soft_cap(x, cap)

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        return x.take(rows, 0)  # in a quarter of the time of x[rows]

    def copy_blocks(self, cache: Any, src: Sequence[int], dst: Sequence[int]) -> None:
        self._move_blocks(cache, cache, src, dst)

    def export_blocks(
        self, cache: Any, host_cache: Any, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        self._move_blocks(cache, host_cache, src, dst)

    def import_blocks(
        self, host_cache: Any, cache: Any, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        self._move_blocks(host_cache, cache, src, dst)

    def _move_blocks(
        self, source: Any, target: Any, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copy whole blocks. All are read before any is written."""
        kv_cache.move_blocks(source, target, np.asarray(src, np.int64), np.asarray(dst, np.int64))

    def sample(self, logits: Floats, rows: Sequence[RowControls]) -> list[int]:
        return sampling.sample(logits, rows)

    def start_sample(self, logits: Floats, rows: Sequence[RowControls]) -> list[int]:
        return self.sample(logits, rows)

    def finish_sample(self, drawn: list[int]) -> list[int]:
        return drawn

    def top_logprobs(
        self, logits: Floats, row: int, token_id: int, num_top: int
    ) -> tuple[list[int], list[float], int]:
        return sampling.top_logprobs(logits[row], token_id, num_top)

    def run_step(self, forward: Callable[[StepBatch], Floats], batch: StepBatch) -> Floats:
        return forward(with_tokens(batch))


def with_tokens(batch: StepBatch) -> StepBatch:
    """Return the batch with the tokens that the previous step drew, if they are its input."""
    if batch.drawn_rows is None:
        return batch
    token_ids = np.asarray(batch.drawn, np.int64)[batch.drawn_rows]
    return replace(batch, token_ids=token_ids, drawn=None, drawn_rows=None)
