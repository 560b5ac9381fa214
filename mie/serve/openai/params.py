"""From the body of a generation request to what the engine runs."""

from __future__ import annotations

from typing import Any

from mie.params.sampling import RequestOutputKind, SamplingParams
from mie.serve.errors import invalid, naming_structure
from mie.serve.openai.protocol import GenerationBody
from mie.serve.serving import Serving

ENGINE_PARAMS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "skip_reading_prefix_cache",
)
"""Fields that are sampling parameters of the same name and meaning."""


def sampling_params(
    body: GenerationBody, serving: Serving, structure_name: str, **more: Any
) -> SamplingParams:
    """Return the sampling parameters of a request over the server's defaults.

    ``structure_name`` is the field that says what the answer must be.

    Raises:
        ApiError: a value is out of range.
        ConfigError: values contradict each other.
    """
    values = {**serving.defaults}
    for name in ENGINE_PARAMS:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    values |= {name: value for name, value in more.items() if value is not None}
    limit = serving.facts.max_num_seqs
    if values.get("n", 1) > limit:
        raise invalid(f"n is {values['n']}; the server runs at most {limit} (--max-num-seqs)", "n")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not available with stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    with naming_structure(structure_name):
        return SamplingParams(**values, output_kind=kind)


def wants_usage(body: GenerationBody) -> tuple[bool, bool]:
    """Return whether a stream ends with the usage, and whether every chunk has it."""
    options = body.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(
        options.include_usage and options.continuous_usage_stats
    )
