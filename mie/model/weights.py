"""Load the weights of a model into a backend, layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.tensors import Shape, expected_tensors
from mie.checkpoint.weights import Checkpoint
from mie.errors import WeightsError
from mie.model.rope import rope_channels
from mie.ops.backend import Array, Backend, HeadWeights
from mie.ops.expert_operators import ExpertWeights
from mie.ops.quantised import QuantisedRows, Rows

BLOCK_BYTES = 4 << 20
"""Bytes of the checkpoint that are converted at a time, which is little for any model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The weights of one layer, as the backend keeps them."""

    heads: HeadWeights
    rope: Array
    rotated_norm: Array | None  # of queries that are normalised after RoPE
    attention_out: Array
    attention_post_norm: Array | None
    mlp_norm: Array | None
    gate_up: Array | None  # of the MLP, which sparse layers may not have
    down: Array | None
    experts: ExpertWeights | None
    mlp_post_norm: Array | None
    window: int | None


@dataclass(frozen=True, eq=False)
class Loader:
    """Reads a checkpoint tensor by tensor into the backend, and releases the file's pages."""

    config: ModelConfig
    backend: Backend
    checkpoint: Checkpoint
    eps: float
    progress: Callable[[int], object]
    rounded_to: np.dtype[Any] | None

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The shapes of the tensors."""
        return expected_tensors(self.config)

    @cached_property
    def channels(self) -> NDArray[np.intp] | None:
        """The order of a head's channels that backends rotate, or None if it is the file's."""
        head_dim, ropes = self.config.head_dim, self.config.layer_ropes
        [*counts] = {rope.num_pairs(head_dim) for rope in ropes if rope is not None}
        if not counts:
            return None
        order = rope_channels(head_dim, counts[0], self.config.rope_is_interleaved)
        return None if (np.diff(order) == 1).all() else order

    def layer(self, index: int, rope: Array) -> Layer:
        """Load a layer, which has these rotations."""
        prefix = f"model.layers.{index}."
        config, names = self.config, self.config.names
        q_norm, k_norm, rotated_norm = self._head_norms(prefix)
        return Layer(
            heads=HeadWeights(
                norm=self.norm(prefix, names.attention_norm),
                qkv=self.linear(prefix, *names.qkv, channels=self.channels),
                q_norm=q_norm,
                k_norm=k_norm,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=self.eps,
            ),
            rope=rope,
            rotated_norm=rotated_norm,
            attention_out=self.linear(prefix, "self_attn.o_proj"),
            attention_post_norm=self.norm(prefix, names.attention_post_norm),
            mlp_norm=self.norm(prefix, names.mlp_norm),
            gate_up=self.linear(prefix, *names.gate_up) if config.has_mlp(index) else None,
            down=self.linear(prefix, names.down) if config.has_mlp(index) else None,
            experts=self.experts(prefix) if config.has_experts(index) else None,
            mlp_post_norm=self.norm(prefix, names.mlp_post_norm),
            window=config.layer_windows[index],
        )

    def experts(self, prefix: str) -> ExpertWeights:
        """Load the experts of a layer and their router."""
        config, names = self.config, self.config.names
        assert config.experts is not None
        gate_up, down = [], []
        for expert in range(config.experts.number):
            own = [name.format(expert) for name in names.expert_gate_up]
            gate_up.append(self.linear(prefix, *own))
            down.append(self.linear(prefix, names.expert_down.format(expert)))
        return ExpertWeights(
            router=self.linear(prefix, names.router),
            gate_up=self.backend.load_experts(gate_up),
            down=self.backend.load_experts(down),
            number=config.experts.number,
            num_chosen=config.experts.num_chosen,
            is_normalised=config.experts.is_normalised,
            activation=config.activation,
        )

    def norm(self, prefix: str, name: str | None, scale: float = 1.0) -> Array | None:
        """Load the weights of a norm, with the offset and a factor in them."""
        if name is None:
            return None
        return self.backend.load_vector(self._norm_weights(prefix + name) * scale)

    def _head_norms(self, prefix: str) -> tuple[Array | None, Array | None, Array | None]:
        """Load the norms of queries and keys before RoPE, and of queries after it.

        A rotation keeps lengths, so only the weights of a norm after it differ from those of one
        before it. The weights of keys are a factor of the products with queries, and go there.
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
        weights = self._read(name + ".weight").astype(np.float64)
        return weights + self.config.norm_offset

    def embedding(self, name: str) -> Array:
        """Load the embedding table."""
        rows, columns = self.shapes[name]
        form = self.checkpoint.forms.get(name)
        return self.backend.load_embedding((rows, columns), self._rows([name]), form)

    def linear(self, prefix: str, *names: str, channels: NDArray[np.intp] | None = None) -> Array:
        """Load the named matrices as one fused matrix.

        ``channels`` is the order of each head's channels in the rows of queries and keys.
        """
        weights = [f"{prefix}{name}.weight" for name in names]
        biases = [f"{prefix}{name}.bias" for name in names]
        biases = [name for name in biases if name in self.checkpoint.dtypes]
        shapes = [self.shapes[weight] for weight in weights]
        shape = (sum(num_rows for num_rows, _ in shapes), shapes[0][1])
        rows = self._rows if channels is None else partial(self._turned, channels=channels)
        bias = np.concatenate(list(rows(biases))) if biases else None
        parts = [
            (num_rows, self.checkpoint.forms.get(weight))
            for weight, (num_rows, _) in zip(weights, shapes, strict=True)
        ]
        return self.backend.load_linear(shape, rows(weights), bias, parts)

    def _turned(self, names: Iterable[str], channels: NDArray[np.intp]) -> Iterator[Rows]:
        """Yield the rows of queries, keys and values, the first two with ordered channels."""
        left = (self.config.num_heads + self.config.num_kv_heads) * self.config.head_dim
        for name in names:
            order = np.arange(self.shapes[name][0])
            order[:left] = order[:left].reshape(-1, len(channels))[:, channels].ravel()
            left = max(0, left - len(order))
            yield ordered(list(self._rows([name])), order)

    def _read(self, name: str) -> NDArray[Any]:
        return np.concatenate(list(self._rows([name])))

    def _rows(self, names: Iterable[str]) -> Iterator[Rows]:
        for name in names:
            for block in self.checkpoint.blocks(name, BLOCK_BYTES):
                self.checkpoint.check_finite(name, block)
                yield self._rounded(name, block)
                self.progress(block.nbytes)

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

    def joined(planes: Iterable[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(list(planes))[order]

    quantised = [block for block in blocks if isinstance(block, QuantisedRows)]
    if not quantised:
        return joined(block for block in blocks if not isinstance(block, QuantisedRows))
    offsets = [block.offsets for block in quantised if block.offsets is not None]
    return QuantisedRows(
        form=quantised[0].form,
        codes=joined(block.codes for block in quantised),
        scales=joined(block.scales for block in quantised),
        offsets=joined(offsets) if offsets else None,
    )
