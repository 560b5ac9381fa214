"""Run the decoder-only transformer of every supported family, which is flags of `ModelConfig`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.tensors import Shape, expected_tensors
from mie.checkpoint.weights import Checkpoint
from mie.errors import WeightsError
from mie.model.rope import rope_inv_freq
from mie.ops.backend import Array, Backend, HeadWeights, StepBatch
from mie.ops.quantised import QuantisedRows, Rows

BLOCK_BYTES = 4 << 20
"""Bytes of the checkpoint that are converted at a time, which is little for any model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The weights of one layer, as the backend keeps them."""

    heads: HeadWeights
    attention_out: Array
    mlp_norm: Array
    gate_up: Array
    down: Array
    window: int | None


class Decoder:
    """The weights on a backend, and the forward pass over them."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        checkpoint: Checkpoint,
        num_positions: int,
        progress: Callable[[int], object] = lambda num_bytes: None,
        rounded_to: np.dtype[Any] | None = None,
    ) -> None:
        """Load the weights, with rotations for positions 0 … num_positions - 1.

        ``progress`` is called with the number of checkpoint bytes just converted. Weights are
        rounded to the dtype ``rounded_to`` if it is given.

        Raises:
            WeightsError: a weight is NaN or infinite, or too large for ``rounded_to``.
        """
        self.config = config
        self.backend = backend
        loader = _Loader(
            config, backend, checkpoint, expected_tensors(config), progress, rounded_to
        )
        self._embedding = loader.embedding("model.embed_tokens.weight")
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.vector("model.norm.weight")
        if config.tie_word_embeddings:
            self._head = backend.tie_linear(self._embedding)
        else:
            self._head = loader.linear("lm_head")
        inv_freq, scaling = rope_inv_freq(
            config.rope, config.head_dim, config.max_position_embeddings
        )
        self._rope = backend.load_rope(inv_freq, scaling, num_positions)

    def forward(self, batch: StepBatch, kv_cache: Array) -> Array:
        """Return the logits [R, V] of a step's wanted rows, and store its keys and values."""
        backend, eps = self.backend, self.config.rms_norm_eps
        x = backend.embed(batch.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            q = backend.norm_heads(x, layer.heads, self._rope, kv_cache, index, batch)
            attended = backend.paged_attention(q, kv_cache, index, batch, layer.window)
            x = backend.linear(attended.reshape(len(q), -1), layer.attention_out, residual=x)
            h = backend.norm_gate_up(x, layer.mlp_norm, eps, layer.gate_up)
            x = backend.linear(h, layer.down, residual=x)
        x = backend.take_rows(x, batch.logits_rows)
        return backend.norm_linear(x, self._norm, eps, self._head)


@dataclass(frozen=True, eq=False)
class _Loader:
    """Reads a checkpoint tensor by tensor into the backend, and releases the file's pages."""

    config: ModelConfig
    backend: Backend
    checkpoint: Checkpoint
    shapes: Mapping[str, Shape]
    progress: Callable[[int], object]
    rounded_to: np.dtype[Any] | None

    def layer(self, index: int) -> Layer:
        name = f"model.layers.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."
        config, has_norms = self.config, self.config.qk_norm
        return Layer(
            heads=HeadWeights(
                norm=self.vector(name + "input_layernorm.weight"),
                qkv=self.linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
                q_norm=self.vector(attention + "q_norm.weight") if has_norms else None,
                k_norm=self.vector(attention + "k_norm.weight") if has_norms else None,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
            ),
            attention_out=self.linear(attention + "o_proj"),
            mlp_norm=self.vector(name + "post_attention_layernorm.weight"),
            gate_up=self.linear(mlp + "gate_proj", mlp + "up_proj"),
            down=self.linear(mlp + "down_proj"),
            window=config.layer_windows[index],
        )

    def vector(self, name: str) -> Array:
        return self.backend.load_vector(self._read(name))

    def embedding(self, name: str) -> Array:
        rows, columns = self.shapes[name]
        form = self.checkpoint.forms.get(name)
        return self.backend.load_embedding((rows, columns), self._rows([name]), form)

    def linear(self, *names: str) -> Array:
        """Load the named matrices as one fused matrix."""
        weights = [name + ".weight" for name in names]
        shapes = [self.shapes[weight] for weight in weights]
        biases = [name + ".bias" for name in names if name + ".bias" in self.checkpoint.dtypes]
        bias = np.concatenate([self._read(name) for name in biases]) if biases else None
        shape = (sum(num_rows for num_rows, _ in shapes), shapes[0][1])
        parts = [
            (num_rows, self.checkpoint.forms.get(weight))
            for weight, (num_rows, _) in zip(weights, shapes, strict=True)
        ]
        return self.backend.load_linear(shape, self._rows(weights), bias, parts)

    def _read(self, name: str) -> NDArray[Any]:
        return np.concatenate(list(self._rows([name])))

    def _rows(self, names: Sequence[str]) -> Iterator[Rows]:
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
