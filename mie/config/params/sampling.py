"""Define the sampling parameters of a request, with vLLM's names."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, TypeVar

from mie.base.refusals import neutral_accepted, refuses_names
from mie.config.engine import DEFAULT_LIMITS, RequestLimits, check_switch, keyword_checked
from mie.config.params import values
from mie.config.params.structured import StructuredOutputsParams, structure_from
from mie.errors import ConfigError, RequestError, shown

MAX_LOGIT_BIAS = 100.0

Token = TypeVar("Token")


class RequestOutputKind(enum.Enum):
    """Selects the content of each output of a stream. The names and values are vLLM's."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """The text and tokens since the previous output."""
    FINAL_ONLY = 2
    """All text and tokens, in one output at the end."""


# The lowest and the highest value of each number, or None for 2**63 - 1. (n: `RequestLimits`)
INTEGERS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "n": (1, None),
        "top_k": (-1, None),
        "min_tokens": (0, None),
        "logprobs": (-1, None),
        "prompt_logprobs": (-1, None),
        "seed": (-(2**63), 2**64 - 1),
        "max_tokens": (1, None),
        "truncate_prompt_tokens": (-1, None),
        "thinking_token_budget": (0, 2**31 - 1),
    }
)
REALS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 1000.0),
        "top_p": (0.0, 1.0),  # top_p must be above 0
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.001, 1000.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
    }
)
MAY_BE_NONE = (
    "logprobs",
    "prompt_logprobs",
    "seed",
    "max_tokens",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)
SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids")
LISTS = ("stop", "bad_words", "bad_words_token_ids", *TOKEN_LISTS)


class _Checked:
    """The values of an object when they were checked last, and the limits that they keep."""

    __slots__ = ("_checked",)
    _checked: tuple[Any, ...]


@refuses_names
@neutral_accepted
@keyword_checked
@dataclass(kw_only=True, slots=True)
class SamplingParams(_Checked):
    """Configures how the tokens of one request are chosen, and when the output ends.

    The names and their meaning are vLLM's, and many are OpenAI's. Every value is checked and
    converted to a plain Python value when the object is created. Fields may be assigned later.
    Every use begins with `verified`, and it checks them. A bad value or an unknown name raises
    `ConfigError`, a subclass of ``ValueError``. Parameters of vLLM that mie does not have are
    accepted only at the value that has no effect.

    n: Number of choices to generate for the prompt. They share its KV blocks; 1 to 1024 (OpenAI).
        Default: 1.
    temperature: Divisor of the logits. Lower values are less random, and 0 takes the most likely
        token; 0 to 1000 (OpenAI). Default: 1.0.
    top_p: Nucleus sampling. Keep the smallest set of most likely tokens with at least this
        cumulative probability. Among equal tokens it keeps the lowest ids; above 0, at most 1
        (Holtzman et al., 2019, arXiv:1904.09751). Default: 1.0.
    top_k: Maximum number of most likely tokens to keep, the lowest ids among equals. 0 or -1 keeps
        all; at least -1 (Fan et al., 2018, arXiv:1805.04833). Default: 0.
    min_p: Minimum probability of a token, relative to the most likely token's; 0 to 1 (Nguyen et
        al., 2024, arXiv:2407.01082). Default: 0.0.
    seed: Seed of the random numbers. The same prompt, parameters and seed give the same tokens,
        independent of other requests. None draws from the engine's seed; -2**63 to 2**64 - 1
        (OpenAI). Default: None.
    repetition_penalty: Penalty for the tokens of the prompt and the output. It divides their
        positive logits and multiplies their negative ones; 0.001 to 1000, and 1 has no effect
        (Keskar et al., 2019, arXiv:1909.05858). Default: 1.0.
    presence_penalty: Subtract this from the logit of every token in the output; -2 to 2 (OpenAI).
        Default: 0.0.
    frequency_penalty: Subtract this from the logit of a token once for each time that it is in the
        output; -2 to 2 (OpenAI). Default: 0.0.
    stop: Stop strings. The output ends before the first of them in its text; one string, or a list
        of up to 256 strings of up to 1024 characters (OpenAI). Default: None.
    stop_token_ids: Stop tokens. The output ends after any of them, without its text; a list of up
        to 4096 ids (vLLM). Default: None.
    bad_words: Ban every token that would complete one of these words in the output, with or without
        a space before it. This needs a tokenizer; a list of up to 1024 words of up to 256
        characters (vLLM). Default: None.
    bad_words_token_ids: Ban the last token of each of these lists where the output ends with the
        others; up to 2048 lists of token ids. `LLM` adds the spellings of ``bad_words`` (in vLLM
        they are only computed). Default: None.
    include_stop_str_in_output: Keep the stop string, or the text of the stop token, at the end of
        the text (vLLM). Default: False.
    ignore_eos: Continue after the model's end-of-text token (vLLM). Default: False.
    max_tokens: Maximum number of new tokens. None generates until the context is full; at least 1
        (OpenAI). Default: 16.
    min_tokens: Minimum number of new tokens. Until then end-of-text and stop tokens are banned, and
        stop strings are ignored; 0 to ``max_tokens`` (vLLM). Default: 0.
    logprobs: Number of most likely tokens to return log-probabilities for, in addition to the
        chosen token. -1 returns the whole vocabulary, and None no log-probabilities; at least -1
        (OpenAI). Default: None.
    prompt_logprobs: The same for each token of the prompt. The prompt is then computed without
        prefix hits; at least -1, or None (vLLM). Default: None.
    logit_bias: Numbers to add to the logits of tokens; a mapping of up to 2**20 ids to numbers from
        -100 to 100 (OpenAI). Default: None.
    allowed_token_ids: Ban every token that is not in this list; up to 2**20 ids (vLLM). Default:
        None.
    detokenize: Convert the tokens to text. Otherwise outputs have only token ids, and their
        log-probabilities no text (vLLM). Default: True.
    skip_special_tokens: Leave special tokens out of the text (vLLM). Default: True.
    spaces_between_special_tokens: Write a space between special tokens in the text (vLLM). Default:
        True.
    output_kind: Content of each output of a stream: everything so far, only the new part, or
        everything in a single output at the end; a `RequestOutputKind` (vLLM). Default: CUMULATIVE.
    truncate_prompt_tokens: Maximum number of prompt tokens. The last tokens are kept. -1 leaves
        room in the context for ``max_tokens``, and None keeps all; at least 1, or -1, or None
        (vLLM). Default: None.
    skip_reading_prefix_cache: Compute the prompt without prefix hits. Other requests can still hit
        its blocks; True or False, or None to let ``prompt_logprobs`` decide (vLLM). Default: None.
    trace_decode_token_ids: Generate these tokens first, with their true log-probabilities, and
        ignore stop tokens among them; up to 2**20 ids. Default: None.
    structured_outputs: A description of the output's text, such as JSON that a schema accepts
        (docs/structured.md). It needs a tokenizer and the extra ``structured``; a
        `StructuredOutputsParams`, or a mapping of its fields (vLLM). Default: None.
    thinking_token_budget: Maximum number of reasoning tokens. Then the closing tag is written. For
        chats with known tags of reasoning; at least 0, or None for no limit (vLLM).
        Default: None.
    extra_args: Data of the caller. It is returned and has no effect; a mapping of up to 1024
        entries (vLLM). Default: None.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._normalise(DEFAULT_LIMITS)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Return parameters where None stands for the default. ``max_tokens`` of None is no limit.

        Raises:
            ConfigError: a name is unknown, or a value is not allowed.
        """
        is_given = {name: each for name, each in given.items() if each is not None}
        return cls(**{"max_tokens": given.get("max_tokens", 16), **is_given})

    def clone(self) -> SamplingParams:
        """Return a deep copy. It is not checked again."""
        return copy.deepcopy(self)

    def verified(self, limits: RequestLimits = DEFAULT_LIMITS) -> SamplingParams:
        """Return a checked copy of plain values. Later assignments to this object do not change it.

        Raises:
            ConfigError: a field was assigned a value that is not allowed.
        """
        params = copy.copy(self)
        limit, *checked = self._checked
        # A dictionary can change without an assignment.
        is_open = self.logit_bias is not None or self.extra_args is not None
        if is_open or limit != limits or not all(map(is_, checked, _values_of(self))):
            for name in LISTS:
                if isinstance(getattr(self, name), Iterator):
                    raise ConfigError(
                        f"{name} is an iterator, which can be read only once; assign a list"
                    )
            params._normalise(limits)
        return params

    def _normalise(self, limits: RequestLimits) -> None:
        """Check every field, and replace it with a plain value."""
        for name, (low, high) in INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in MAY_BE_NONE:
                most = limits.max_n if name == "n" else high
                setattr(self, name, values.integer(name, value, low, most))
        for name, (lowest, highest) in REALS.items():
            value, above = getattr(self, name), name == "top_p"
            setattr(self, name, values.real(name, value, lowest, highest, above_low=above))
        for name in SWITCHES:
            check_switch(name, getattr(self, name))
        self._normalise_lists(limits)
        kind: object = self.output_kind
        if not isinstance(kind, RequestOutputKind):
            kinds = ", ".join(map(str, RequestOutputKind))
            raise ConfigError(f"output_kind must be one of {kinds}; got {shown(kind)}")
        extra: object = self.extra_args
        if extra is not None:
            if not isinstance(extra, Mapping):
                raise ConfigError(f"extra_args must be a mapping; got {shown(extra)}")
            if len(extra) > limits.max_extra_args:
                limit = limits.max_extra_args
                raise ConfigError(f"extra_args may have at most {limit} entries; got {len(extra)}")
            self.extra_args = dict(extra)
        self.structured_outputs = structure_from(self.structured_outputs, limits)
        self._refuse_contradictions()
        self._checked = (limits, *_values_of(self))  # type: ignore[misc]  # a slot of the base

    def _normalise_lists(self, limits: RequestLimits) -> None:
        if self.stop is not None:
            most = limits.max_stop_strings, limits.max_stop_chars
            kind = "a string or a list of strings"
            self.stop = values.strings(
                "stop", (self.stop,) if isinstance(self.stop, str) else self.stop, *most, kind=kind
            )
        most_tokens = (
            limits.max_stop_token_ids,
            limits.max_allowed_token_ids,
            limits.max_traced_tokens,
        )
        for name, limit in zip(TOKEN_LISTS, most_tokens, strict=True):
            if (ids := getattr(self, name)) is not None:
                may_be_empty = name == "stop_token_ids"
                setattr(self, name, values.token_ids(name, ids, limit, may_be_empty=may_be_empty))
        if self.logit_bias is not None:
            bias = values.biases(
                "logit_bias", self.logit_bias, limits.max_logit_bias, MAX_LOGIT_BIAS
            )
            self.logit_bias = bias or None
        length = limits.max_bad_word_length
        if self.bad_words is not None:
            words = values.strings("bad_words", self.bad_words, limits.max_bad_words, length)
            for word in words:
                if word.isspace():
                    raise ConfigError(
                        f"each of bad_words must have more than spaces; got {word!r} (ban a token "
                        "by bad_words_token_ids)"
                    )
            self.bad_words = words or None
        if self.bad_words_token_ids is not None:
            name, limit = "bad_words_token_ids", 2 * limits.max_bad_words
            lists = values.items(
                name, self.bad_words_token_ids, "a list of lists of token ids", limit
            )
            most_ids = 4 * (length + 1)  # a token for each byte of a word and of a space before it
            spelled = tuple(values.token_ids(f"each of {name}", ids, most_ids) for ids in lists)
            self.bad_words_token_ids = spelled or None

    def _refuse_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"min_tokens must be at most max_tokens ({self.max_tokens})"
            raise ConfigError(f"{limit}; got {self.min_tokens}")
        if self.stop and not self.detokenize:
            raise ConfigError("stop strings need detokenize=True; got detokenize=False")
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens must be at least 1, or -1, or None; got 0")
        if self.skip_reading_prefix_cache is not None:
            check_switch("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
            if self.prompt_logprobs is not None and not self.skip_reading_prefix_cache:
                raise ConfigError(
                    "skip_reading_prefix_cache=False contradicts prompt_logprobs, which need every "
                    "token of the prompt computed (leave it at None)"
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple. It may be empty."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def eos_in_effect(self, eos_token_ids: Sequence[int]) -> Sequence[int]:
        """Return the end-of-text tokens that end the output.

        Nothing can follow such a token in a structured output, even with ``ignore_eos``.
        """
        return () if self.ignore_eos and self.structured_outputs is None else eos_token_ids

    def end_token_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """Return all tokens that end the output."""
        return frozenset((*self.eos_in_effect(eos_token_ids), *(self.stop_token_ids or ())))

    @property
    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """The token ids in each parameter. They must be in the vocabulary."""
        names = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids", "logit_bias")
        named = {name: tuple(getattr(self, name) or ()) for name in names}
        bad_words = self.bad_words_token_ids or ()
        named["bad_words_token_ids"] = tuple([each for ids in bad_words for each in ids])
        return named


_values_of = attrgetter(*SamplingParams.__dataclass_fields__)


def truncated(
    token_ids: Sequence[Token], params: SamplingParams, max_model_len: int
) -> Sequence[Token]:
    """Return the last ``truncate_prompt_tokens`` tokens of a prompt.

    None keeps all tokens. -1 leaves room for ``max_tokens``, or one token, in a context of
    ``max_model_len`` tokens. At least one token is kept.

    Raises:
        RequestError: ``truncate_prompt_tokens`` is more than the context holds.
    """
    count = params.truncate_prompt_tokens
    if count is None:
        return token_ids
    if count > max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens is {count}; the context holds {max_model_len} (use -1 for as "
            "many as fit)"
        )
    if count < 0:
        count = max(1, max_model_len - (params.max_tokens or 1))
    return token_ids[-count:]


@refuses_names
@neutral_accepted
@keyword_checked
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Configures a search for the most likely continuations of a prompt.

    The names and their meaning are vLLM's. A bad value or an unknown name raises `ConfigError`.

    beam_width: Number of beams that are kept after every token and returned; 1 to 1024.
    max_tokens: Maximum number of new tokens of a beam; at least 1.
    ignore_eos: Continue after the model's end-of-text token. Default: False.
    temperature: Divide the logits by this before computing log-probabilities; 0 to 1000. 0
        leaves the logits as they are. Default: 0.0.
    length_penalty: Divide a beam's log-probability by its length to this power; -10 to 10.
        Values above 1 favour long beams (Wu et al., 2016, arXiv:1609.08144). Default: 1.0.
    include_stop_str_in_output: Keep the end-of-text token in the text. Default: False.
    skip_special_tokens: Leave special tokens out of the text. Default: True.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, number in (
            ("beam_width", values.integer("beam_width", self.beam_width, 1, DEFAULT_LIMITS.max_n)),
            ("max_tokens", values.integer("max_tokens", self.max_tokens, 1)),
            ("temperature", values.real("temperature", self.temperature, 0.0, 1000.0)),
            ("length_penalty", values.real("length_penalty", self.length_penalty, -10.0, 10.0)),
        ):
            object.__setattr__(self, name, number)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_switch(name, getattr(self, name))
