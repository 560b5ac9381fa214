"""The bodies of Anthropic's Messages API, and what they say in the engine's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mie.errors import shown
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.fields import OFF, Fields
from mie.serve.openai.protocol import Body, Items, Stop

_NO_TOOLS = "tools cannot be called yet"
_NO_THINKING = "reasoning is not told from the answer"

FIELDS = Fields(
    unsupported={
        "tools": ((None, []), _NO_TOOLS),
        "tool_choice": ((None, {"type": "none"}), _NO_TOOLS),
        "thinking": ((None, {"type": "disabled"}), _NO_THINKING),
        "output_config": ((None, {}), "tokens cannot be constrained by a grammar yet"),
        "output_format": ((None,), "tokens cannot be constrained by a grammar yet"),
        "mcp_servers": ((None, []), "the server calls no other servers"),
        "container": ((None,), "the server runs no code"),
        "context_management": ((None, {}), "the server does not shorten conversations"),
        "inference_geo": ((None,), "there is one place"),
        "speed": ((None, "standard"), "there is one speed"),
        "diagnostics": ((None,), "usage and the response's metrics tell what there is"),
        "fallbacks": ((None, []), "there is one model"),
        "store": (OFF, "nothing is stored between requests"),
        "service_tier": ((None, "auto", "standard_only"), "there is one tier"),
    },
    without_effect=frozenset(
        {
            "cache_control",  # equal prefixes are cached anyway
            "metadata",
            "user_profile_id",
            "workspace_id",
        }
    ),
)
"""The fields of Anthropic's API that have no effect here."""

_BLOCK_KEYS = {"type", "text", "cache_control"}

Content = str | Items[dict[str, Any]]


class InputMessage(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant"]
    content: Content


class CountTokensRequest(Body):
    """The body of ``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: Content | None = None


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``; the last three fields are mie's."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[Items[Stop], Field(max_length=256)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None


def conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them.

    The system prompt is the first message. Turns of the same role that follow each other are
    joined, as Anthropic joins them, because templates may refuse them.

    Raises:
        ApiError: a content has another part than text.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        for name, value in (message.model_extra or {}).items():
            raise unsupported(f"messages.{index}.{name}", f"leave it out; got {shown(value)}")
        text = _text(message.content, f"messages.{index}.content")
        if messages and messages[-1]["role"] == message.role:
            text = f"{messages.pop()['content']}\n{text}"
        messages.append({"role": message.role, "content": text})
    return messages


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}.{i}") for i, block in enumerate(content))


def _block_text(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        message = f"the model reads blocks of type 'text' only; got {shown(kind)}"
        raise unsupported(where, message)
    text = block.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text must be text; got {shown(text)}", where)
    for name, value in block.items():
        if name not in _BLOCK_KEYS and value is not None:
            raise unsupported(f"{where}.{name}", f"leave it out; got {shown(value)}")
    return text
