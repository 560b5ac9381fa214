"""Hold the configuration of a model: sizes, flags, and names of tensors.

`mie.checkpoint` makes a configuration from a ``config.json`` or from a GGUF file. Nothing here
reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mie.model.layers.config import Experts, Quantisation, RecurrentConfig

Activation = Literal["silu", "gelu_tanh"]
QkNorm = Literal["head", "projection", "rotated head"]
"""Norms of queries and keys: of each head before or after RoPE, or of all heads before it."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a layer's tensors, without ".weight". A norm that is None does not exist."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    """The norm of the result of attention, before it is added to the hidden states."""
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one matrix with their rows in this order."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two matrices, or one matrix with their rows in this order."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str | None = None
    """Numbers that are added to the sigmoids of logits to choose experts.

    Without them, experts are chosen by logits.
    """
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    """Matrices of an expert, with the expert's number. A file may stack the matrices of all."""
    experts_take_turns: bool = False
    """Whether the rows of gate and up alternate in the only matrix of an expert."""
    expert_down: str = "mlp.experts.{}.down_proj"
    sinks: str | None = None
    """Sinks of attention."""
    shared_gate: str | None = None
    """The matrix of one row. The sigmoid of its output multiplies the MLP beside experts."""
    attention_out: str = "self_attn.o_proj"
    final_norm: str = "norm"
    """The norm before the output head."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into rotations. `mie.model.rope` has the formulas.

    A field that the ``rope_type`` does not use keeps its default.
    """

    rope_type: str = "default"  # "default", "linear", "llama3", "yarn" or "longrope"
    theta: float = 10000.0
    factor: float = 1.0  # how much the context is stretched
    partial_rotary_factor: float = 1.0  # the share of a head's channels that turn, the first ones
    original_max_position_embeddings: int | None = None  # of pretraining: llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole channel pairs
    short_factor: tuple[float, ...] = ()  # longrope: divisors within the original context
    long_factor: tuple[float, ...] = ()  # longrope: divisors beyond it
    is_tempered: bool = False  # whether scores grow with the position beyond the original context

    def num_pairs(self, head_dim: int) -> int:
        """Return the number of a head's channel pairs that turn."""
        return int(head_dim * self.partial_rotary_factor) // 2


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and flags of one decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm | None
    activation: Activation
    layer_windows: tuple[int | None, ...]  # keys that a query sees, itself included; None is all
    layer_ropes: tuple[RopeConfig | None, ...]  # None is a layer without RoPE
    rope_is_interleaved: bool
    attention_scale: float | None  # of the scores; None is 1 / sqrt(head_dim)
    attention_soft_cap: float | None
    logits_soft_cap: float | None
    logits_scale: float  # the logits are divided by this
    embedding_scale: float
    residual_scale: float  # of the outputs that attention and MLP add
    norm_offset: int
    gates_attention: bool
    layers_recurrent: tuple[bool, ...]  # which layers keep a state; the others attend
    recurrent: RecurrentConfig | None
    experts: Experts | None
    names: Names  # the names of tensors of attention layers
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # as in the file; the checkpoint's own dtype may differ
    quantisation: Quantisation | None = None
    left_out: tuple[str, ...] = ()  # keys of the parts of a larger model that are not text

    @property
    def rope(self) -> RopeConfig | None:
        """The rotations of the layers that attend furthest, or None if no layer has any."""
        pairs = zip(self.layer_windows, self.layer_ropes, strict=True)
        ropes = sorted(
            (window is not None, index) for index, (window, rope) in enumerate(pairs) if rope
        )
        return self.layer_ropes[ropes[0][1]] if ropes else None

    @property
    def context_length(self) -> int:
        """The number of tokens that the model can attend over, RoPE scaling included.

        ``max_position_embeddings`` counts the stretched context for Llama-3 scaling. For linear
        scaling it counts the original context, as in vLLM, except for Gemma 3. Windows there
        stretch nothing. For YaRN both conventions are in use (Qwen states the original), so the
        larger reading holds. Scores that grow with the position are not implemented, so such a
        model has its original context.
        """
        rope = self.rope or RopeConfig()
        original = rope.original_max_position_embeddings or self.max_position_embeddings
        if rope.is_tempered:
            return original
        if rope.rope_type == "linear" and len({*self.layer_ropes}) == 1:
            return int(self.max_position_embeddings * rope.factor)
        if rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(original * rope.factor))
        return self.max_position_embeddings

    @property
    def default_context_length(self) -> int:
        """The number of tokens for which no setting is needed.

        LongRoPE turns keys differently beyond the original context, and a cache cannot change
        those that it holds. So a longer ``max_model_len`` decides for all tokens.
        """
        if self.rope is not None and self.rope.rope_type == "longrope":
            return self.rope.original_max_position_embeddings or self.max_position_embeddings
        return self.context_length

    @property
    def num_attention_layers(self) -> int:
        """The number of layers with keys and values."""
        return self.layers_recurrent.count(False)

    def names_of(self, layer: int) -> Names:
        """Return the names of a layer's tensors."""
        of_recurrent = self.recurrent.family.names if self.recurrent else None
        names = of_recurrent or self.names if self.layers_recurrent[layer] else self.names
        if names.shared_gate is None or self.has_experts(layer):
            return names
        usual = Names()
        return replace(names, gate_up=usual.gate_up, down=usual.down, shared_gate=None)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is sparse."""
        return self.experts is not None and self.experts.layers[layer]

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP that computes every token."""
        return self.experts is None or self.experts.are_beside_mlp or not self.experts.layers[layer]

    def mlp_size(self, layer: int) -> int:
        """Return the intermediate size of a layer's MLP. It differs beside experts."""
        is_dense = self.experts is not None and not self.experts.layers[layer]
        return self.experts.dense_size if self.experts and is_dense else self.intermediate_size
