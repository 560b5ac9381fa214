"""Check the setting ``speculative_config``. It has vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mie.config.params.values import integer, real
from mie.errors import ConfigError, shown

METHODS = ("ngram", "suffix")

MOST_DRAFTS = 64
"""Largest ``num_speculative_tokens``. A longer run of right guesses is rare."""

_OF_MODELS = {
    *("model", "draft_model_config", "draft_tensor_parallel_size", "quantization", "revision"),
    *("code_revision", "max_model_len", "speculative_token_tree", "draft_load_config"),
    *("draft_parallel_config", "moe_backend", "attention_backend", "disable_padded_drafter_batch"),
}
"""vLLM's keys for drafts that a model makes."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How the next tokens of a sequence are guessed. The guesses never change a token.

    ``ngram`` continues as the sequence did after the same last tokens. ``suffix`` also looks at
    finished answers of the same ``cache_salt``, and takes the most frequent continuation.
    """

    method: str
    num_speculative_tokens: int = 7
    """Maximum number of drafts of a sequence in a step."""
    prompt_lookup_max: int = 4
    """Maximum number of last tokens that must occur before."""
    prompt_lookup_min: int = 1
    """Minimum number of last tokens that must occur before."""
    adaptive: bool = True
    """Whether fewer drafts are made where they pay less. Otherwise, always the maximum."""
    suffix_decoding_max_tree_depth: int = 24
    """Maximum number of last tokens that are compared, for ``suffix``."""
    suffix_decoding_max_cached_requests: int = 1000
    """Maximum number of finished answers that are kept, for ``suffix``. 0 keeps none."""
    suffix_decoding_min_token_prob: float = 0.1
    """Minimum share of a continuation among all that were found, for ``suffix``."""


def speculation_of(value: object) -> SpeculativeConfig | None:
    """Return the setting ``speculative_config``, checked, or None without drafts.

    Raises:
        ConfigError: a key is unknown or not supported, or a value is out of range.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config must be an object; got {shown(value)}")
    given = dict(value)
    if given.get("model") in ("ngram", "[ngram]"):  # vLLM's older spelling
        given["method"] = "ngram"
        del given["model"]
    known, method = [each.name for each in fields(SpeculativeConfig)], given.get("method")
    for name in ("method", *given):
        if name in _OF_MODELS or (name == "method" and method not in METHODS):
            raise ConfigError(
                f"speculative_config has {name} {shown(given.get(name))}; mie looks drafts up, and "
                f"runs no draft models or heads (use method {' or '.join(METHODS)} alone)"
            )
        if name not in known:
            has = f"speculative_config has no key {shown(name)}"
            raise ConfigError(f"{has}; it has {', '.join(known)} (leave it out)")
        if name.startswith("suffix_") and method != "suffix":
            raise ConfigError(f"{name} needs method 'suffix'; got {shown(method)} (leave it out)")
    lookup = [given.get(name) for name in ("prompt_lookup_min", "prompt_lookup_max")]
    if given.keys() & {"prompt_lookup_min", "prompt_lookup_max"}:  # one stands for both
        low, high = (lookup[1] if lookup[0] is None else lookup[0]), lookup[1] or lookup[0]
        given |= {"prompt_lookup_min": low, "prompt_lookup_max": high}
    found = SpeculativeConfig(**given)
    _check(vars(found))
    return found


def _check(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first value that is out of range."""
    name = "prompt_lookup_max"
    longest = integer(f"{name} of speculative_config", values[name], 1)
    for name, low, high in (
        ("prompt_lookup_min", 1, longest),
        ("num_speculative_tokens", 1, MOST_DRAFTS),
        ("suffix_decoding_max_tree_depth", 1, None),
        ("suffix_decoding_max_cached_requests", 0, None),
    ):
        integer(f"{name} of speculative_config", values[name], low, high)
    name = "suffix_decoding_min_token_prob"
    real(f"{name} of speculative_config", values[name], 0, 1)
    if not isinstance(values["adaptive"], bool):
        got = shown(values["adaptive"])
        raise ConfigError(f"adaptive of speculative_config must be true or false; got {got}")
