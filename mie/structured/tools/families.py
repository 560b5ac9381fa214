"""List the formats in which each family writes calls of tools and reasoning."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FamilyFormats:
    """The formats of a family by the names of their parsers, where a chat template has no tag."""

    calls: str | None = None
    """A name in `formats.CALLS`."""
    unread: str = ""
    """Its calls, if they are of a kind that is not read."""
    reasoning: str | None = None
    """A name in `formats.REASONING`."""


_MISTRAL = FamilyFormats(calls="mistral", reasoning="mistral")
_HERMES = FamilyFormats(calls="hermes", reasoning="qwen3")
_GRANITE = FamilyFormats(calls="granite", reasoning="granite")
_GLM = FamilyFormats(unread="a name on a line before JSON")

FAMILY_FORMATS: Mapping[str, FamilyFormats] = {
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": FamilyFormats(calls="hermes"),
    "Qwen2MoeForCausalLM": FamilyFormats(calls="hermes"),
    "Qwen3ForCausalLM": _HERMES,
    "Qwen3MoeForCausalLM": _HERMES,
    "SmolLM3ForCausalLM": _HERMES,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": FamilyFormats(calls="hermes"),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "Olmo3ForCausalLM": FamilyFormats(unread="Python", reasoning="olmo3"),
    "Phi3ForCausalLM": FamilyFormats(calls="phi4_mini_json"),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "Exaone4ForCausalLM": _HERMES,
    "HunYuanDenseV1ForCausalLM": FamilyFormats(calls="hunyuan_a13b", reasoning="qwen3"),
    "GptOssForCausalLM": FamilyFormats(calls="openai", reasoning="openai_gptoss"),
    "Lfm2ForCausalLM": FamilyFormats(unread="Python"),
    "Lfm2MoeForCausalLM": FamilyFormats(unread="Python"),
    "Qwen3_5ForCausalLM": FamilyFormats(unread="XML", reasoning="qwen3"),
    "Qwen3_5MoeForCausalLM": FamilyFormats(unread="XML", reasoning="qwen3"),
    "SeedOssForCausalLM": FamilyFormats(unread="XML", reasoning="seed_oss"),
}
"""The formats by the name in ``architectures``.

Llama is not here: models of many formats have its architecture, so a chat template must tell.
"""

NO_FORMATS = FamilyFormats()
