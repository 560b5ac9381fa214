"""The Backend contract: what the model asks of the machine, and the shape of a step's data.

The shape letters, used in every docstring:

    T tokens in the step        S sequences in the step      R rows whose logits are wanted
    D hidden size               F intermediate size          V vocabulary
    Hq query heads              Hkv KV heads                 Dh head size
    N blocks                    B block size                 M blocks per table row
    K, N inputs and outputs of a matrix                      L layers

A backend is an object with its own state, so that two of them can live in one process and be
compared. It owns the layout of weights and cache: what its ``load_*`` and ``new_kv_cache`` return
is opaque to the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Ints
from mie.ops.sampling import RowControls

Array = Any
"""An array of the backend: numpy.ndarray, or an array on the device."""

Drawn = Any
"""Token ids that `Backend.start_sample` chose, perhaps still to be computed; opaque."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """A step's tokens as one ragged batch (integers; drawn in docs/architecture.md).

    Query i of a sequence with n queries and length s stands at position s - n + i. Entries of
    ``block_tables`` at or past a sequence's length may hold anything.
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slot_mapping: Ints  # [T]       block_id * B + position % B
    cu_seqlens_q: Ints  # [S + 1]   where each sequence's tokens begin in T
    seq_lens: Ints  # [S]           tokens in the cache after this step
    block_tables: Ints  # [S, M]
    logits_rows: Ints  # [R]        indices into T; a row may be named more than once
    drawn: "Drawn | None" = None
    """The step before, if its tokens are this one's and the host does not know them yet; then
    ``token_ids`` are zeros."""
    drawn_rows: Ints | None = None  # [T]  which of its tokens each one is


@dataclass(frozen=True, kw_only=True)
class KVCacheShape:
    """The size of a paged KV cache: [L, 2, N, B, Hkv, Dh]."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        """Keys and values."""
        num_slots = self.num_blocks * self.block_size
        return 2 * self.num_layers * num_slots * self.num_kv_heads * self.head_dim

    @property
    def num_scales(self) -> int:
        """Of a quantised cache: one for each head of each token, of keys and of values."""
        return self.num_elements // self.head_dim


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a backend may still take for weights, cache and results, where its arrays lie."""

    available_bytes: int
    is_shared: bool
    """Other programs live there too, so that a cache leaves them most of it unless told
    otherwise. False: a GPU's own."""


class Backend(Protocol):
    """What every backend offers. An operator is defined by the function of `mie.ops` it names."""

    name: str
    itemsize: int
    """Bytes of one element of the KV cache."""
    is_asynchronous: bool
    """Whether `run_step` and `start_sample` return before their work is done, so that the host can
    plan the next step meanwhile."""

    # Sizes, before anything is loaded.
    def memory(self) -> Memory:
        """What there is, now."""

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        """What a tensor of the checkpoint takes at most once it is loaded."""

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        """What `new_kv_cache`, or `new_host_cache`, takes."""

    # Weights: once, at load. A matrix arrives as blocks of whole rows in a checkpoint's dtype
    # (float32, float16, bfloat16), widened exactly; a block is done with before the next is taken.
    def load_vector(self, vector: NDArray[Any]) -> Array:
        """A norm weight [D]."""

    def load_embedding(self, shape: tuple[int, int], blocks: Iterable[NDArray[Any]]) -> Array:
        """The embedding table of shape (V, D)."""

    def load_linear(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> Array:
        """A matrix from the rows of a checkpoint's (N, K), and its bias [N]."""

    def tie_linear(self, embedding: Array) -> Array:
        """The output head [D, V] that shares the memory of a loaded embedding."""

    def load_rope(self, inv_freq: NDArray[np.float64], scaling: float, num_positions: int) -> Array:
        """The rotations of every position (`ops.rope.rope_table`)."""

    def new_kv_cache(self, shape: KVCacheShape) -> Array:
        """The KV cache, allocated once."""

    def new_host_cache(self, shape: KVCacheShape) -> Array:
        """Room in the host's memory for blocks that are swapped out of a KV cache."""

    # Operators, in the order of a layer.
    def embed(self, token_ids: Array, embedding: Array) -> Array:
        """[T, D]: `ops.linear.embed`."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """[T, D]: `ops.norm.rms_norm`."""

    def linear(self, x: Array, weight: Array, residual: Array | None = None) -> Array:
        """[T, N]: `ops.linear.linear`. The residual's memory may be reused for the result."""

    def head_norm(self, qkv: Array, first: int, last: int, weight: Array, eps: float) -> None:
        """RMS-norm the heads first … last - 1 of qkv [T, Hq + 2 Hkv, Dh] in place (Qwen3)."""

    def rope_write_kv(
        self, qkv: Array, rope: Array, kv_cache: Array, layer: int, batch: StepBatch
    ) -> Array:
        """q [T, Hq, Dh] rotated; the rotated keys and the values of qkv [T, Hq + 2 Hkv, Dh] are
        written to the cache: `ops.rope.rope`, `ops.kv_cache.write_kv`."""

    def paged_attention(
        self, q: Array, kv_cache: Array, layer: int, batch: StepBatch, window: int | None
    ) -> Array:
        """[T, Hq, Dh], scaled by 1/sqrt(Dh): `ops.attention.paged_attention`."""

    def silu_mul(self, gate_up: Array) -> Array:
        """[T, F]: `ops.activation.silu_mul`."""

    def take_rows(self, x: Array, rows: Array) -> Array:
        """x[rows]: [R, D]."""

    # Blocks and tokens.
    def copy_blocks(self, kv_cache: Array, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy blocks whole, in every plane: `ops.kv_cache.copy_blocks`."""

    def export_blocks(
        self, kv_cache: Array, host_cache: Array, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copy blocks whole from the KV cache to the host: `ops.kv_cache.move_blocks`."""

    def import_blocks(
        self, host_cache: Array, kv_cache: Array, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copy blocks whole from the host to the KV cache: `ops.kv_cache.move_blocks`."""

    def sample(self, logits: Array, rows: Sequence[RowControls]) -> list[int]:
        """One token id for each of the R rows: `ops.sampling.sample`."""

    def start_sample(self, logits: Array, rows: Sequence[RowControls]) -> Drawn:
        """Begin `sample`; nothing waits for it."""

    def finish_sample(self, drawn: Drawn) -> list[int]:
        """The token ids of `start_sample`, once they are known."""

    def top_logprobs(
        self, logits: Array, row: int, token_id: int, num_top: int
    ) -> tuple[list[int], list[float], int]:
        """Of one row: `ops.sampling.top_logprobs`."""

    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        """forward(batch) -> logits [R, V], which last until the next step: whatever padding,
        capture and replay it takes."""
