"""Refuse the parameters of vLLM that mie does not have, unless their value has no effect."""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from mie.errors import ConfigError
from mie.params.values import shown

T = TypeVar("T")

NOTHING = (None, False)

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "ask for n choices and choose among them"),
    "use_beam_search": (NOTHING, "call LLM.beam_search with BeamSearchParams"),
    "length_penalty": ((None, 1.0), "it belongs to BeamSearchParams"),
    "early_stopping": (NOTHING, "it belongs to beam search"),
    "logits_processors": ((None, []), "Python callbacks in a step are not supported"),
    "guided_decoding": (NOTHING, "structured_outputs is its name"),
    "logprob_token_ids": (NOTHING, "logprobs returns only the most likely tokens"),
    "flat_logprobs": (NOTHING, "logprobs are a dict for each position"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs covers the whole prompt"),
    "stream_interval": ((None, 1), "a stream gives an output after every step"),
    "repetition_detection": (NOTHING, "loops are not detected; use repetition_penalty"),
    "thinking_token_budget": (NOTHING, "reasoning is not counted apart; use max_tokens"),
    "watermarking": (NOTHING, "tokens are not watermarked"),
}
"""Maps a name to the values that have no effect, and the reason for refusing any other."""


def unsupported_refused(cls: type[T]) -> type[T]:
    """Decorate a class so that it accepts the keywords in `UNSUPPORTED` at values without effect.

    Any other value raises `ConfigError`.
    """
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: T, **kwargs: Any) -> None:
        for name in UNSUPPORTED.keys() & kwargs.keys():
            _check_neutral(name, kwargs.pop(name))
        original(self, **kwargs)

    cls.__init__ = __init__  # type: ignore[assignment]  # the same keywords, and a few more
    return cls


def _check_neutral(name: str, value: Any) -> None:
    neutral, reason = UNSUPPORTED[name]
    if not any(type(value) is type(each) and value == each for each in neutral):
        allowed = " or ".join(map(repr, neutral))
        raise ConfigError(
            f"{name} is not supported: {reason} (leave it at {allowed}); got {shown(value)}"
        )
