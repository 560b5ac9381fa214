"""Fields of OpenAI's, vLLM's and llama.cpp's requests that have no effect here, and why."""

from __future__ import annotations

from typing import Annotated, Any

from mie.serve.body import Body, Unsupported, WithoutEffect

OFF = (False,)
EMPTY: tuple[Any, ...] = ([], {}, "")

_OF_CHATS = "it belongs to /v1/chat/completions"
_NO_EFFORT = "the chat template decides (chat_template_kwargs)"
NO_STORE = "nothing is stored between requests"
TEXT_ONLY = "the model reads and writes text only"

Structured = Annotated[Any, Unsupported("send structured_outputs or response_format", EMPTY)]
NotStored = Annotated[Any, Unsupported(NO_STORE)]


class OtherFields(Body):
    """The fields that mie knows and does not implement, and those that change no answer."""

    echo: Annotated[Any, Unsupported("it belongs to /v1/completions", OFF)] = None
    add_special_tokens: Annotated[Any, Unsupported("the chat template writes them", OFF)] = None
    suffix: Annotated[Any, Unsupported("text is generated after the prompt only", EMPTY)] = None
    best_of: Annotated[Any, Unsupported("ask for n choices and choose among them", (1,))] = None
    use_beam_search: Annotated[
        Any, Unsupported("beam search runs offline only (LLM.beam_search)", OFF)
    ] = None
    length_penalty: Annotated[Any, Unsupported("it belongs to beam search", (1,))] = None
    early_stopping: Annotated[Any, Unsupported("it belongs to beam search", OFF)] = None
    guided_json: Structured = None
    guided_regex: Structured = None
    guided_choice: Structured = None
    guided_grammar: Structured = None
    guided_decoding_backend: Annotated[Any, Unsupported("llguidance computes masks", EMPTY)] = None
    guided_whitespace_pattern: Structured = None
    grammar: Structured = None
    json_schema: Structured = None
    structural_tag: Structured = None
    tools: Annotated[Any, Unsupported(_OF_CHATS)] = None
    tool_choice: Annotated[Any, Unsupported(_OF_CHATS, ("none",))] = None
    functions: Annotated[Any, Unsupported("send tools")] = None
    function_call: Annotated[Any, Unsupported("send tool_choice", ("none",))] = None
    web_search_options: Annotated[Any, Unsupported("the server does not search the web")] = None
    modalities: Annotated[Any, Unsupported(TEXT_ONLY, (["text"],))] = None
    audio: Annotated[Any, Unsupported(TEXT_ONLY)] = None
    prediction: Annotated[Any, Unsupported("predicted outputs are not used")] = None
    reasoning_effort: Annotated[Any, Unsupported(_NO_EFFORT, ("none",))] = None
    include_reasoning: Annotated[Any, Unsupported(_OF_CHATS, (True,))] = None
    thinking_token_budget: Annotated[
        Any, Unsupported("reasoning has no limit of its own; use max_tokens")
    ] = None
    verbosity: Annotated[Any, Unsupported("the model has no such setting", ("medium",))] = None
    moderation: Annotated[Any, Unsupported("nothing is moderated", EMPTY)] = None
    store: Annotated[Any, Unsupported(NO_STORE, OFF)] = None
    previous_response_id: NotStored = None
    documents: Annotated[Any, Unsupported("put them into a message", EMPTY)] = None
    mm_processor_kwargs: Annotated[Any, Unsupported("the model reads text only", EMPTY)] = None
    logits_processors: Annotated[
        Any, Unsupported("callbacks in a step are not supported", EMPTY)
    ] = None
    logprob_token_ids: Annotated[
        Any, Unsupported("logprobs names the most likely tokens only", EMPTY)
    ] = None
    prompt_logprob_token_ids: Annotated[
        Any, Unsupported("prompt_logprobs names the most likely tokens only", EMPTY)
    ] = None
    prompt_logprob_start: Annotated[
        Any, Unsupported("prompt_logprobs covers the whole prompt", (0,))
    ] = None
    truncation_side: Annotated[Any, Unsupported("prompts keep their last tokens", ("left",))] = None
    repetition_detection: Annotated[
        Any, Unsupported("loops are not detected; use repetition_penalty", EMPTY)
    ] = None
    watermarking: Annotated[Any, Unsupported("tokens are not watermarked", EMPTY)] = None
    kv_transfer_params: Annotated[
        Any, Unsupported("the KV cache is not shared between servers", EMPTY)
    ] = None
    vllm_xargs: Annotated[Any, Unsupported("there are no plug-ins", EMPTY)] = None
    prompt_embeds: Annotated[Any, Unsupported("prompts are text or token ids", EMPTY)] = None
    request_id: Annotated[
        Any, Unsupported("the server chooses ids; it logs the header x-request-id")
    ] = None
    timings_per_token: Annotated[Any, Unsupported("ask for stream_options.include_usage", OFF)] = (
        None
    )
    mirostat: Annotated[Any, Unsupported("use top_p or min_p", (0,))] = None
    typical_p: Annotated[Any, Unsupported("use top_p or min_p", (1,))] = None
    xtc_probability: Annotated[Any, Unsupported("use top_p or min_p", (0,))] = None
    dry_multiplier: Annotated[Any, Unsupported("use repetition_penalty", (0,))] = None
    dynatemp_range: Annotated[Any, Unsupported("use temperature", (0,))] = None
    cache_prompt: Annotated[Any, Unsupported("send skip_reading_prefix_cache instead", (True,))] = (
        None
    )
    n_probs: Annotated[Any, Unsupported("ask for logprobs", (0,))] = None
    lora: Annotated[Any, Unsupported("there are no adapters", EMPTY)] = None
    service_tier: Annotated[Any, Unsupported("there is one tier", ("auto", "default"))] = None

    user: WithoutEffect = None
    metadata: WithoutEffect = None
    safety_identifier: WithoutEffect = None
    prompt_cache_key: WithoutEffect = None  # equal prefixes are cached anyway
    prompt_cache_retention: WithoutEffect = None
    prompt_cache_options: WithoutEffect = None
    parallel_tool_calls: WithoutEffect = None  # says nothing without tools
