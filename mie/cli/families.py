"""List the supported families in a table: ``mie inspect --families``, and docs/models.md."""

import json
from collections.abc import Iterator
from pathlib import Path

from mie.checkpoint.families import FAMILIES
from mie.checkpoint.family import Family
from mie.checkpoint.gguf.architectures import ARCHITECTURES
from mie.text.tools.families import FAMILY_FORMATS, NO_FORMATS

_WINDOWS, _QK_NORMS, _ROPE_LAYERS, _RECURRENT, _KEYS = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
).values()
"""Words for values of a family's flags and for keys."""


def families_table() -> str:
    """Return the table of families in Markdown."""
    heads = ("models", "architecture", "`model_type`", "beyond a plain Llama", "GGUF")
    rows: list[tuple[str, ...]] = [(*heads, "calls of tools", "reasoning"), ("---",) * 7]
    for name, family in FAMILIES.items():
        features = ", ".join(_features(family)) or "-"
        formats = FAMILY_FORMATS.get(name, NO_FORMATS)
        ggufs = [own for own, row in ARCHITECTURES.items() if name in row.families]
        parsers = (_code(formats.calls), _code(formats.reasoning))
        more = (", ".join(map(_code, ggufs)) or "-", *parsers)
        rows.append((family.title, f"`{name}`", f"`{family.model_type}`", features, *more))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _code(name: str | None) -> str:
    return "-" if name is None else f"`{name}`"


def _features(family: Family) -> Iterator[str]:
    """Yield the features of the family that a plain Llama lacks."""
    names = family.names
    if family.recurrent is not None:
        yield _RECURRENT[family.recurrent.kind]
    if family.gates_attention:
        yield "gated attention"
    if family.windows in _WINDOWS:
        yield _WINDOWS[family.windows]
    has_qkv_bias = family.always_qkv_bias or family.qkv_bias_key == "qkv_bias"
    if has_qkv_bias:
        yield "biases of q, k and v"
    for key, text in _KEYS.items():
        if key in family.implements and not (has_qkv_bias and key == "attention_bias"):
            yield text
    if family.expert_size is not None:
        yield "experts"
    if names.router_bias is not None:
        yield "a router with sigmoids"
    if family.expert_activation == "clamped_silu":
        yield "a clamped activation"
    if family.names.sinks is not None:
        yield "attention sinks"
    if "shared_intermediate_size" in family.defaults and family.expert_size is not None:
        yield "a shared expert"
    if family.qk_norm is not None:
        yield _QK_NORMS[family.qk_norm]
    if names.attention_post_norm is not None:
        yield "norms after the blocks" if names.attention_norm is None else "four norms a layer"
    if family.norm_offset:
        yield "1 + w norms"
    if "hidden_activation" in family.defaults:
        yield "GELU"
    if family.scales_embeddings:
        yield "scaled embeddings"
    if "query_pre_attn_scalar" in family.defaults:
        yield "scores by `query_pre_attn_scalar`"
    if family.rope_by_type:
        yield "RoPE by layer type"
    if family.rope_is_interleaved:
        yield "interleaved RoPE"
    if family.rope_layers in _ROPE_LAYERS:
        yield _ROPE_LAYERS[family.rope_layers]
    if len(names.qkv) == 1 or len(names.gate_up) == 1 or len(names.expert_gate_up) == 1:
        yield "fused matrices"
