"""Read llama.cpp's architectures, and how its converter writes their families."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mie.checkpoint.families import FAMILIES
from mie.checkpoint.size_limits import MAX_EXPERTS
from mie.model.config import Names


@dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """The facts of an architecture that its files do not state."""

    family: str
    """The name in `FAMILIES`."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """The families of files with one of these keys, after the architecture's name."""
    is_permuted: bool = False
    """Whether the rows of queries and keys are interleaved."""
    norms_hold_one: bool = False
    """Whether the weights of norms are w + 1 where the family's own files hold w."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``config.json`` for absent keys."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that stand for other ones than usual."""

    @property
    def families(self) -> tuple[str, ...]:
        """The families that files of the architecture may have."""
        return (self.family, *self.variants.values())


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    name: GgufArchitecture(**row)
    for name, row in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}
"""The architectures that are read, by their names in ``general.architecture``.

Source: the folder ``conversion`` of llama.cpp, a class for each architecture.
"""


def family_of(values: Mapping[str, Any]) -> str | None:
    """Return the family of a file with these metadata, or None if its architecture is not read."""
    name = values.get("general.architecture")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        return None
    variants = (own for key, own in row.variants.items() if values.get(f"{name}.{key}"))
    return next(variants, row.family)


def split_names(names: Names) -> Names:
    """Return the names of tensors where gate and up of experts are matrices of their own."""
    if len(names.expert_gate_up) > 1:
        return names
    usual = Names()
    return replace(
        names,
        gate_up=usual.gate_up,
        down=usual.down,
        expert_gate_up=usual.expert_gate_up,
        expert_down=usual.expert_down,
        experts_take_turns=False,
    )


def layer_names(values: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """Return the Hugging Face modules that each tensor of a layer holds, one after another.

    ``values`` are the metadata of a file of a known family.
    """
    name, family = values["general.architecture"], family_of(values)
    assert family is not None
    names, num_experts = split_names(FAMILIES[family].names), values.get(f"{name}.expert_count")
    if not isinstance(num_experts, int) or num_experts > MAX_EXPERTS:
        num_experts = 0
    own: dict[str, str | None] = {
        "attn_norm": names.attention_norm,
        "post_attention_norm": names.attention_post_norm,
        "ffn_norm": names.mlp_norm,
        "post_ffw_norm": names.mlp_post_norm,
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_output": names.attention_out,
        "ffn_down": names.down,
        "ffn_gate_inp": names.router,
        "ffn_gate_inp_shexp": names.shared_gate,
        "attn_sinks": names.sinks,
        **ARCHITECTURES[name].names,
    }
    if len(names.qkv) > 1:
        own |= zip(("attn_q", "attn_k", "attn_v"), names.qkv, strict=True)
    is_fused = len(names.gate_up) == 1
    own |= zip(("ffn_up",) if is_fused else ("ffn_gate", "ffn_up"), names.gate_up, strict=True)
    of_experts = zip(
        ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        (*names.expert_gate_up, names.expert_down),
        strict=False,
    )
    of_shared = zip(("gate", "up", "down"), (*names.gate_up, names.down), strict=False)
    return {
        **{key: (name,) for key, name in own.items() if name is not None},
        **{key: [name.format(each) for each in range(num_experts)] for key, name in of_experts},
        **{f"ffn_{key}_shexp": (name,) for key, name in of_shared if num_experts},
        "attn_qkv": names.qkv,
    }
