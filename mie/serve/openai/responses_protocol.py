"""The body of ``POST /v1/responses``, and what it says in the engine's terms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mie.errors import shown
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.fields import EMPTY, OFF, Fields
from mie.serve.openai.protocol import Body, Items

LOGPROBS = "message.output_text.logprobs"

_NO_TOOLS = "tools cannot be called yet"
_NO_STORE = "nothing is stored between requests"
_NO_REASONING = "reasoning is not told from the answer"

FIELDS = Fields(
    unsupported={
        "store": (OFF, _NO_STORE),
        "previous_response_id": ((None,), f"{_NO_STORE}; send the whole conversation as input"),
        "conversation": ((None,), f"{_NO_STORE}; send the whole conversation as input"),
        "background": (OFF, _NO_STORE),
        "background_options": (EMPTY, _NO_STORE),
        "prompt": ((None,), _NO_STORE),
        "access_programs": (EMPTY, "there are none"),
        "image": (EMPTY, "the model reads and writes text only"),
        "tools": ((None, []), _NO_TOOLS),
        "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
        "max_tool_calls": ((None,), _NO_TOOLS),
        "text": (
            (None, {}, {"format": {"type": "text"}}),
            "tokens cannot be constrained by a grammar yet",
        ),
        "reasoning": ((None, {}, {"effort": None}, {"effort": "none"}), _NO_REASONING),
        "truncation": ((None, "disabled"), "the server does not shorten conversations"),
        "context_management": (EMPTY, "the server does not shorten conversations"),
        "moderation": (EMPTY, "nothing is moderated"),
        "service_tier": ((None, "auto", "default"), "there is one tier"),
    },
    without_effect=frozenset(
        {
            "parallel_tool_calls",  # says nothing without tools
            "prompt_cache_key",  # equal prefixes are cached anyway
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
        }
    ),
)
"""The fields of the Responses API that have no effect here."""


_ITEM_KEYS = {"type", "role", "content", "id", "status", "phase"}
"""What a message may have; the last three are those of an answer that is sent again."""


class StreamOptions(Body):
    """What a stream adds to its events."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body):
    """The body of ``POST /v1/responses``; the last fields, from ``seed``, are mie's."""

    model: str | None = None
    input: (
        Annotated[str, Field(min_length=1)] | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    include: Items[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in (self.include or ())


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them, the instructions first.

    Raises:
        ApiError: an item of the input is no message.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind != "message":
            message = f"the model reads items of type 'message' only; got {shown(kind)}"
            raise unsupported(f"input.{index}", message)
        for name, value in item.items():
            if name not in _ITEM_KEYS and value is not None:
                raise unsupported(f"input.{index}.{name}", f"leave it out; got {shown(value)}")
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(f"input.{index}.role is no role; got {shown(role)}", "input")
        content = item.get("content")
        if not isinstance(content, str | list):
            message = f"input.{index}.content must be text or a list of parts; got {shown(content)}"
            raise invalid(message, "input")
        messages.append({"role": role, "content": content})
    return messages
