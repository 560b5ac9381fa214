"""Load the weights of a model into a backend, layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.errors import WeightsError
from mie.model.config import ModelConfig
from mie.model.layers.adapters import AdapterSlots
from mie.model.layers.experts import load_experts
from mie.model.layers.recurrent import load_recurrence
from mie.model.layout import CacheLayout, Place
from mie.model.mixers import Attention, Mixer
from mie.model.rope import rope_channels
from mie.ops.backend import Array, Backend, HeadWeights
from mie.ops.weights.quantised import Form, QuantisedRows, Rows

Order = NDArray[np.intp]
"""Rows of a matrix, in an order."""

BLOCK_BYTES = 4 << 20
"""Bytes of the checkpoint that are converted at a time: little for any model."""


class Weights(Protocol):
    """The tensors of a model by their Hugging Face names, as `mie.checkpoint` reads them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors. A matrix is [output features, input features]."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the quantised matrices. All other tensors are floats."""

    @property
    def norms_hold_one(self) -> bool:
        """Whether the weights of norms already have the offset of their family."""

    def blocks(self, name: str, max_bytes: int) -> Iterator[Rows]:
        """Yield a tensor in blocks along its first axis, of at most so many bytes in the file."""

    def check_values(self, name: str, block: Rows) -> None:
        """Raise `WeightsError` if a block of a tensor has a value that is not usable."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The weights of one layer, as the backend keeps them."""

    mixer: Mixer
    mixer_post_norm: Array | None
    mlp_norm: Array | None
    gate_up: Array | None
    """Gate and up of the MLP. A sparse layer may have no MLP."""
    down: Array | None
    experts: Any
    """Weights of the backend's `ExpertOperators.load`, or None in a dense layer."""
    shared_gate: Array | None
    """The gate [1, D] of the MLP beside experts."""
    mlp_post_norm: Array | None


@dataclass(frozen=True, eq=False)
class Loader:
    """Reads a checkpoint tensor by tensor into the backend, and releases the file's pages."""

    config: ModelConfig
    backend: Backend
    checkpoint: Weights
    eps: float
    progress: Callable[[int], object]
    rounded_to: np.dtype[Any] | None
    layout: CacheLayout
    adapters: AdapterSlots | None

    @cached_property
    def channels(self) -> Order | None:
        """The order of a head's channels that backends rotate, or None if it is the file's."""
        head_dim, ropes = self.config.head_dim, self.config.layer_ropes
        [*counts] = {rope.num_pairs(head_dim) for rope in ropes if rope is not None}
        if not counts:
            return None
        order = rope_channels(head_dim, counts[0], self.config.rope_is_interleaved)
        return None if (np.diff(order) == 1).all() else order

    def layer(self, index: int, rope: Array) -> Layer:
        """Load a layer with these rotations."""
        prefix = f"model.layers.{index}."
        config, names = self.config, self.config.names_of(index)
        mixer: Mixer
        if config.recurrent is not None and config.layers_recurrent[index]:
            number = config.layers_recurrent[:index].count(True)
            mixer = load_recurrence(self, prefix, number, config.recurrent, names)
        else:
            place = self.layout.places[config.layers_recurrent[:index].count(False)]
            mixer = self._attention(prefix, place, rope, config.layer_windows[index])
        return Layer(
            mixer=mixer,
            mixer_post_norm=self.norm(prefix, names.attention_post_norm),
            mlp_norm=self.norm(prefix, names.mlp_norm),
            gate_up=self.linear(prefix, *names.gate_up) if config.has_mlp(index) else None,
            down=self.linear(prefix, names.down) if config.has_mlp(index) else None,
            experts=load_experts(self, prefix) if config.has_experts(index) else None,
            shared_gate=self.linear(prefix, names.shared_gate) if names.shared_gate else None,
            mlp_post_norm=self.norm(prefix, names.mlp_post_norm),
        )

    def _attention(self, prefix: str, place: Place, rope: Array, window: int | None) -> Attention:
        """Load attention."""
        config, names = self.config, self.config.names
        q_norm, k_norm, rotated_norm = self._head_norms(prefix)
        norm, gate = self.norm(prefix, names.attention_norm), None
        if config.gates_attention:
            rows = np.arange(2 * config.num_heads * config.head_dim)
            of_gates = rows.reshape(config.num_heads, 2, -1)[:, 1].ravel()
            gate = self.selected(prefix, [(names.qkv[0], of_gates)])
        heads = HeadWeights(
            norm=None if config.gates_attention else norm,
            qkv=self.selected(prefix, list(zip(names.qkv, self._head_rows(), strict=True))),
            q_norm=q_norm,
            k_norm=k_norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=self.eps,
        )
        return Attention(
            group=place.group,
            index=place.number,
            heads=heads,
            gate=gate,
            gated_norm=norm if config.gates_attention else None,
            rope=rope,
            rotated_norm=rotated_norm,
            rotated_eps=config.rms_norm_eps,
            window=window,
            soft_cap=config.attention_soft_cap,
            sinks=self.vector(prefix, names.sinks),
            out=self.linear(prefix, names.attention_out),
        )

    def _head_rows(self) -> list[Order | None]:
        """Return the rows of the matrices of queries, keys and values. None: all as they are.

        The channels of queries and keys come in the order that backends rotate. With gates, the
        first matrix has the rows of a query head, then of the head's gate, for each head in turn.
        """
        config, matrices = self.config, self.config.names.qkv
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        if self.channels is None and not config.gates_attention:
            return [None] * len(matrices)
        rows = np.arange((num_rotated + config.num_kv_heads) * config.head_dim)
        heads = rows.reshape(-1, config.head_dim)
        if self.channels is not None:
            heads[:num_rotated] = heads[:num_rotated, self.channels]
        if len(matrices) == 1:
            return [heads.ravel()]
        q, k, v = np.split(heads, [num_heads, num_rotated])
        if config.gates_attention:
            q += config.head_dim * np.arange(num_heads)[:, None]
        return [q.ravel(), (k - k.min()).ravel(), (v - v.min()).ravel()]

    def norm(self, prefix: str, name: str | None, scale: float = 1.0) -> Array | None:
        """Load the weights of a norm, with the offset and a factor in them."""
        if name is None:
            return None
        return self.backend.load_vector(self._norm_weights(prefix + name) * scale)

    def _head_norms(self, prefix: str) -> tuple[Array | None, Array | None, Array | None]:
        """Load the norms of queries and keys before RoPE, and of queries after it.

        A rotation keeps lengths, so only the weights distinguish a norm after it from a norm before
        it. The weights of keys are a factor of the products with queries, and go there.
        """
        if self.config.qk_norm is None:
            return None, None, None
        names = self.config.names
        q, k = (self._norm_weights(prefix + name) for name in (names.q_norm, names.k_norm))
        load = self.backend.load_vector
        if self.config.qk_norm == "rotated head":
            return None, load(np.ones_like(k)), load(q * k)
        if self.channels is not None:
            q, k = q[self.channels], k[self.channels]
        return load(q), load(k), None

    def _norm_weights(self, name: str) -> NDArray[Any]:
        weights = self.read(name + ".weight").astype(np.float64)
        return weights + (0 if self.checkpoint.norms_hold_one else self.config.norm_offset)

    def embedding(self, name: str) -> Array:
        """Load the embedding table."""
        rows, columns = self.checkpoint.shapes[name]
        form = self.checkpoint.forms.get(name)
        return self.backend.load_embedding((rows, columns), self._rows(name), form)

    def linear(self, prefix: str, *names: str) -> Array:
        """Load the named matrices as one fused matrix."""
        return self.selected(prefix, [(name, None) for name in names])

    def selected(self, prefix: str, parts: Sequence[tuple[str, Order | None]]) -> Array:
        """Load rows of matrices as one matrix: the rows of an order, or all as they are."""
        shapes, forms = self.checkpoint.shapes, self.checkpoint.forms
        weights = [(f"{prefix}{name}.weight", order) for name, order in parts]
        biases = [(f"{prefix}{name}.bias", order) for name, order in parts]
        biases = [(name, order) for name, order in biases if name in shapes]
        counts = [shapes[name][0] if order is None else len(order) for name, order in weights]
        num_inputs = shapes[weights[0][0]][1]
        loaded = self.backend.load_linear(
            (sum(counts), num_inputs),
            self._ordered(weights),
            np.concatenate(list(self._ordered(biases))) if biases else None,
            [(count, forms.get(name)) for count, (name, _) in zip(counts, weights, strict=True)],
        )
        if self.adapters is None:
            return loaded
        return self.adapters.with_slots(loaded, num_inputs, weights, counts)

    def _ordered(self, parts: Iterable[tuple[str, Order | None]]) -> Iterator[Rows]:
        """Yield rows of tensors in blocks. The rows in an order come as one block."""
        for name, order in parts:
            if order is None:
                yield from self._rows(name)
            else:
                share = len(order) / self.checkpoint.shapes[name][0]
                yield ordered(list(self._rows(name, share)), order)

    def vector(self, prefix: str, name: str | None) -> Array | None:
        """Load a vector of the file, unchanged."""
        return None if name is None else self.backend.load_vector(self.read(prefix + name))

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor as it is in the file, but rounded as weights are."""
        return np.concatenate(list(self._rows(name)))

    def _rows(self, name: str, share: float = 1) -> Iterator[Rows]:
        """Yield a tensor in blocks. ``share`` is the part of the tensor that is used."""
        for block in self.checkpoint.blocks(name, BLOCK_BYTES):
            self.checkpoint.check_values(name, block)
            yield self._rounded(name, block)
            self.progress(int(block.nbytes * share))

    def _rounded(self, name: str, block: Rows) -> Rows:
        """Return the block in the dtype that weights are rounded to, unless it is quantised."""
        rounded_to = self.rounded_to
        if isinstance(block, QuantisedRows) or rounded_to is None or block.dtype == rounded_to:
            return block
        with np.errstate(over="ignore"):
            rounded = block.astype(rounded_to)
        if not np.isfinite(rounded).all():
            raise WeightsError(
                f"tensor {name!r} holds values that {rounded_to.name} does not have (use "
                "dtype='bfloat16' or 'float32')"
            )
        return rounded


def ordered(blocks: Sequence[Rows], order: NDArray[np.intp]) -> Rows:
    """Return the rows of some blocks as one block, in another order."""
    if isinstance(blocks[0], QuantisedRows):
        quantised = [block for block in blocks if isinstance(block, QuantisedRows)]
        return QuantisedRows.joined(quantised).take(order)
    floats = [block for block in blocks if not isinstance(block, QuantisedRows)]
    joined: NDArray[Any] = np.concatenate(floats)[order]
    return joined
