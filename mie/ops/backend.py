"""Define the Backend contract and the shape of a step's data.

The shape letters, used in every docstring:

    T tokens in the step        S sequences in the step      R rows whose logits are wanted
    D hidden size               F intermediate size          V vocabulary
    Hq query heads              Hkv KV heads                 Dh head size
    N blocks                    B block size                 M blocks per table row
    K, N inputs and outputs of a matrix                      L layers

A backend is an object with its own state, so two of them can be in one process and be compared.
It owns the layout of weights and cache. The results of its ``load_*`` and ``new_kv_cache`` are
opaque to the model.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.ops.activation import Activation
from mie.ops.arrays import Bools, Ints
from mie.ops.rope import FloatOrFloats
from mie.ops.sampling import RowControls

Array = Any
"""An array of the backend: numpy.ndarray, or an array on the device."""

Drawn = Any
"""Token ids that `Backend.start_sample` chose. The device may still compute them. Opaque."""

Rows = Any
"""Whole rows of a checkpoint's matrix: floats, or `ops.weights.quantised.QuantisedRows`."""

Form = Any
"""The form of a quantised matrix: `ops.weights.quantised.Form`."""

Part = tuple[int, Form | None]
"""Number of consecutive rows of a matrix, and the form of these rows. None: floats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """A step's tokens as one ragged batch of integers (docs/shapes.md has an example).

    Query i of a sequence with n queries and length s is at position s - n + i. Entries of
    ``block_tables`` at or past a sequence's length are arbitrary. Groups of layers may have slots
    and tables of their own, in the rows of one group after the other.
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slot_mapping: Ints  # [G T]     block_id * B + position % B
    cu_seqlens_q: Ints  # [S + 1]   offset of each sequence's tokens in T
    seq_lens: Ints  # [S]           tokens in the cache after this step
    block_tables: Ints  # [G S, M]
    logits_rows: Ints  # [R]       indices into T, which may repeat
    drawn: "Drawn | None" = None
    """The previous step's tokens, if they are this step's input and unknown to the host.

    ``token_ids`` are then zeros.
    """
    drawn_rows: Ints | None = None  # [T]  index into ``drawn`` for each token
    num_decodes: int | None = None
    """Number of leading decodes. The others are chunks, even with one query. None: unknown."""
    slots: Ints | None = None  # [S]   where each sequence's recurrent states are; all differ
    fresh: Bools | None = None  # [S]  whether its states begin as zeros, whatever the slot holds
    adapters: Ints | None = None  # [T]  the slot of each token's adapter, or 0
    num_groups: int = 1
    group: int = 0  # of a part from `by_group`

    def by_group(self) -> "Sequence[StepBatch]":
        """Return the batch of each group of layers, with the group's own slots and tables."""
        if self.num_groups == 1:
            return [self]
        num_tokens, num_seqs = len(self.token_ids), len(self.seq_lens)
        return [
            replace(
                self,
                slot_mapping=self.slot_mapping[group * num_tokens : (group + 1) * num_tokens],
                block_tables=self.block_tables[group * num_seqs : (group + 1) * num_seqs],
                num_groups=1,
                group=group,
            )
            for group in range(self.num_groups)
        ]

    def with_tokens(self) -> "StepBatch":
        """Return the batch with the tokens that the previous step drew, if they are its input."""
        if self.drawn_rows is None:
            return self
        token_ids = np.asarray(self.drawn, np.int64)[self.drawn_rows]
        return replace(self, token_ids=token_ids, drawn=None, drawn_rows=None)


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
        """The number of keys and values."""
        num_slots = self.num_blocks * self.block_size
        return 2 * self.num_layers * num_slots * self.num_kv_heads * self.head_dim

    @property
    def num_vectors(self) -> int:
        """The number of vectors: two for each head of each token."""
        return self.num_elements // self.head_dim


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The size of an engine's largest step, from which the memory of a step follows."""

    num_tokens: int
    num_seqs: int
    """Sequences of the step. As many rows of logits are computed."""
    max_len: int
    """Tokens of the longest sequence."""
    hidden_size: int
    intermediate_size: int
    """The intermediate size of the widest MLP, or 0."""
    vocab_size: int
    num_heads: int
    cache: KVCacheShape
    is_quantised: bool = False
    num_chosen: int = 0
    """Experts of a token."""
    expert_size: int = 0
    """The intermediate size of an expert."""
    gates_attention: bool = False
    num_recurrent_results: int = 0
    """Results of a token in a recurrent layer."""
    num_groups: int = 1  # of layers with tables of their own
    num_layers: int = 0

    @property
    def num_results(self) -> int:
        """The number of results that live at once in a layer's widest part, and the logits."""
        attention = 2 * (self.num_heads + self.cache.num_kv_heads) * self.cache.head_dim
        experts = self.num_chosen * (2 * self.hidden_size + self.expert_size)
        experts += 3 * self.expert_size * (self.num_chosen > 0)
        attention += self.gates_attention * self.num_heads * self.cache.head_dim
        mlp = 3 * self.intermediate_size
        widest = 2 * self.hidden_size + max(attention, mlp, experts, self.num_recurrent_results)
        return self.num_tokens * widest + self.num_seqs * self.vocab_size


Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Opens a progress bar for so many things to do. The returned function counts those done."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that is available for weights, cache and results on the backend's device."""

    available_bytes: int
    is_shared: bool
    """Whether other programs use this memory, so that a cache takes little of it by default.

    It is False for a GPU's own memory.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadWeights:
    """The weights of query, key and value heads, in the backend's layout."""

    norm: Array | None  # [D], applied to the hidden states
    qkv: Array  # D inputs, (Hq + 2 Hkv) Dh outputs
    q_norm: Array | None  # [Dh], applied to each query head, or [Hq Dh], applied to all at once
    k_norm: Array | None  # [Dh] or [Hkv Dh], for the key heads
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # added to the mean square in norms


class Backend(Protocol):
    """The operations of every backend. A docstring names the function of `mie.ops` that defines it.

    A method with a body composes other methods. A backend may replace it by one fused operation.
    """

    name: str
    is_asynchronous: bool = False
    """Whether `run_step` and `start_sample` return before their work is done.

    The host can then plan the next step meanwhile.
    """

    has_decode_kernels: bool = False
    """Whether decodes have kernels of their own, and so bits of their own.

    A decode with drafts is then packed as a decode for each of its tokens.
    """

    def numerics(self) -> dict[str, str | int]:
        """Return the facts that select how numbers are rounded, for the event log.

        With ``batch_invariant``, a request has the same bits wherever all of them are equal.
        """

    # Sizes, before anything is loaded.
    def memory(self) -> Memory:
        """Return the memory that is available now."""

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        """Return the maximum number of bytes that a tensor of the checkpoint takes once loaded.

        ``form`` is the form of a quantised matrix.
        """

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        """Return the bytes that `new_kv_cache` or `new_host_cache` takes."""

    def step_bytes(self, size: StepSize) -> int:
        """Return the bytes that steps of at most this size take.

        They are an estimate of the results, and the maximum of the memory that attention keeps from
        step to step.
        """

    # Weights: loaded once. A matrix arrives as blocks of whole rows in a checkpoint's dtype
    # (float32, float16, bfloat16) and is widened exactly, or as `QuantisedRows`. Their product
    # equals the product of the dequantised weights. Each block is consumed before the next. A
    # backend without quantised weights raises `ConfigError`, already in `weight_bytes`.
    def load_vector(self, vector: NDArray[Any]) -> Array:
        """Load a norm weight [D]."""

    def load_embedding(
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> Array:
        """Load the embedding table of shape (V, D), in floats or in one form."""

    def load_linear(
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> Array:
        """Load a matrix from the rows of a checkpoint's (N, K), with its bias [N].

        ``parts`` are the rows of each tensor, in order. A block belongs to one part. Without parts,
        all rows are floats.
        """

    def tie_linear(self, embedding: Array) -> Array:
        """Return the output head [D, V] that shares the memory of a loaded embedding."""

    def load_rope(
        self, inv_freq: NDArray[np.float64], scaling: FloatOrFloats, num_positions: int
    ) -> Array:
        """Load the rotations of every position (`ops.rope.rope_table`)."""

    def new_kv_cache(self, shape: KVCacheShape) -> Array:
        """Allocate the KV cache."""

    def new_host_cache(self, shape: KVCacheShape) -> Array:
        """Allocate host memory for blocks that are swapped out of a KV cache."""
        return self.new_kv_cache(shape)

    def prepare(
        self, progress: Progress, forward: Callable[[StepBatch], Array], size: StepSize
    ) -> None:
        """Compile the code of steps, once weights and cache are loaded.

        ``progress`` is called if there is something to compile. ``forward`` is as in `run_step`.
        Steps are at most of this size.
        """

    # Operators, in the order of a layer.
    def embed(self, token_ids: Array, embedding: Array, scale: float = 1.0) -> Array:
        """Look up embeddings [T, D] and multiply them by ``scale``: `ops.linear.embed`."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """Normalise to [T, D]: `ops.norm.rms_norm`."""

    def norm_add(self, x: Array, weight: Array, eps: float, residual: Array) -> Array:
        """Normalise, then add the residual [T, D]: `ops.norm.rms_norm`."""

    def linear(self, x: Array, weight: Array, residual: Array | None = None) -> Array:
        """Multiply to [T, N]: `ops.linear.linear`. The result may reuse the residual's memory."""

    def norm_linear(self, x: Array, norm: Array | None, eps: float, weight: Array) -> Array:
        """Normalise unless ``norm`` is None, then multiply to [T, N]."""
        return self.linear(x if norm is None else self.rms_norm(x, norm, eps), weight)

    def head_norm(self, qkv: Array, first: int, last: int, weight: Array, eps: float) -> None:
        """RMS-norm the heads first … last - 1 of qkv [T, Hq + 2 Hkv, Dh] in place.

        A weight [Dh] is for each of them (Qwen3). A longer one is for all at once (OLMo 2).
        """

    def rope_write_kv(
        self, qkv: Array, rope: Array, kv_cache: Array, layer: int, batch: StepBatch
    ) -> Array:
        """Rotate queries and keys, and write keys and values to the cache.

        Return the rotated q [T, Hq, Dh]. The keys and values come from qkv [T, Hq + 2 Hkv, Dh]:
        `ops.rope.rope`, `ops.kv_cache.write_kv`. The result may reuse qkv's memory.
        """

    def norm_heads(
        self,
        x: Array,
        weights: HeadWeights,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: StepBatch,
    ) -> Array:
        """Return the rotated q [T, Hq, Dh] of hidden states, and write keys and values."""
        w, num_keys_end = weights, weights.num_heads + weights.num_kv_heads
        qkv = self.norm_linear(x, w.norm, w.eps, w.qkv)
        qkv = qkv.reshape(len(qkv), num_keys_end + w.num_kv_heads, w.head_dim)
        if w.q_norm is not None:
            self.head_norm(qkv, 0, w.num_heads, w.q_norm, w.eps)
        if w.k_norm is not None:
            self.head_norm(qkv, w.num_heads, num_keys_end, w.k_norm, w.eps)
        return self.rope_write_kv(qkv, rope, kv_cache, layer, batch)

    def paged_attention(
        self,
        q: Array,
        kv_cache: Array,
        layer: int,
        batch: StepBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """Attend with scale 1/sqrt(Dh), as [T, Hq, Dh]: `ops.attention.paged_attention`."""

    def activate(self, gate_up: Array, activation: Activation) -> Array:
        """Apply a gated activation, as [T, F]: `ops.activation.activate`."""

    def norm_gate_up(
        self,
        x: Array,
        norm: Array | None,
        eps: float,
        weight: Array,
        activation: Activation = "silu",
    ) -> Array:
        """Normalise unless ``norm`` is None, multiply, then activate, as [T, F]."""
        return self.activate(self.norm_linear(x, norm, eps, weight), activation)

    def soft_cap(self, x: Array, cap: float) -> Array:
        """Bound the logits [R, V]: `ops.activation.soft_cap`."""

    def sigmoid_mul(self, x: Array, gate: Array) -> Array:
        """Multiply by sigmoid(gate [T, K] or [T, 1]), as [T, K]: `ops.activation.sigmoid`."""

    def take_rows(self, x: Array, rows: Array) -> Array:
        """Return x[rows] as [R, D]."""

    # Blocks and tokens.
    def move_blocks(
        self, source: Array, target: Array, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Copy whole blocks within or between KV cache and host: `ops.kv_cache.move_blocks`."""

    def export_blocks(self, cache: Array, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of whole blocks of the KV cache. Their layout is not given."""

    def import_block(self, cache: Array, block_id: int, data: bytes) -> None:
        """Write the bytes of an exported block to a block of the KV cache."""

    def sample(self, logits: Array, rows: Sequence[RowControls]) -> list[int]:
        """Sample one token id for each of the R rows: `ops.sampling.sample`."""

    def start_sample(self, logits: Array, rows: Sequence[RowControls]) -> Drawn:
        """Begin `sample`. An asynchronous backend does not wait for the result."""
        return self.sample(logits, rows)

    def finish_sample(self, drawn: Drawn) -> list[int]:
        """Wait for the token ids of `start_sample` and return them."""
        token_ids: list[int] = drawn
        return token_ids

    def top_logprobs(
        self, logits: Array, row: int, token_id: int, num_top: int
    ) -> tuple[list[int], list[float], int]:
        """Return the top log-probabilities of one row: `ops.sampling.top_logprobs`."""

    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        """Run forward(batch) and return its logits [R, V]. They last until the next step.

        The backend handles padding, capture and replay.
        """

    # Layers that not every model has.
    @property
    def experts(self) -> Any:
        """The operators of sparse layers: an `ops.layers.operators.ExpertOperators`."""

    @property
    def recurrent(self) -> Any:
        """The operators of layers with states: an `ops.layers.operators.RecurrentOperators`."""

    @property
    def adapters(self) -> Any:
        """The operators of adapters: an `ops.adapters.low_rank.AdapterOperators`."""
