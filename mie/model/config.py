"""Hold the configuration of a model: sizes, flags, and names of tensors.

`mie.checkpoint` makes a configuration from a ``config.json`` or from a GGUF file. Nothing here
reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mie.ops.layers.recurrent_shape import Kind, RecurrentShape

Activation = Literal["silu", "gelu_tanh"]
ExpertActivation = Literal["silu", "clamped_silu"]
QkNorm = Literal["head", "projection", "rotated head"]
"""Norms of queries and keys: of each head before or after RoPE, or of all heads before it."""

Selection = tuple[str, Sequence[range]]
"""The name of a matrix, and some of its rows."""


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
class Experts:
    """The experts of sparse layers. A router chooses some experts for each token."""

    number: int
    num_chosen: int
    size: int
    """The intermediate size of an expert."""
    activation: ExpertActivation
    has_biases: bool
    """Whether experts and their router have biases."""
    is_normalised: bool
    """Whether the weights of a token's experts sum to 1."""
    has_router_bias: bool
    """Whether the file has `Names.router_bias`."""
    layers: tuple[bool, ...]
    """Whether each layer is sparse."""
    are_beside_mlp: bool
    """Whether sparse layers also have an MLP for all tokens."""
    dense_size: int
    """The intermediate size of the MLP in layers that are not sparse, or 0 without such layers."""


@dataclass(frozen=True, kw_only=True)
class RecurrentLayers:
    """A kind of layers that keep a state, and the names of their tensors.

    A matrix that is named more than once holds the rows of several parts, as `layout` says.
    """

    kind: Kind
    layer_types: tuple[str, ...]
    """The names of such layers in ``layer_types``."""
    mixed: tuple[str, ...]
    """Matrices that give the inputs of the convolution."""
    conv: tuple[str, ...]
    """One convolution, or three for queries, keys and values."""
    out: str
    gate: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    """Matrices with one output a head: b and a of the gated delta rule, dt of Mamba 2."""
    vectors: str = ""
    """The prefix of ``A_log``, ``dt_bias`` and ``D``."""
    norm: str | None = None
    """The norm of the result."""
    layout: Literal["separate", "joined", "by group"] = "separate"
    """Whether a matrix holds several parts.

    "joined" is gate, mixed and small in one. "by group" is mixed and gate in one, b and a in
    another, both with the rows of a key head together.
    """
    norm_eps: float | None = None
    """The epsilon of `norm`, if it is not the model's."""
    names: Names | None = None
    """The other tensors of such a layer, if they are not named as in attention layers."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The sizes, flags and names of a model's recurrent layers."""

    shape: RecurrentShape
    family: RecurrentLayers
    conv_bias: bool
    bias: bool
    """Whether projections have biases."""
    largest_beta: float
    """The factor of beta in the gated delta rule."""
    norm_eps: float

    @property
    def norm_size(self) -> int:
        """The channels of the result that are normalised together."""
        shape = self.shape
        is_mamba = shape.kind == "mamba"
        return shape.width // shape.num_groups if is_mamba else shape.value_dim

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors with a number for each head."""
        of_kind = {"conv": (), "delta": ("A_log", "dt_bias"), "mamba": ("A_log", "dt_bias", "D")}
        return of_kind[self.shape.kind]

    def conv_sizes(self, names: Sequence[str]) -> list[int]:
        """Return the channels of each of these tensors: all, or the parts of q, k and v."""
        keys = self.shape.num_groups * self.shape.key_dim
        return [keys, keys, self.shape.width] if len(names) > 1 else [self.shape.num_channels]

    def projections(self) -> Mapping[str, Sequence[Selection]]:
        """Return the rows of matrices that give "mixed", "gate" and "small", each in its order."""
        shape, names = self.shape, self.family
        width, heads, groups = shape.width, shape.num_heads, shape.num_groups
        if names.layout == "joined":
            gate, mixed, small = _cut([width, shape.num_channels, heads])
            [name] = names.mixed
            return {"mixed": [(name, mixed)], "gate": [(name, gate)], "small": [(name, small)]}
        if names.layout == "by group":
            [name], [other] = names.mixed, names.small
            values = width // groups
            q, k, v, z = _cut([shape.key_dim, shape.key_dim, values, values], groups)
            b, a = _cut([heads // groups] * 2, groups)
            return {
                "mixed": [(name, [*q, *k, *v])],
                "gate": [(name, z)],
                "small": [(other, [*b, *a])],
            }
        sizes = [3 * width] if shape.kind == "conv" else self.conv_sizes(names.mixed)
        wanted = (("mixed", names.mixed, sizes), ("gate", names.gate, [width]))
        return {
            part: [(name, [range(size)]) for name, size in zip(own, sizes, strict=True)]
            for part, own, sizes in (*wanted, ("small", names.small, [heads] * len(names.small)))
            if own
        }


def _cut(sizes: Sequence[int], num_groups: int = 1) -> list[list[range]]:
    """Return the rows of each part of a matrix with parts of these sizes in every group."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    begins = range(0, num_groups * sum(sizes), sum(sizes))
    return [
        [range(begin + start, begin + start + size) for begin in begins]
        for start, size in zip(starts, sizes, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the files hold a quantised matrix."""

    format: str
    """A format of compressed-tensors, or "gptq", "gptq_v2", "awq" or "mxfp4"."""
    bits: int
    group: int | None
    """Inputs that share a scale. None: all inputs."""
    symmetric: bool
    """Whether there are no zero points."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """Which modules are quantised in the files, and how."""

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    """The targets of each scheme."""
    ignore: tuple[str, ...] = ()


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
    logits_scale: float  # a divisor
    embedding_scale: float
    residual_scale: float  # of the outputs that attention and MLP add
    norm_offset: int
    gates_attention: bool
    layers_recurrent: tuple[bool, ...]  # which layers keep a state; the others attend
    recurrent: RecurrentConfig | None
    experts: Experts | None
    names: Names  # of attention layers
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

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token in all layers.

        ``itemsize`` is the size of one cache element: 4 bytes for float32, 2 for float16.
        """
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * itemsize
