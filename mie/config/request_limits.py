"""Limit the size of one request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mie.base.reprs import changed_repr
from mie.config.engine import check_settings, keyword_checked
from mie.config.settings import declared_in
from mie.errors import ConfigError

CHARS_PER_TOKEN = 8
"""Characters per token. Ordinary text has three to five."""
MIN_PROMPT_CHARS = 2**16


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a single request, checked before any work is done for it.

    The defaults are far above normal requests, and far too low to harm an engine. They apply to
    every `SamplingParams`. The engine setting ``request_limits`` lowers them, for servers with
    untrusted callers. docs/settings.md explains every field.
    """

    SETTINGS: ClassVar = declared_in(__file__, "RequestLimits")

    __repr__ = changed_repr

    max_prompt_chars: int | None = None
    max_n: int = 1024
    max_stop_strings: int = 256
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 4096
    max_allowed_token_ids: int = 2**20
    max_logit_bias: int = 2**20
    max_forced_tokens: int = 2**20
    max_bad_words: int = 1024
    max_bad_word_length: int = 256
    max_grammar_chars: int = 2**16
    max_extra_args: int = 1024
    max_request_id_chars: int = 1024
    max_cache_salt_chars: int = 1024

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
