"""Read the sizes of a sparse model's experts, and the layers that have them."""

from mie.checkpoint.family import Family
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.size_limits import MAX_EXPERTS, MAX_EXPERTS_OF_MODEL, MAX_LAYERS, MAX_WIDTH
from mie.errors import UnsupportedModelError, shown
from mie.model.layers.config import Experts


def read_experts(reader: JsonReader, family: Family, num_layers: int) -> Experts | None:
    """Return the experts of a model, or None if its family has none.

    Raises:
        ModelError: a value is bad.
    """
    if family.expert_size is None:
        return None
    # transformers 5 writes Qwen3's number under the second key, beside which is a default here.
    keys = [key for key in ("num_local_experts", "num_experts") if key in reader.values]
    # A dense Granite 4 states 0 experts.
    if family.recurrent is not None and reader.values[keys[0]] == 0:
        return None
    number = reader.integer(keys[0], maximum=MAX_EXPERTS)
    is_normalised = True
    if "norm_topk_prob" in family.defaults:
        is_normalised = reader.flag("norm_topk_prob", default=False)
    _check_activation(reader, family)
    _check_sigmoids(reader, family, is_normalised)
    layers = _layers(reader, num_layers)
    if number * sum(layers) > MAX_EXPERTS_OF_MODEL:
        expected = f"must be at most {MAX_EXPERTS_OF_MODEL} in all layers"
        raise reader.error(keys[0], expected, number * sum(layers))
    return Experts(
        number=number,
        num_chosen=reader.integer("num_experts_per_tok", maximum=number),
        size=reader.integer(family.expert_size, maximum=MAX_WIDTH),
        activation=family.expert_activation,
        has_biases=family.experts_have_biases,
        is_normalised=is_normalised,
        has_router_bias=family.names.router_bias is not None
        and reader.flag("use_expert_bias", default=True),
        layers=layers,
        are_beside_mlp="shared_intermediate_size" in family.defaults
        and bool(reader.values["shared_intermediate_size"]),
        dense_size=0 if all(layers) else reader.integer("intermediate_size", maximum=MAX_WIDTH),
    )


def _layers(reader: JsonReader, num_layers: int) -> tuple[bool, ...]:
    """Return the sparse layers: all, or by two keys of Qwen or a key of LFM2."""
    step = reader.integer("decoder_sparse_step", default=1, maximum=MAX_LAYERS)
    dense = reader.token_ids("mlp_only_layers")
    if not all(0 <= layer < num_layers for layer in dense):
        expected = f"must be numbers of layers, 0 … {num_layers - 1}"
        raise reader.error("mlp_only_layers", expected, reader.values["mlp_only_layers"])
    first = reader.integer("num_dense_layers", default=0, minimum=0, maximum=num_layers)
    return tuple(
        layer >= first and layer not in dense and (layer + 1) % step == 0
        for layer in range(num_layers)
    )


def _check_sigmoids(reader: JsonReader, family: Family, is_normalised: bool) -> None:
    """Raise unless a router with sigmoids works as `ops.experts.route_by_sigmoid`."""
    if family.names.router_bias is None:
        return
    if not is_normalised:
        raise UnsupportedModelError(
            f"{reader.source}: norm_topk_prob false is not supported in {family.title}"
        )
    if (scale := reader.values["routed_scaling_factor"]) != 1:
        raise UnsupportedModelError(
            f"{reader.source}: routed_scaling_factor {shown(scale)} is not supported; supported: 1"
        )


def _check_activation(reader: JsonReader, family: Family) -> None:
    """Raise unless the clamped activation is `ops.activation.clamped_silu_mul`."""
    if family.expert_activation != "clamped_silu":
        return
    for key in ("swiglu_alpha", "swiglu_limit"):
        value, supported = reader.values[key], family.defaults[key]
        if value not in (None, supported):
            raise UnsupportedModelError(
                f"{reader.source}: {key} {shown(value)} is not supported; supported: {supported}"
            )
