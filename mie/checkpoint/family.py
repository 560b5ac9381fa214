"""Define what distinguishes a family: names of tensors, flags and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mie.ops.recurrent_shape import Kind

QkNorm = Literal["head", "projection", "rotated head"]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a layer's tensors, without ".weight". A norm that is None does not exist."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    """Normalises the result of attention, before it is added to the hidden states."""
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one that holds their rows in this order."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two matrices, or one that holds their rows in this order."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str | None = None
    """Added to the sigmoids of logits to choose experts. None: experts are chosen by logits."""
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    """Like `gate_up`, with the number of the expert. A file may stack the matrices of all."""
    experts_take_turns: bool = False
    """Whether the rows of gate and up alternate in the one matrix of an expert."""
    expert_down: str = "mlp.experts.{}.down_proj"
    sinks: str | None = None
    """The sinks of attention."""
    shared_gate: str | None = None
    """The matrix with one row whose sigmoid multiplies the MLP beside experts."""
    attention_out: str = "self_attn.o_proj"
    final_norm: str = "norm"
    """The norm before the output head."""


@dataclass(frozen=True, kw_only=True)
class Recurrent:
    """Layers of a family that keep a state: their kind, and the names of their tensors.

    Matrices that are named more than once hold the rows of several parts, as `layout` says.
    """

    kind: Kind
    layer_types: tuple[str, ...]
    """Their names in ``layer_types``."""
    mixed: tuple[str, ...]
    """The matrices that give the inputs of the convolution."""
    conv: tuple[str, ...]
    """The convolution, or those of queries, keys and values."""
    out: str
    gate: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    """The matrices with one output a head: b and a of the gated delta rule, dt of Mamba 2."""
    vectors: str = ""
    """The prefix of ``A_log``, ``dt_bias`` and ``D``."""
    norm: str | None = None
    """The norm of the result."""
    layout: Literal["separate", "joined", "by group"] = "separate"
    """Whether matrices hold several parts.

    "joined" is gate, mixed and small in one. "by group" is mixed and gate in one, b and a in
    another, both with the rows of a key head together.
    """
    norm_eps: float | None = None
    """The epsilon of that norm, if it is not the model's."""
    names: Names | None = None
    """The other tensors of such a layer, if they are not named as in attention layers."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The flags of a family that its ``config.json`` does not state."""

    title: str
    """Its models' name."""
    model_type: str
    """Its ``model_type``, or for a part of another model the one in ``text_config``."""
    defaults: Mapping[str, Any]
    """The defaults of transformers' configuration class for absent keys.

    A key that is present and null means "none", so they are merged under the file's own keys.
    """
    windows: Literal["none", "all", "all switched", "switched", "pattern"] = "none"
    """Which layers have the ``sliding_window`` if ``layer_types`` does not say.

    "all" and "none" ignore ``layer_types``. "switched" needs ``use_sliding_window``, and begins at
    ``max_window_layers``, and "all switched" at the first layer. In "pattern" every
    ``sliding_window_pattern``-th layer has none.
    """
    implements: tuple[str, ...] = ()
    """The keys of `mie.checkpoint.refusals` that are not refused in this family."""
    always_qkv_bias: bool = False
    """Whether queries, keys and values have biases, whether the file says so or not."""
    o_bias_key: str | None = "attention_bias"
    """The flag for a bias of attention's output, or None if it never has one."""
    qk_norm: QkNorm | None = None
    """The norms of queries and keys: of each head, before or after RoPE, or of all heads."""
    norms_hidden_size: bool = False
    """Whether the norm of queries has the size of the hidden states, and so have the heads."""
    rope_by_type: bool = False
    """Whether ``rope_scaling`` is for full attention, and ``rope_parameters`` by layer type."""
    rope_is_interleaved: bool = False
    """Whether RoPE turns channels 2i and 2i + 1, and not i and i + Dh/2."""
    rope_layers: Literal["all", "listed", "sliding", "switched", "given"] = "all"
    """Which layers have RoPE.

    "listed" is ``no_rope_layers``, "sliding" is those with a window, if there are any, "switched"
    is all or none by ``position_embedding_type``, and "given" is all if there is a ``rope_theta``.
    """
    norm_offset: int = 0
    """Added to the weights of all norms."""
    expert_size: str | None = None
    """The key of the intermediate size of its experts, or None if it has none."""
    expert_activation: Literal["silu", "clamped_silu"] = "silu"
    experts_have_biases: bool = False
    """Whether experts and their router have biases."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    gates_attention: bool = False
    """Whether queries come with gates, whose sigmoids multiply the results of attention."""
    recurrent: Recurrent | None = None
    """The layers that keep a state, if the family has any."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the file that take precedence over those of a Llama: its own name to Llama's."""
    names: Names = field(default_factory=Names)
