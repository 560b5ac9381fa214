"""What one request may ask for at most."""

from dataclasses import dataclass, fields

from mie.config import check_integer, keyword_checked


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The most that one request may ask for, checked before any work is done for it.

    The defaults are far above what people ask for and far below what hurts an engine. They hold
    for every `SamplingParams`. `SamplingParams.verified` takes lower ones, for a server whose
    callers are not trusted.
    """

    max_n: int = 1024
    """Choices of a request, each of which keeps a copy of the prompt's token ids. OpenAI's API
    allows 128, and studies of pass@k use some hundreds."""
    max_stop_strings: int = 256
    """Stop strings, each of which is searched for in every new piece of text."""
    max_stop_chars: int = 4096
    """Characters of a stop string; a stream holds back that much text."""
    max_stop_token_ids: int = 4096
    max_allowed_token_ids: int = 2**20
    """This and the next are above the size of every vocabulary: the largest have 262,144 tokens."""
    max_logit_bias: int = 2**20
    max_forced_tokens: int = 2**20
    """Tokens of ``trace_decode_token_ids``."""
    max_bad_words: int = 1024
    """Words; each may be spelled by two lists of token ids."""
    max_bad_word_length: int = 1024
    """Characters of a bad word, and token ids of its spelling."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_integer(field.name, getattr(self, field.name), 1)


DEFAULT_LIMITS = RequestLimits()
