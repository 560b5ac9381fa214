"""Define the facts of a family: flags, defaults, and names of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mie.model.config import Names, QkNorm
from mie.model.layers.config import ExpertActivation, RecurrentLayers


@dataclass(frozen=True, kw_only=True)
class Family:
    """The flags of a family that its ``config.json`` does not state."""

    title: str
    """The name of the family's models."""
    model_type: str
    """The ``model_type`` in ``config.json``, or in ``text_config`` for a part of another model."""
    defaults: Mapping[str, Any]
    """The defaults of transformers' configuration class for absent keys.

    A key that is present and null means "none", so they are merged under the file's own keys.
    """
    windows: Literal["none", "all", "all switched", "switched", "pattern"] = "none"
    """The layers with the ``sliding_window`` if ``layer_types`` does not name them.

    "all" and "none" ignore ``layer_types``. "switched" needs ``use_sliding_window``, and begins at
    ``max_window_layers``, and "all switched" at the first layer. In "pattern" every
    ``sliding_window_pattern``-th layer has none.
    """
    implements: tuple[str, ...] = ()
    """The keys of `mie.checkpoint.refusals` that are not refused in this family."""
    qkv_bias_key: str = "attention_bias"
    """The flag for biases of queries, keys and values."""
    always_qkv_bias: bool = False
    """Whether queries, keys and values have biases, regardless of the file."""
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
    expert_activation: ExpertActivation = "silu"
    experts_have_biases: bool = False
    """Whether experts and their router have biases."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    gates_attention: bool = False
    """Whether queries come with gates. Their sigmoids multiply the results of attention."""
    recurrent: RecurrentLayers | None = None
    """The layers that keep a state, if the family has any."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the file that take precedence over a Llama's keys: the file's name to Llama's."""
    names: Names = field(default_factory=Names)
