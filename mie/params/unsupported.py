"""Refuse the parameters of vLLM that mie does not have, unless their value has no effect.

Each table maps a name to the values that have no effect, and the reason for refusing any other.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from mie.errors import ConfigError
from mie.params.values import shown

T = TypeVar("T")

Unsupported: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]

NOTHING = (None, False)

_NO_ADAPTERS = "mie has no LoRA adapters; merge the adapter into the checkpoint"
_TEXT_ONLY = "mie runs text models only"
_NO_WATERMARK = "tokens are not watermarked"

SAMPLING: Unsupported = {
    "best_of": ((None, 1), "ask for n choices and choose among them"),
    "use_beam_search": (NOTHING, "call LLM.beam_search with BeamSearchParams"),
    "length_penalty": ((None, 1.0), "it belongs to BeamSearchParams"),
    "early_stopping": (NOTHING, "it belongs to beam search"),
    "logits_processors": ((None, []), "Python callbacks in a step are not supported"),
    "guided_decoding": (NOTHING, "structured_outputs is its name"),
    "logprob_token_ids": (NOTHING, "logprobs returns only the most likely tokens"),
    "flat_logprobs": ((False, None), "logprobs are a dict for each position"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs covers the whole prompt"),
    "prompt_logprob_token_ids": (NOTHING, "prompt_logprobs returns only the most likely tokens"),
    "stream_interval": ((None, 1), "a stream gives an output after every step"),
    "repetition_detection": (NOTHING, "loops are not detected; use repetition_penalty"),
    "thinking_token_budget": (NOTHING, "reasoning is not counted apart; use max_tokens"),
    "watermarking": (NOTHING, _NO_WATERMARK),
    "routed_experts_prompt_start": ((0, None), "routed experts are not returned"),
    "skip_clone": ((False, True), "parameters are always copied"),
}
"""Parameters of vLLM's ``SamplingParams``."""

BEAM_SEARCH: Unsupported = {
    "structured_outputs": (NOTHING, "beams are not constrained; use SamplingParams"),
    "watermarking": (NOTHING, _NO_WATERMARK),
    "allowed_token_ids": (NOTHING, "beams are not constrained; use SamplingParams"),
}
"""Parameters of vLLM's ``BeamSearchParams``."""

CALLS: Unsupported = {
    "lora_request": ((None,), _NO_ADAPTERS),
    "mm_processor_kwargs": ((None, {}), _TEXT_ONLY),
    "tokenization_kwargs": ((None, {}), "SamplingParams has truncate_prompt_tokens; else pass ids"),
    "prompt_token_ids": ((None,), "pass {'prompt_token_ids': ids} as the prompt"),
    "guided_options_request": ((None,), "SamplingParams.structured_outputs is its name"),
    "arrival_time": ((None,), "the engine stamps the arrival"),
    "trace_headers": ((None, {}), "requests are not traced with OpenTelemetry"),
    "data_parallel_rank": ((None,), "mie computes on one device"),
    "session_id": ((None,), "the prefix cache finds earlier turns by their tokens"),
    "kv_hints": ((None,), "the prefix cache finds blocks by their tokens"),
    "prompt_text": ((None,), "pass {'prompt': text, 'prompt_token_ids': ids} as the prompt"),
    "reasoning_ended": ((None,), "chat_prompt says how an answer is read"),
    "reasoning_parser_kwargs": ((None, {}), "chat_template_kwargs of chat_prompt is its name"),
    "reset_running_requests": ((False,), "abort the requests first"),
    "reset_connector": ((False,), "engines do not exchange KV blocks"),
    "internal": ((False,), "mie uses the caller's request ids"),
    "timeout": ((None,), "shutdown waits for the current step only"),
    "usage_context": ((None,), "mie reports no usage"),
    "stat_loggers": ((None, []), "call get_metrics()"),
    "start_engine_loop": ((True,), "an AsyncLLM starts its thread at once"),
    "enable_multiprocessing": ((False,), "mie has no worker processes"),
}
"""Parameters of methods of vLLM's ``LLM``, ``LLMEngine`` and ``AsyncLLM``."""


def neutral_accepted(table: Unsupported) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that it has the parameters of ``table`` at values without effect.

    They are keywords, and attributes that may be read and assigned. Any other value raises
    `ConfigError`.
    """

    def decorate(cls: type[T]) -> type[T]:
        original = cls.__init__

        @functools.wraps(original)
        def __init__(self: T, **kwargs: Any) -> None:
            for name in table.keys() & kwargs.keys():
                _check_neutral(table, name, kwargs.pop(name))
            original(self, **kwargs)

        cls.__init__ = __init__  # type: ignore[assignment]  # the same keywords, and a few more
        for name in table:
            setattr(cls, name, _Neutral(table, name))
        return cls

    return decorate


def refuse_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first of ``options`` that is not in `CALLS` without effect.

    ``function`` is the function that was called with them beside its own parameters.
    """
    for name, value in options.items():
        if name in CALLS:
            _check_neutral(CALLS, name, value)
            continue
        known = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
        if "chat_template_kwargs" in known:
            hint += " (variables of the template go into chat_template_kwargs)"
        raise ConfigError(f"{function.__qualname__} has no parameter {name!r}; {hint}")


class _Neutral:
    """An attribute that has its first neutral value and accepts only neutral values."""

    def __init__(self, table: Unsupported, name: str) -> None:
        self._table = table
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._table[self._name][0][0]

    def __set__(self, instance: object, value: Any) -> None:
        _check_neutral(self._table, self._name, value)


def _check_neutral(table: Unsupported, name: str, value: Any) -> None:
    neutral, reason = table[name]
    if not any(type(value) is type(each) and value == each for each in neutral):
        allowed = " or ".join(map(repr, neutral))
        raise ConfigError(
            f"{name} is not supported: {reason} (leave it at {allowed}); got {shown(value)}"
        )
