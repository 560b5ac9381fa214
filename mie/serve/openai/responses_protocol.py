"""The body of ``POST /v1/responses``, and what it says in the engine's terms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from mie.serve.openai.fields import EMPTY, OFF, Fields
from mie.serve.openai.protocol import Body, Items

LOGPROBS = "message.output_text.logprobs"

_NO_STORE = "nothing is stored between requests"
_NO_EFFORT = "the chat template decides how much a model reasons"

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
        "max_tool_calls": ((None,), "send parallel_tool_calls=false for at most one"),
        "reasoning": ((None, {}, {"effort": None}, {"effort": "none"}), _NO_EFFORT),
        "truncation": ((None, "disabled"), "the server does not shorten conversations"),
        "context_management": (EMPTY, "the server does not shorten conversations"),
        "moderation": (EMPTY, "nothing is moderated"),
        "service_tier": ((None, "auto", "default"), "there is one tier"),
    },
    without_effect=frozenset(
        {
            "prompt_cache_key",  # equal prefixes are cached anyway
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
        }
    ),
)
"""The fields of the Responses API that have no effect here."""


_NAMED = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string", "minLength": 1}},
}
TextFormat = Annotated[
    Any,  # checked by hand, as is what follows
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "properties": {
                "format": {
                    "anyOf": [
                        {"type": "null"},
                        {
                            "type": "object",
                            "required": ["type"],
                            "properties": {"type": {"enum": ["text", "json_object"]}},
                        },
                        {
                            "type": "object",
                            "required": ["type", "schema"],
                            "properties": {
                                "type": {"const": "json_schema"},
                                "schema": {"type": "object"},
                            },
                        },
                    ]
                },
                "verbosity": {"enum": [None, "medium"]},
            },
        }
    ),
]
ResponseTools = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array", "items": _NAMED}]})
]
ResponseToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": [None, "none", "auto", "required"]}, _NAMED]})
]


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
    text: TextFormat = None
    tools: ResponseTools = None
    tool_choice: ResponseToolChoice = None
    parallel_tool_calls: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in (self.include or ())
