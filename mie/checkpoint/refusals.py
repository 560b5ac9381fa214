"""Refuse by name the features of a ``config.json`` that ``mie`` does not implement.

A model that runs without a feature it was trained with still writes fluent text, only worse. So
anything that changes the computation and is not implemented is refused before weights are read.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.checkpoint.family import Family
from mie.checkpoint.rope import scalings
from mie.checkpoint.size_limits import MAX_LAYERS
from mie.errors import UnsupportedModelError, shown
from mie.model.config import Activation

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_NAMED = 8  # Layer types that a message names.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_ENDING = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|Model)$")

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_FEATURES, _SWITCHES, _BIASES, _REASONS, _ROPE_REASONS, _ROPE_KEYS = _TABLES.values()
"""The refused keys by feature, and features by their key.

* A key of `_FEATURES` enables its feature by any value except null, false, zero, one or an empty
  list or object. One is harmless: a single expert, or a multiplier of 1.
* A key of `_SWITCHES` enables its feature by being true.
* Some families implement a key of `_BIASES`, and transformers silently ignores it in the others.
* `_REASONS` and `_ROPE_REASONS` have the reason why an architecture or a type of RoPE is refused.
* `_ROPE_KEYS` are keys of RoPE that vLLM reads, with the value that has no effect.
"""
_LLAMA_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "rms_norm_eps"),
)
_DISGUISE = (
    ". Its configuration has the keys of a Llama; if its code is Llama's, run it with "
    'hf_overrides={"architectures": ["LlamaForCausalLM"]}'
)


def refuse_unsupported(
    config: Mapping[str, Any], architecture: str, families: Mapping[str, Family], source: str
) -> None:
    """Raise unless every feature of ``config`` is implemented.

    ``config`` has the defaults of its family. ``families`` are the supported families.

    Raises:
        UnsupportedModelError: something is not implemented. The message names all of it.
    """
    family = families.get(architecture)
    own = family.implements if family else ()
    problems = [
        *_problems(config, architecture, families, own),
        *(
            problem
            for scaling in scalings(config, family is not None and family.rope_by_type).values()
            for problem in _rope_problems(config, scaling, own)
        ),
        *_layer_type_problems(config, family),
    ]
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        raise UnsupportedModelError(
            f"{source}: {' and '.join(problems)} {verb} not supported; "
            f"supported architectures: {', '.join(families)}"
            f"{_DISGUISE if _may_be_llama(config, architecture, families, problems) else ''}"
        )


def _may_be_llama(
    config: Mapping[str, Any],
    architecture: str,
    families: Mapping[str, Family],
    problems: Sequence[str],
) -> bool:
    """Return whether nothing but the name distinguishes a configuration from Llama's."""
    is_unknown = architecture not in families and len(problems) == 1
    return is_unknown and all(config.get(key) is not None for key in _LLAMA_KEYS)


def _nearest(architecture: str, families: Iterable[str]) -> str | None:
    """Return a hint at the family with the nearest name, or None if none is near.

    The names are compared without their endings, because common endings make all names similar.
    """
    stems = {_ENDING.sub("", name): name for name in families}
    near = difflib.get_close_matches(_ENDING.sub("", architecture[:100]), stems, n=1, cutoff=0.8)
    return f"nearest: {stems[near[0]]!r}" if near else None


def _problems(
    config: Mapping[str, Any], architecture: str, families: Mapping[str, Family], own: Sequence[str]
) -> Iterator[str]:
    if architecture not in families:
        text = config.get("text_config")  # the part that is a language model
        config = {**(text if isinstance(text, Mapping) else {}), **config}
        reason = _REASONS.get(architecture) or _nearest(architecture, families)
        yield f"architecture {shown(architecture)}" + (f" ({reason})" if reason else "")
    for feature, keys in _FEATURES.items():
        given = [key for key in keys if config.get(key) not in (None, 0, 1, [], {})]
        used = [key for key in given if key not in own]
        if used:
            yield f"feature {feature!r} ({', '.join(used)})"
    for key, feature in _SWITCHES.items():
        if config.get(key) and key not in own:
            yield f"feature {feature!r} ({key})"
    for key, feature in _BIASES.items():
        if config.get(key) and key not in own and architecture in families:
            yield f"feature {feature!r} ({key} in {architecture})"
    activation = activation_name(config)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        yield f"activation {shown(activation)} (hidden_act; supported: {known})"


def activation_name(config: Mapping[str, Any]) -> Any:
    """Return the activation that a configuration names. Gemma's newer key takes precedence."""
    return config.get("hidden_activation") or config.get("hidden_act") or "silu"


def _rope_problems(config: Mapping[str, Any], scaling: object, own: Sequence[str]) -> Iterator[str]:
    if not isinstance(scaling, Mapping):
        return  # a bad value, which ModelConfig reports
    if any(isinstance(value, Mapping) for value in scaling.values()):
        yield "feature 'RoPE parameters per layer type'"
        return
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    is_own = "longrope" in own and rope_type in ("longrope", "su", "yarn")
    is_own = is_own or ("alpha" in own and rope_type == "dynamic" and bool(scaling.get("alpha")))
    if rope_type not in ROPE_TYPES and not is_own:
        reason = _ROPE_REASONS.get(rope_type) if isinstance(rope_type, str) else None
        reason = reason or f"supported types: {', '.join(ROPE_TYPES)}"
        yield f"RoPE type {shown(rope_type)} ({reason})"
    if scaling.get("mrope_section") and "mrope_section" not in own:
        yield "feature 'multimodal RoPE' (mrope_section)"
    for key, neutral in _ROPE_KEYS.items():
        if scaling.get(key) not in (None, neutral):
            yield f"RoPE's {key} {shown(scaling[key])}"
    fraction = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1) and "partial_rotary_factor" not in own:
        yield f"feature 'partial RoPE' (partial_rotary_factor {shown(fraction)})"
    if scaling.get("llama_4_scaling_beta") and "llama_4_scaling_beta" not in own:
        yield "feature 'scores that grow with the position' (llama_4_scaling_beta)"


def _layer_type_problems(config: Mapping[str, Any], family: Family | None) -> Iterator[str]:
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        return  # a bad value, which ModelConfig reports
    own = family.recurrent.layer_types if family and family.recurrent else ()
    known = (*LAYER_TYPES, *own)
    unknown = [kind for kind in layer_types if kind not in (*known, "attention")]
    names = dict.fromkeys(shown(kind) for kind in unknown[:MAX_LAYERS])
    for name in list(names)[:MAX_NAMED]:
        yield f"layer type {name} (supported: {', '.join(known)})"
