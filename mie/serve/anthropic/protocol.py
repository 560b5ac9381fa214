"""The bodies of Anthropic's Messages API, and what they say in the engine's terms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from mie.serve.openai.fields import OFF, Fields
from mie.serve.openai.protocol import Body, Items, Stop

_NO_BUDGET = "the chat template decides whether a model reasons, and it has no budget"

FIELDS = Fields(
    unsupported={
        "thinking": ((None, {"type": "disabled"}), _NO_BUDGET),
        "output_format": ((None,), "send output_config.format"),
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

_TOOLS = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "input_schema": {"type": "object"},
    },
}
Tools = Annotated[
    Any,  # checked by hand, as is what follows
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "items": _TOOLS}]}),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}},
        }
    ),
]
OutputConfig = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "properties": {
                "format": {
                    "type": ["object", "null"],
                    "required": ["type", "schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "schema": {"type": "object"},
                    },
                }
            },
        }
    ),
]
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
    tools: Tools = None
    tool_choice: ToolChoice = None


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``; the last three fields are mie's."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[Items[Stop], Field(max_length=256)] | None = None
    output_config: OutputConfig = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
