"""Refuse by name the features of a ``config.json`` that ``mie`` does not implement.

A model that runs without a feature it was trained with still writes fluent text, only worse. So
anything that changes the computation and is not implemented is refused before weights are read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mie.checkpoint.size_limits import MAX_LAYERS
from mie.errors import UnsupportedModelError, shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_NAMED = 8  # Layer types that a message names.
ACTIVATIONS = ("silu", "swish")  # Both are one function.

# Keys that enable a feature by any value except null, false, zero, one or an empty list or object.
# One is harmless: a single expert, or a multiplier of 1.
_FEATURES: Mapping[str, Sequence[str]] = {
    "mixture of experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_intermediate_size",
    ),
    "logit softcapping": ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"),
    "multi-head latent attention": ("kv_lora_rank", "q_lora_rank"),
    "scaling multipliers": (
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "logit_scale",
    ),
    "layers without RoPE": ("no_rope_layers", "no_rope_layer_interval"),
}
# Keys that enable a feature by being true.
_SWITCHES: Mapping[str, str] = {
    "is_encoder_decoder": "encoder-decoder models",
    "add_cross_attention": "cross attention",
    "rope_interleaved": "interleaved RoPE",
}
# Keys that some families implement and that transformers silently ignores in the others.
_BIASES: Mapping[str, str] = {
    "attention_bias": "attention biases of this family",
    "mlp_bias": "MLP biases of this family",
}
_LONGROPE = "LongRoPE: the rotation of cached keys changes once the original context is passed"
_ROPE_REASONS = {
    "dynamic": (
        "dynamic NTK: its rotation depends on the current length, so cached keys would depend on "
        "how a prompt was cut into chunks"
    ),
    "longrope": _LONGROPE,
    "su": _LONGROPE,
}


def refuse_unsupported(
    config: Mapping[str, Any],
    architecture: str,
    implemented: Mapping[str, Sequence[str]],
    source: str,
) -> None:
    """Raise unless everything that ``config`` asks for is implemented.

    ``implemented`` has, for each supported architecture, the keys below that it implements.

    Raises:
        UnsupportedModelError: something is not implemented. The message names all of it.
    """
    problems = [
        *_problems(config, architecture, implemented),
        *_rope_problems(config),
        *_layer_type_problems(config),
    ]
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        raise UnsupportedModelError(
            f"{source}: {' and '.join(problems)} {verb} not supported; "
            f"supported architectures: {', '.join(implemented)}"
        )


def _problems(
    config: Mapping[str, Any], architecture: str, implemented: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    if architecture not in implemented:
        nearest = difflib.get_close_matches(architecture[:100], implemented, n=1, cutoff=0.0)
        yield f"architecture {shown(architecture)} (nearest: {nearest[0]!r})"
    own = implemented.get(architecture, ())
    for feature, keys in _FEATURES.items():
        given = [key for key in keys if config.get(key) not in (None, 0, 1, [], {})]
        used = [key for key in given if key not in own]
        if used:
            yield f"feature {feature!r} ({', '.join(used)})"
    for key, feature in _SWITCHES.items():
        if config.get(key) and key not in own:
            yield f"feature {feature!r} ({key})"
    for key, feature in _BIASES.items():
        if config.get(key) and key not in implemented.get(architecture, _BIASES):
            yield f"feature {feature!r} ({key} in {architecture})"
    activation = config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        yield f"activation {shown(activation)} (hidden_act; supported: 'silu')"


def _rope_problems(config: Mapping[str, Any]) -> Iterator[str]:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        return  # a bad value, which ModelConfig reports
    if any(isinstance(value, Mapping) for value in scaling.values()):
        yield "feature 'RoPE parameters per layer type'"
        return
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        reason = _ROPE_REASONS.get(rope_type) if isinstance(rope_type, str) else None
        reason = reason or f"supported types: {', '.join(ROPE_TYPES)}"
        yield f"RoPE type {shown(rope_type)} ({reason})"
    if scaling.get("mrope_section"):
        yield "feature 'multimodal RoPE' (mrope_section)"
    fraction = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1):
        yield f"feature 'partial RoPE' (partial_rotary_factor {shown(fraction)})"


def _layer_type_problems(config: Mapping[str, Any]) -> Iterator[str]:
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        return  # a bad value, which ModelConfig reports
    unknown = [kind for kind in layer_types if kind not in LAYER_TYPES]
    names = dict.fromkeys(shown(kind) for kind in unknown[:MAX_LAYERS])
    for name in list(names)[:MAX_NAMED]:
        yield f"layer type {name} (supported: {', '.join(LAYER_TYPES)})"
