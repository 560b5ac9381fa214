"""Run the decoder-only transformer of every supported family, given by flags of `ModelConfig`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mie.model.config import ModelConfig, RopeConfig
from mie.model.layers.adapters import AdapterSlots
from mie.model.layout import CacheLayout, whole
from mie.model.mixers import Caches
from mie.model.rope import rope_inv_freq
from mie.model.weights import Layer, Loader, Weights
from mie.ops.backend import Array, Backend, StepBatch


class Decoder:
    """The weights on a backend, and the forward pass over them.

    Hidden states are kept divided by the residual multiplier (Granite), so that nothing that is
    added to them needs a factor. The norms that read them have a smaller epsilon instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        checkpoint: Weights,
        num_positions: int,
        progress: Callable[[int], object] = lambda num_bytes: None,
        rounded_to: np.dtype[Any] | None = None,
        layout: CacheLayout | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Load the weights, with rotations for positions 0 … num_positions - 1.

        ``progress`` is called with the number of checkpoint bytes just converted. Weights are
        rounded to the dtype ``rounded_to`` if it is given. ``layout`` is the layout of the KV
        cache. By default its blocks have all layers. ``adapters`` are slots for adapters.

        Raises:
            WeightsError: a weight is NaN or infinite, or too large for ``rounded_to``.
        """
        self.config = config
        self.backend, self.adapters = backend, adapters
        self._eps = config.rms_norm_eps / (config.residual_scale * config.residual_scale)
        layout = layout or whole(config)
        loader = Loader(
            config, backend, checkpoint, self._eps, progress, rounded_to, layout, adapters
        )
        ropes = {rope: self._load_rope(rope, num_positions) for rope in {*config.layer_ropes}}
        self._embedding = loader.embedding("model.embed_tokens.weight")
        self._layers = [
            loader.layer(index, ropes[rope]) for index, rope in enumerate(config.layer_ropes)
        ]
        self._norm = loader.norm("model.", config.names.final_norm, scale=1 / config.logits_scale)
        if config.tie_word_embeddings:
            self._head = backend.tie_linear(self._embedding)
        else:
            self._head = loader.linear("", "lm_head")

    def _load_rope(self, rope: RopeConfig | None, num_positions: int) -> Array:
        """Load rotations. Pairs that do not turn have the frequency 0.

        Backends divide scores by sqrt(Dh). Another scale is a factor of the rotations.
        """
        config = self.config
        freq = np.zeros(config.head_dim // 2)
        scaling = np.ones(config.head_dim // 2)
        if rope is not None:
            own, factor = rope_inv_freq(
                rope, config.head_dim, config.max_position_embeddings, num_positions
            )
            freq[: len(own)], scaling[: len(own)] = own, factor
        if config.attention_scale is not None:
            scaling *= math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
        return self.backend.load_rope(freq, scaling, num_positions)

    def forward(self, batch: StepBatch, kv_cache: Array, states: Array = None) -> Array:
        """Return the logits [R, V] of a step's wanted rows.

        Keys and values are stored in the cache, and recurrent states in the sequences' slots.
        """
        backend, config, eps = self.backend, self.config, self._eps
        caches = Caches(kv=kv_cache, states=states)
        scale = config.embedding_scale / config.residual_scale
        x = backend.embed(batch.token_ids, self._embedding, scale)
        batches = batch.by_group()
        for layer in self._layers:
            h = layer.mixer.mix(backend, x, batches[layer.mixer.group], caches)
            x = self._add(x, h, layer.mixer.out, layer.mixer_post_norm)
            x = self._mlp(x, layer)
        x = backend.take_rows(x, batch.logits_rows)
        logits = backend.norm_linear(x, self._norm, eps, self._head)
        cap = config.logits_soft_cap
        return logits if cap is None else backend.soft_cap(logits, cap)

    def _mlp(self, x: Array, layer: Layer) -> Array:
        """Add the results of the MLP, or of experts and perhaps of an MLP beside them."""
        backend, eps, activation = self.backend, self._eps, self.config.activation
        w = layer.experts
        if w is None:
            h = backend.norm_gate_up(x, layer.mlp_norm, eps, layer.gate_up, activation)
            return self._add(x, h, layer.down, layer.mlp_post_norm)
        h = backend.rms_norm(x, layer.mlp_norm, eps)
        routed = backend.experts.route(h, w)
        if layer.gate_up is not None:
            own = backend.norm_gate_up(h, None, eps, layer.gate_up, activation)
            if layer.shared_gate is not None:
                own = backend.sigmoid_mul(own, backend.linear(h, layer.shared_gate))
            x = self._add(x, own, layer.down, None)
        y: Array = backend.experts.compute(h, routed, w, residual=x)
        return y

    def _add(self, x: Array, h: Array, weight: Array, norm: Array | None) -> Array:
        """Multiply the result of a block, normalise it if there is a norm, and add it to x."""
        if norm is None:
            return self.backend.linear(h, weight, residual=x)
        return self.backend.norm_add(self.backend.linear(h, weight), norm, self._eps, x)
