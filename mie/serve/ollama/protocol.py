"""The bodies of Ollama's requests."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from mie.config.engine import DEFAULT_LIMITS
from mie.errors import shown
from mie.serve.body import AtMost, Body, Items, Whole
from mie.serve.errors import invalid
from mie.serve.fields import Unsupported, WithoutEffect, with_fields_of
from mie.serve.openai.formats import Schema
from mie.serve.openai.protocol import (
    REST,
    Count,
    Integer64,
    Natural,
    NaturalOrAll,
    Penalty,
    Queued,
    Stop,
    Temperature,
    TopP,
)
from mie.serve.openai.tools import Tools
from mie.text.messages import MOST_MESSAGES

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_MAX_DURATION_CHARS = 64
_MAX_SECONDS = 1e9
"""Longest time that a model stays loaded for a client. Longer times are infinite."""


def seconds_of(keep_alive: object) -> float | None:
    """Return how long a model stays loaded after a request; None is for the server to decide.

    It is a number of seconds, or a text such as "1h30m". A negative or very long one is infinite.

    Raises:
        ApiError: it is neither.
    """
    if keep_alive is None:
        return None
    if isinstance(keep_alive, (int, float)) and not isinstance(keep_alive, bool):
        seconds = float(max(-1, min(keep_alive, _MAX_SECONDS)))  # an integer may exceed a float
    else:
        is_short = isinstance(keep_alive, str) and len(keep_alive) <= _MAX_DURATION_CHARS
        text = str(keep_alive) if is_short else ""
        sign, digits = ("-", text[1:]) if text[:1] == "-" else ("", text)
        parts = _PART.findall(f"{digits}s" if digits.isdecimal() else digits)
        if not parts or "".join(map("".join, parts)) not in (digits, f"{digits}s"):
            raise invalid(
                f"keep_alive must be seconds, or a text such as '5m'; got {shown(keep_alive)}",
                "keep_alive",
            )
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        seconds = -seconds if sign else seconds
    return seconds if 0 <= seconds < _MAX_SECONDS else math.inf


_SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
"""The options that have the names of mie's parameters."""
_TEXT_ONLY = "the model reads and writes text only"


@with_fields_of("ollama_options")
class Options(Body):
    """How tokens are chosen, where an answer ends, and how long a conversation may be."""

    temperature: Temperature | None = None
    top_k: NaturalOrAll | None = None
    top_p: TopP | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Integer64 | None = None
    """The seed. -1 draws one."""
    stop: Stop | Annotated[Items[Stop], AtMost(DEFAULT_LIMITS.max_stop_strings)] | None = None
    num_ctx: Count | None = None
    """Number of tokens of the prompt and the answer together, at most the server's context."""
    repeat_last_n: Annotated[int, Whole(-1)] | None = None
    """The number of last tokens that penalties cover; 0 turns them off, and -1 is all."""
    num_predict: Annotated[int, Whole(-2, instead_of_zero=REST)] | None = None
    """The maximum number of new tokens; -1 and -2 are the rest of the context."""


def sampling(options: Options | None) -> dict[str, Any]:
    """Return the sampling parameters that options give, under mie's names."""
    if options is None:
        return {}
    same = {name: getattr(options, name) for name in _SAME}
    seed = None if options.seed == -1 else options.seed
    return {**same, "repetition_penalty": options.repeat_penalty, "seed": seed}


@with_fields_of("ollama")
class Answered(Queued):
    """The fields of both routes that answer."""

    model: str | None = None
    stream: bool | None = None
    """Whether the answer comes line by line. Default: True."""
    options: Options | None = None
    format: Literal["", "json"] | Schema | None = None
    """The structure of the answer: any JSON object, or a JSON schema."""
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None


class GenerateRequest(Answered):
    """The body of ``POST /api/generate``."""

    prompt: Annotated[str | None, AtMost("prompt")] = None
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is the model's whole prompt, without a template."""


class CalledFunction(Body):
    """The function of a call, and its arguments."""

    name: str
    arguments: Annotated[dict[str, Any], AtMost("prompt")]
    index: WithoutEffect = None
    description: WithoutEffect = None


class Call(Body):
    """A call of a tool that the model wrote."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: WithoutEffect = None
    function: CalledFunction


class Turn(Body):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[Items[Call], AtMost(MOST_MESSAGES)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[Any, Unsupported(_TEXT_ONLY, ([],))] = None


class ChatRequest(Answered):
    """The body of ``POST /api/chat``."""

    messages: Annotated[Items[Turn], AtMost(MOST_MESSAGES)] | None = None
    tools: Tools | None = None


class ShowRequest(Body):
    """The body of ``POST /api/show``."""

    model: str | None = None
    verbose: Annotated[Any, Unsupported("vocabularies are not listed", (False,))] = None
