"""Define the prompts that users give, and the outputs that they get, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypedDict

from mie.base.refusals import refuses_names
from mie.base.reprs import short_repr
from mie.base.stats.request import RequestMetrics
from mie.config.adapters import LoRARequest
from mie.errors import RequestFailedError
from mie.frontend.outputs_json import as_dict, from_dict
from mie.sched.result import TokenLogprobs
from mie.sched.sequence import FinishReason
from mie.text.tools.definitions import ToolCall


class _Options(TypedDict, total=False):
    cache_salt: str | None
    prediction: str | None


class TextPrompt(_Options):
    """A prompt that is text.

    Only prompts with equal ``cache_salt`` share cached blocks.
    """

    prompt: str


class _Text(_Options, total=False):
    prompt: str | None


class TokensPrompt(_Text):
    """A prompt of token ids. ``prompt`` is their text, for outputs."""

    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""A text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.

A mapping may also have a ``"cache_salt"``: only prompts with equal salts share cached blocks.
``"prediction"`` is a text that the answer may contain. Drafts are made from it, and it changes no
token. ``"answer"`` is the format of the answer (`LLM.chat_prompt`).
"""

PromptType = SingletonPrompt = Prompt


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """The log-probability of a token at a position, before temperature and logit edits."""

    logprob: float
    rank: int | None
    """Rank of the token at its position; 1 is the most likely."""
    decoded_token: str | None
    """Text of the token, or None if the request is not detokenized."""


LogprobRow = dict[int, Logprob]
"""Log-probabilities by token id: the chosen token first, then the most likely ones."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One of the n choices of a request."""

    index: int
    text: str = ""
    """The text so far, or only the new text if ``output_kind`` is DELTA."""
    new_text: str = ""
    """The text that is new since the previous output."""
    token_ids: list[int] = field(default_factory=list)
    """The generated tokens so far, or only the new ones if ``output_kind`` is DELTA."""
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities, if ``logprobs`` was requested."""
    logprobs: list[LogprobRow] | None = None
    """An entry for each of ``token_ids``, if ``logprobs`` was requested."""
    finish_reason: FinishReason | None = None
    """The reason of the end: "stop", "length", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id; None for EOS and other reasons."""
    reasoning: str | None = None
    """The model's reasoning (left out of ``text``), or only its new part.

    It is None if the reasoning is not separated from the text.
    """
    tool_calls: list[ToolCall] | None = None
    """The calls of tools (left out of ``text``), or only their new parts.

    It is None if no tools were given.
    """
    # Fields of vLLM for features that mie does not have.
    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    __repr__ = short_repr

    def finished(self) -> bool:
        """Return whether this choice has ended."""
        return self.finish_reason is not None


@refuses_names
@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """The state of a request and its choices at one moment."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobRow | None] | None = None
    """An entry for each prompt token computed so far.

    It is None for the first token, because nothing predicts it.
    """
    outputs: list[CompletionOutput]
    """All choices, or the choices with new tokens if ``output_kind`` is DELTA."""
    finished: bool = False
    """Whether every choice has ended. This is true only in the last output of a request."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that were found in the prefix cache."""
    metrics: RequestMetrics | None = None
    """Statistics of the request, updated while it runs."""
    error: str | None = None
    """The error message if ``finish_reason`` is "error"."""
    is_invalid: bool = False
    """Whether the request itself is the reason of the error, so that it would fail again."""
    lora_request: LoRARequest | None = None
    """The adapter of the request."""
    # Fields of vLLM for features that mie does not have.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    __repr__ = short_repr

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values. `from_dict` converts them back."""
        return as_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestOutput:
        """Return the output that `as_dict` converted.

        Raises:
            ConfigError: a field is unknown or missing, or its value is of another type.
        """
        return from_dict(cls, values)


def raise_failed(outputs: list[RequestOutput]) -> None:
    """Raise `RequestFailedError` if one of these requests failed."""
    failed = [output for output in outputs if output.error is not None]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RequestFailedError(
            f"request {first.request_id} failed: {first.error}{more}; the others are in `outputs`",
            outputs,
        )


def ranked(row: TokenLogprobs) -> dict[int, tuple[float, int]]:
    """Return the log-probability and the rank of each token of a row, the chosen one first."""
    entries, num_others = {}, 0
    for token_id, logprob in zip(row.token_ids, row.logprobs, strict=True):
        rank = row.rank
        if token_id != row.token_ids[0]:
            num_others += 1
            rank = num_others + (row.rank <= num_others)
        entries[token_id] = (logprob, rank)
    return entries
