"""Read how positions rotate queries and keys, in every spelling of ``config.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from mie.base.arithmetic import power
from mie.checkpoint.family import Family
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.size_limits import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, MIN_FACTOR, MIN_THETA
from mie.model.config import RopeConfig


def scalings(config: Mapping[str, Any], by_type: bool) -> dict[str | None, object]:
    """Return the objects that scale RoPE, by the type of the layers that each is for.

    None stands for all types. In a family ``by_type``, ``rope_scaling`` is for full attention.
    """
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if not by_type:
        return {None: scaling or parameters or {}}
    typed = dict(parameters) if isinstance(parameters, Mapping) else {}
    return {**typed, "full_attention": scaling} if scaling else typed


def read_ropes(
    reader: JsonReader, family: Family, kinds: Sequence[str], head_dim: int
) -> tuple[RopeConfig | None, ...]:
    """Return the rotations of layers of these types. None is a layer without RoPE."""
    if not family.rope_by_type:
        key = "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
        rope = _rope(reader, reader.nested(key), family, head_dim)
        return tuple(rope if turns else None for turns in _turns(reader, family, kinds))
    of_types: dict[str, RopeConfig] = {}
    values = {str(kind): value for kind, value in scalings(reader.values, True).items()}
    typed = JsonReader(values=values, source=reader.source)
    local = "rope_local_base_freq"
    for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", local)):
        theta = theta if reader.values.get(theta) is not None else "rope_theta"
        of_types[kind] = _rope(reader, typed.nested(kind), family, head_dim, theta)
    return tuple(of_types[kind] for kind in kinds)


def _turns(reader: JsonReader, family: Family, kinds: Sequence[str]) -> list[bool]:
    """Return the layers that rotate queries and keys."""
    num_layers = len(kinds)
    if family.rope_layers == "sliding" and "sliding_attention" in kinds:
        return [kind == "sliding_attention" for kind in kinds]
    if family.rope_layers == "switched":
        return [reader.values.get("position_embedding_type") == "rope"] * num_layers
    if family.rope_layers == "given":
        theta = reader.nested("rope_parameters").values.get("rope_theta")
        return [theta is not None or reader.values.get("rope_theta") is not None] * num_layers
    if family.rope_layers != "listed":
        return [True] * num_layers
    listed = reader.values.get("no_rope_layers")  # 1 is a layer with RoPE
    if listed is None:
        interval = reader.integer("no_rope_layer_interval", maximum=MAX_CONTEXT)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or not all(each in (0, 1) for each in listed):
        raise reader.error("no_rope_layers", "must be a list of 0 and 1", listed)
    if len(listed) < num_layers:
        raise reader.error(
            "no_rope_layers", f"must have num_hidden_layers ({num_layers}) entries", len(listed)
        )
    return [bool(each) for each in listed[:num_layers]]


def _rope(
    reader: JsonReader,
    scaling: JsonReader,
    family: Family,
    head_dim: int,
    theta_key: str = "rope_theta",
) -> RopeConfig:
    """Return one kind of rotations, from the keys of transformers 4 or 5."""
    rope_type = scaling.text("rope_type", default=scaling.text("type", default="default"))
    theta = reader.number(theta_key, default=10000.0, low=MIN_THETA, high=MAX_THETA)
    theta = scaling.number("rope_theta", default=theta, low=MIN_THETA, high=MAX_THETA)
    if "longrope" in family.implements and rope_type != "default":
        rope_type = "longrope"  # Phi-3's files also call it "su" or "yarn"
    if rope_type == "dynamic":  # Hunyuan's alpha fixes the rotations
        alpha = _factor(scaling, "alpha")
        rope_type, theta = "default", theta * power(alpha, head_dim, max(1, head_dim - 2))
    partial = scaling if scaling.values.get("partial_rotary_factor") is not None else reader
    share = partial.number("partial_rotary_factor", default=1.0, low=MIN_FACTOR, high=1.0)
    if int(head_dim * share) % 2 or not int(head_dim * share):
        raise partial.error(
            "partial_rotary_factor", f"must turn pairs of channels of head_dim {head_dim}", share
        )
    name = "original_max_position_embeddings"
    context = reader.integer("max_position_embeddings", maximum=MAX_CONTEXT)
    own = scaling.optional_integer(name, maximum=MAX_CONTEXT)
    original = reader.optional_integer(name, maximum=MAX_CONTEXT) or own
    about: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": theta,
        "partial_rotary_factor": share,
        "original_max_position_embeddings": original,
    }
    before = original or context
    attention_factor = scaling.optional_number("attention_factor", low=MIN_FACTOR, high=MAX_FACTOR)
    if rope_type == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=share)
    if rope_type == "linear":
        about["original_max_position_embeddings"] = None
        return RopeConfig(**about, factor=_stretch(scaling, context))
    if rope_type == "llama3":
        low, high = _factor(scaling, "low_freq_factor"), _factor(scaling, "high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"must exceed low_freq_factor ({low:g})", high)
        return RopeConfig(
            **about, factor=_factor(scaling, "factor"), low_freq_factor=low, high_freq_factor=high
        )
    if rope_type == "longrope":
        return RopeConfig(
            **{**about, "original_max_position_embeddings": before},
            factor=_factor(scaling, "factor", max(MIN_FACTOR, context / before)),
            attention_factor=attention_factor,
            short_factor=_factors(scaling, "short_factor", int(head_dim * share) // 2),
            long_factor=_factors(scaling, "long_factor", int(head_dim * share) // 2),
        )
    assert rope_type == "yarn", rope_type
    beta = scaling.number("llama_4_scaling_beta", default=0.0, low=0.0, high=MAX_FACTOR)
    return RopeConfig(
        **about,
        factor=_stretch(scaling, before, context / before),
        beta_fast=_factor(scaling, "beta_fast", 32.0),
        beta_slow=_factor(scaling, "beta_slow", 1.0),
        attention_factor=attention_factor,
        # Zero stands for "not set".
        mscale=scaling.optional_number("mscale", low=0.0, high=MAX_FACTOR),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", low=0.0, high=MAX_FACTOR),
        truncate=scaling.flag("truncate", default=True),
        is_tempered=beta > 0,
    )


def _factor(scaling: JsonReader, key: str, default: float | None = None) -> float:
    return scaling.number(key, default=default, low=MIN_FACTOR, high=MAX_FACTOR)


def _factors(scaling: JsonReader, key: str, count: int) -> tuple[float, ...]:
    """Return the list of ``count`` divisors under ``key``."""
    values = scaling.values.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise scaling.error(key, f"must be a list of {count} numbers, one for each pair", values)
    numbers = JsonReader(values=dict(enumerate(values)), source=f"{scaling.source}, {key}")  # type: ignore[arg-type]
    return tuple(_factor(numbers, index) for index in numbers.values)


def _stretch(scaling: JsonReader, context: int, default: float | None = None) -> float:
    """Return the factor that stretches ``context``. The result must be within the limit."""
    factor = _factor(scaling, "factor", default)
    if not 1 <= context * factor <= MAX_CONTEXT:
        raise scaling.error(
            "factor", f"must turn a context of {context} into one of 1 … {MAX_CONTEXT}", factor
        )
    return factor
