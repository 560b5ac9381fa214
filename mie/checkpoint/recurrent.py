"""Read the sizes of layers that keep a state."""

import math
from collections.abc import Callable, Mapping

from mie.checkpoint.family import Family
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.refusals import activation_name
from mie.checkpoint.size_limits import MAX_EPS, MAX_WIDTH, MIN_EPS
from mie.errors import UnsupportedModelError, shown
from mie.model.layers.config import RecurrentConfig, RecurrentLayers
from mie.ops.layers.recurrent_shape import Kind, RecurrentShape

RECURRENT = "recurrent"
"""The type of these layers, whatever the family calls it."""

MAX_KERNEL = 64
SILU = ("silu", "swish")
INFINITIES = (math.inf, {"__float__": "Infinity"})  # as JSON, and as transformers 5 writes it


def read_recurrent(reader: JsonReader, family: Family, hidden_size: int) -> RecurrentConfig | None:
    """Return the sizes of the recurrent layers, or None in a family without any.

    Raises:
        UnsupportedModelError: the layers have a feature that is not implemented.
        ModelError: a size is missing or contradicts another.
    """
    if family.recurrent is None:
        return None
    if (name := activation_name(reader.values)) not in SILU:
        raise UnsupportedModelError(
            f"{reader.source}: activation {shown(name)} of recurrent layers is not supported "
            f"(supported: {SILU[0]!r})"
        )
    kind, eps = family.recurrent.kind, family.recurrent.norm_eps
    bias = {"conv": "conv_bias", "delta": None, "mamba": "mamba_proj_bias"}[kind]
    conv_bias = {"conv": "conv_bias", "delta": None, "mamba": "mamba_conv_bias"}[kind]
    is_doubled = reader.flag("linear_allow_neg_eigval", default=False)
    return RecurrentConfig(
        shape=_SHAPES[kind](reader, hidden_size),
        family=family.recurrent,
        conv_bias=conv_bias is not None and reader.flag(conv_bias, default=False),
        bias=bias is not None and reader.flag(bias, default=False),
        largest_beta=2.0 if is_doubled else 1.0,
        norm_eps=eps or reader.number("rms_norm_eps", default=1e-6, low=MIN_EPS, high=MAX_EPS),
    )


def _conv_shape(reader: JsonReader, hidden_size: int) -> RecurrentShape:
    return RecurrentShape(
        kind="conv",
        kernel_size=reader.integer("conv_L_cache", maximum=MAX_KERNEL),
        num_groups=0,
        num_heads=1,
        key_dim=0,
        value_dim=hidden_size,
    )


def _delta_shape(reader: JsonReader, hidden_size: int) -> RecurrentShape:
    # OLMo has as many heads as attention.
    default = reader.integer("num_attention_heads", maximum=MAX_WIDTH)
    groups = reader.integer("linear_num_key_heads", default=default, maximum=MAX_WIDTH)
    heads = reader.integer("linear_num_value_heads", default=default, maximum=MAX_WIDTH)
    if heads % groups:
        raise reader.error(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads ({groups})",
            heads,
        )
    default = int(0.75 * hidden_size / groups)
    key_dim = reader.integer("linear_key_head_dim", default=default, maximum=MAX_WIDTH)
    value_dim = reader.integer("linear_value_head_dim", default=2 * key_dim, maximum=MAX_WIDTH)
    return RecurrentShape(
        kind="delta",
        kernel_size=reader.integer("linear_conv_kernel_dim", maximum=MAX_KERNEL),
        num_groups=groups,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _mamba_shape(reader: JsonReader, hidden_size: int) -> RecurrentShape:
    limits = reader.values.get("time_step_limit")
    if limits not in (None, *([0, each] for each in INFINITIES)):
        raise UnsupportedModelError(
            f"{reader.source}: time_step_limit {shown(limits)} is not supported (supported: none)"
        )
    heads = reader.integer("mamba_n_heads", maximum=MAX_WIDTH)
    groups = reader.integer("mamba_n_groups", maximum=MAX_WIDTH)
    width = reader.integer("mamba_expand", maximum=MAX_KERNEL) * hidden_size
    head_dim = reader.values.get("mamba_d_head")
    if head_dim == "auto":
        head_dim = width // heads
    if not isinstance(head_dim, int) or heads * head_dim != width or heads % groups:
        raise reader.error(
            "mamba_n_heads",
            f"must be a multiple of mamba_n_groups ({groups}), and times mamba_d_head be {width}",
            heads,
        )
    return RecurrentShape(
        kind="mamba",
        kernel_size=reader.integer("mamba_d_conv", maximum=MAX_KERNEL),
        num_groups=groups,
        num_heads=heads,
        key_dim=reader.integer("mamba_d_state", maximum=MAX_WIDTH),
        value_dim=head_dim,
    )


_SHAPES: Mapping[Kind, Callable[[JsonReader, int], RecurrentShape]] = {
    "conv": _conv_shape,
    "delta": _delta_shape,
    "mamba": _mamba_shape,
}


def recurrent_layers(
    reader: JsonReader, family: RecurrentLayers, num_layers: int
) -> tuple[bool, ...]:
    """Return the recurrent layers if ``layer_types`` does not name them."""
    if family.kind == "conv":
        listed = reader.values.get("full_attn_idxs")
        attend = range(num_layers) if listed is None else reader.token_ids("full_attn_idxs")
        return tuple(layer not in attend for layer in range(num_layers))
    if family.kind == "mamba":
        return (True,) * num_layers
    interval = reader.integer("full_attention_interval", maximum=MAX_WIDTH)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
