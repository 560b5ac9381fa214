"""What a user asks of the sampler, spelled as in vLLM."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mie.config import check_integer, check_real, check_switch, keyword_checked
from mie.errors import ConfigError

MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(enum.Enum):
    """Which part of a request each of its outputs carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Bad values and unknown names raise `ConfigError`, which is a ``ValueError``.
    """

    n: int = 1
    """Choices to generate; they share the prompt's KV blocks."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep every token."""
    min_p: float = 0.0
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, whatever else is running."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: until the context is full."""
    min_tokens: int = 0
    """Before so many tokens, EOS and stop_token_ids cannot be drawn, and stop strings are text."""
    logprobs: int | None = None
    """Report this many most likely tokens at every position (-1: all), besides the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. Their logits are computed: prefix hits are skipped."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    trace_decode_token_ids: Sequence[int] | None = None
    """Forced decoding: these tokens are generated first, with their true log-probabilities. EOS and
    stop tokens among them do not end the sequence."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
        ):
            check_switch(name, getattr(self, name))
        for name in ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.stop and not self.detokenize:
            raise ConfigError("stop strings need detokenize=True; got detokenize=False")

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1)
        check_integer("top_k", self.top_k, -1)
        check_integer("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                limit = f"min_tokens must be at most max_tokens ({self.max_tokens})"
                raise ConfigError(f"{limit}; got {self.min_tokens}")
        check_real("temperature", self.temperature, 0, 1000)
        check_real("top_p", self.top_p, 0, 1, above_low=True)
        check_real("min_p", self.min_p, 0, 1)
        check_real("repetition_penalty", self.repetition_penalty, 0.001, 1000)
        check_real("presence_penalty", self.presence_penalty, -2, 2)
        check_real("frequency_penalty", self.frequency_penalty, -2, 2)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when there is none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """The token ids that each parameter names: they must be in the vocabulary."""
        names = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids", "logit_bias")
        return {name: tuple(getattr(self, name) or ()) for name in names}


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ConfigError(f"{name} must be a list of token ids; got {value!r}")
    ids = tuple(value)
    for token_id in ids:
        check_integer(f"each of {name}", token_id, 0)
    if not ids and name != "stop_token_ids":
        raise ConfigError(f"{name} must name at least one token, or be None; got an empty list")
    return tuple(int(token_id) for token_id in ids)


def _stop_strings(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or isinstance(strings, bytes | Mapping):
        raise ConfigError(f"stop must be a string or a list of strings; got {value!r}")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"each of stop must be a string that is not empty; got {string!r}")
    return strings


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers; got {value!r}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        # JSON has only string keys, and clients of the OpenAI API send them.
        is_number = isinstance(key, str) and key.isdecimal() and len(key) < 20
        token_id = int(key) if is_number else key
        check_integer("each key of logit_bias", token_id, 0)
        check_real(f"logit_bias of token {token_id}", amount, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        bias[int(token_id)] = float(amount)
    return bias or None
