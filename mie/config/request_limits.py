"""Limit what one request may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mie.config.engine import check_settings, keyword_checked
from mie.config.settings import setting
from mie.errors import ConfigError
from mie.reprs import changed_repr

CHARS_PER_TOKEN = 8
"""Characters per token. Ordinary text has three to five."""
MIN_PROMPT_CHARS = 2**16


def _limit(most: int, help: str) -> Any:
    """Return a limit that can only be lowered. ``most`` is its default and maximum."""
    return setting(most, "integer", help, "requests", low=1, high=most)


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a single request, checked before any work is done for it.

    The defaults are far above normal requests and far below what harms an engine. They apply to
    every `SamplingParams`. The engine setting ``request_limits`` lowers them, for servers with
    untrusted callers. docs/settings.md explains every field.
    """

    __repr__ = changed_repr

    max_prompt_chars: int | None = setting(
        None,
        "integer",
        "characters of a prompt; a longer one is refused before it is encoded",
        "requests",
        low=1,
        default_text=f"{CHARS_PER_TOKEN} for each token of `max_model_len`, and at least "
        f"{MIN_PROMPT_CHARS}",
    )
    max_n: int = _limit(1024, "choices of a request; each keeps a copy of the prompt's token ids")
    max_stop_strings: int = _limit(
        256, "stop strings; each is searched for in every new piece of text"
    )
    max_stop_chars: int = _limit(
        1024, "characters of a stop string; a stream holds back that much text"
    )
    max_stop_token_ids: int = _limit(4096, "ids of `stop_token_ids`")
    max_allowed_token_ids: int = _limit(2**20, "ids of `allowed_token_ids`")
    max_logit_bias: int = _limit(2**20, "entries of `logit_bias`")
    max_forced_tokens: int = _limit(2**20, "ids of `trace_decode_token_ids`")
    max_bad_words: int = _limit(1024, "words of `bad_words`; each may have two lists of token ids")
    max_bad_word_length: int = _limit(
        256, "characters of a bad word, which may have four times as many token ids"
    )
    max_grammar_chars: int = _limit(
        2**16, "characters of the schema, regex, choices or grammar in `structured_outputs`"
    )
    max_extra_args: int = _limit(1024, "entries of `extra_args`")
    max_request_id_chars: int = _limit(1024, "characters of a request id")
    max_cache_salt_chars: int = _limit(1024, "characters of a cache salt")

    def __post_init__(self) -> None:
        check_settings(self)

    def prompt_chars(self, max_model_len: int) -> int:
        """Return the maximum number of characters of a prompt for a context length in tokens."""
        if self.max_prompt_chars is not None:
            return self.max_prompt_chars
        return max(CHARS_PER_TOKEN * max_model_len, MIN_PROMPT_CHARS)


DEFAULT_LIMITS = RequestLimits()


def limits_of(value: RequestLimits | Mapping[str, Any] | None) -> RequestLimits:
    """Return the limits of the setting ``request_limits``, which lowers some by name.

    Raises:
        ConfigError: a limit is unknown or out of range.
    """
    if isinstance(value, RequestLimits):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"request_limits must be a dictionary or RequestLimits; got {value!r}")
    return RequestLimits(**{str(name): limit for name, limit in (value or {}).items()})
