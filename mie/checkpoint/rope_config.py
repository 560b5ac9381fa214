"""Read how a ``config.json`` turns positions into rotations."""

from __future__ import annotations

from dataclasses import dataclass

from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.size_limits import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, MIN_FACTOR, MIN_THETA


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into rotations. ``mie.model.rope`` has the formulas.

    A field that the ``rope_type`` does not use keeps its default.
    """

    rope_type: str = "default"  # "default", "linear", "llama3" or "yarn"
    theta: float = 10000.0
    factor: float = 1.0  # how much the context is stretched
    original_max_position_embeddings: int | None = None  # context of pretraining: llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole channel pairs


def read_rope(reader: JsonReader) -> RopeConfig:
    """Return the rotations of a model, from the keys of transformers 4 or 5."""
    scaling = reader.nested(
        "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
    )
    rope_type = scaling.text("rope_type", default=scaling.text("type", default="default"))
    outside = reader.number("rope_theta", default=10000.0, low=MIN_THETA, high=MAX_THETA)
    theta = scaling.number("rope_theta", default=outside, low=MIN_THETA, high=MAX_THETA)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    context = reader.integer("max_position_embeddings", maximum=MAX_CONTEXT)
    if rope_type == "linear":
        return RopeConfig(rope_type=rope_type, theta=theta, factor=_stretch(scaling, context))
    name = "original_max_position_embeddings"
    original = reader.optional_integer(name, maximum=MAX_CONTEXT)
    original = original or scaling.optional_integer(name, maximum=MAX_CONTEXT)
    if rope_type == "llama3":
        return _llama3_rope(scaling, theta, original)
    return _yarn_rope(scaling, theta, original, context)


def _factor(scaling: JsonReader, key: str, default: float | None = None) -> float:
    return scaling.number(key, default=default, low=MIN_FACTOR, high=MAX_FACTOR)


def _stretch(scaling: JsonReader, context: int, default: float | None = None) -> float:
    """Return the factor that stretches ``context``. The result must be within the limit."""
    factor = _factor(scaling, "factor", default)
    if not 1 <= context * factor <= MAX_CONTEXT:
        raise scaling.error(
            "factor", f"must turn a context of {context} into one of 1 … {MAX_CONTEXT}", factor
        )
    return factor


def _llama3_rope(scaling: JsonReader, theta: float, original: int | None) -> RopeConfig:
    low, high = _factor(scaling, "low_freq_factor"), _factor(scaling, "high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"must exceed low_freq_factor ({low:g})", high)
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=_factor(scaling, "factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_rope(
    scaling: JsonReader, theta: float, original: int | None, max_position_embeddings: int
) -> RopeConfig:
    context = original or max_position_embeddings
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=_stretch(scaling, context, max_position_embeddings / context),
        original_max_position_embeddings=original,
        beta_fast=_factor(scaling, "beta_fast", 32.0),
        beta_slow=_factor(scaling, "beta_slow", 1.0),
        attention_factor=scaling.optional_number(
            "attention_factor", low=MIN_FACTOR, high=MAX_FACTOR
        ),
        # Zero stands for "not set".
        mscale=scaling.optional_number("mscale", low=0.0, high=MAX_FACTOR),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", low=0.0, high=MAX_FACTOR),
        truncate=scaling.flag("truncate", default=True),
    )
