"""Fields of requests that have no effect: which are accepted, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OFF: tuple[Any, ...] = (None, False)
EMPTY: tuple[Any, ...] = (None, [], {}, "")

_STRUCTURED = "send structured_outputs or response_format"
_OF_CHATS = "it belongs to /v1/chat/completions"
_NO_EFFORT = "the chat template decides (chat_template_kwargs)"
_NO_STORE = "nothing is stored between requests"

Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Maps names to the values that change nothing and the reason for refusing any other."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What a dialect does with the fields that its protocol does not declare."""

    unsupported: Unsupported
    without_effect: frozenset[str]
    """Fields that may have any value, since none could change an answer."""


_UNSUPPORTED: Unsupported = {
    "echo": (OFF, "it belongs to /v1/completions"),
    "add_special_tokens": (OFF, "the chat template writes them"),
    "include_obfuscation": (OFF, "chunks are not padded"),
    "suffix": (EMPTY, "text is generated after the prompt only"),
    "best_of": ((None, 1), "ask for n choices and choose among them"),
    "use_beam_search": (OFF, "beam search runs offline only (LLM.beam_search)"),
    "length_penalty": ((None, 1, 1.0), "it belongs to beam search"),
    "early_stopping": (OFF, "it belongs to beam search"),
    "guided_json": (EMPTY, _STRUCTURED),
    "guided_regex": (EMPTY, _STRUCTURED),
    "guided_choice": (EMPTY, _STRUCTURED),
    "guided_grammar": (EMPTY, _STRUCTURED),
    "guided_decoding_backend": (EMPTY, "llguidance computes masks"),
    "guided_whitespace_pattern": (EMPTY, _STRUCTURED),
    "grammar": (EMPTY, _STRUCTURED),
    "json_schema": (EMPTY, _STRUCTURED),
    "structural_tag": (EMPTY, _STRUCTURED),
    "tools": ((None,), _OF_CHATS),
    "tool_choice": ((None, "none"), _OF_CHATS),
    "functions": ((None,), "send tools"),
    "function_call": ((None, "none"), "send tool_choice"),
    "web_search_options": ((None,), "the server does not search the web"),
    "modalities": ((None, ["text"]), "the model reads and writes text only"),
    "audio": ((None,), "the model reads and writes text only"),
    "prediction": ((None,), "predicted outputs are not used"),
    "reasoning_effort": ((None, "none"), _NO_EFFORT),
    "include_reasoning": ((None, True), _OF_CHATS),
    "thinking_token_budget": ((None,), "reasoning has no limit of its own; use max_tokens"),
    "verbosity": ((None, "medium"), "the model has no such setting"),
    "moderation": (EMPTY, "nothing is moderated"),
    "store": (OFF, _NO_STORE),
    "previous_response_id": ((None,), _NO_STORE),
    "documents": (EMPTY, "put them into a message"),
    "mm_processor_kwargs": (EMPTY, "the model reads text only"),
    "logits_processors": (EMPTY, "callbacks in a step are not supported"),
    "logprob_token_ids": (EMPTY, "logprobs names the most likely tokens only"),
    "prompt_logprob_token_ids": (EMPTY, "prompt_logprobs names the most likely tokens only"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs covers the whole prompt"),
    "truncation_side": ((None, "left"), "prompts keep their last tokens"),
    "repetition_detection": (EMPTY, "loops are not detected; use repetition_penalty"),
    "watermarking": (EMPTY, "tokens are not watermarked"),
    "kv_transfer_params": (EMPTY, "the KV cache is not shared between servers"),
    "vllm_xargs": (EMPTY, "there are no plug-ins"),
    "prompt_embeds": (EMPTY, "prompts are text or token ids"),
    "request_id": ((None,), "the server chooses ids; it logs the header x-request-id"),
    "timings_per_token": (OFF, "ask for stream_options.include_usage"),
    "mirostat": ((None, 0), "use top_p or min_p"),
    "typical_p": ((None, 1, 1.0), "use top_p or min_p"),
    "xtc_probability": ((None, 0, 0.0), "use top_p or min_p"),
    "dry_multiplier": ((None, 0, 0.0), "use repetition_penalty"),
    "dynatemp_range": ((None, 0, 0.0), "use temperature"),
    "cache_prompt": ((None, True), "send skip_reading_prefix_cache instead"),
    "n_probs": ((None, 0), "ask for logprobs"),
    "lora": (EMPTY, "there are no adapters"),
    "service_tier": ((None, "auto", "default"), "there is one tier"),
}

_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",  # equal prefixes are cached anyway
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",  # says nothing without tools
    }
)

OPENAI = Fields(unsupported=_UNSUPPORTED, without_effect=_WITHOUT_EFFECT)
