"""Find the text model in the configuration of a larger one."""

from collections.abc import Mapping
from typing import Any

WRAPPERS = (
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models with a text part of a supported family, described in ``text_config``."""

_SHARED = (
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
    *("quantization", "quantization_config"),
)


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the configuration of a model's text part, and the keys of the parts left out.

    A model that is text alone is returned unchanged.
    """
    text, names = config.get("text_config"), config.get("architectures")
    if not isinstance(text, Mapping) or not isinstance(names, list | tuple):
        return config, ()
    if not any(name in names for name in WRAPPERS):
        return config, ()
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    own = {key: value for key, value in text.items() if key != "architectures"}
    if config.get("tie_word_embeddings") is not None:
        own["tie_word_embeddings"] = config["tie_word_embeddings"]
    others = [
        key for key in config if key.endswith("_config") and key not in ("text_config", *_SHARED)
    ]
    return {**own, **shared}, tuple(others)
