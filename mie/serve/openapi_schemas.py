"""The schemas of what the server answers, with the keys that are always there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these properties, and maybe others."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _constant(value: str) -> dict[str, Any]:
    return {"const": value}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_FINISH_REASON = {"enum": ["stop", "length", "tool_calls", "abort", None]}
_ANY_OBJECT = {"type": ["object", "null"]}

_MESSAGE = _object(role=_constant("assistant"), content=_TEXT_OR_NULL, refusal=_TEXT_OR_NULL)
_MESSAGE["properties"] |= {
    "reasoning": _TEXT_OR_NULL,
    "tool_calls": _list(
        _object(
            id=_STRING,
            type=_constant("function"),
            function=_object(name=_STRING, arguments=_STRING),
        )
    ),
}
_STATUS = {"enum": ["completed", "incomplete"]}
_ITEMS = (
    _object(
        id=_STRING,
        type=_constant("message"),
        status=_STATUS,
        role=_constant("assistant"),
        content=_list(
            _object(
                type=_constant("output_text"),
                text=_STRING,
                annotations=_list({}),
                logprobs=_list({"type": "object"}),
            )
        ),
    ),
    _object(
        id=_STRING,
        type=_constant("reasoning"),
        status=_STATUS,
        summary=_list({}),
        content=_list(_object(type=_constant("reasoning_text"), text=_STRING)),
    ),
    _object(
        id=_STRING,
        type=_constant("function_call"),
        status=_STATUS,
        call_id=_STRING,
        name=_STRING,
        arguments=_STRING,
    ),
)
_BLOCKS = (
    _object(type=_constant("text"), text=_STRING),
    _object(type=_constant("thinking"), thinking=_STRING, signature=_STRING),
    _object(type=_constant("tool_use"), id=_STRING, name=_STRING, input={"type": "object"}),
)

ANSWERS: Mapping[str, Any] = {
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "Completion": _object(
        id=_STRING,
        object=_constant("text_completion"),
        created=_COUNT,
        model=_STRING,
        system_fingerprint=_STRING,
        choices=_list(
            _object(
                index=_COUNT,
                text=_STRING,
                logprobs=_ANY_OBJECT,
                finish_reason=_FINISH_REASON,
            )
        ),
        usage=_ref("Usage"),
    ),
    "ChatCompletion": _object(
        id=_STRING,
        object=_constant("chat.completion"),
        created=_COUNT,
        model=_STRING,
        system_fingerprint=_STRING,
        choices=_list(
            _object(
                index=_COUNT,
                message=_MESSAGE,
                logprobs=_ANY_OBJECT,
                finish_reason=_FINISH_REASON,
            )
        ),
        usage=_ref("Usage"),
    ),
    "Response": _object(
        id=_STRING,
        object=_constant("response"),
        created_at=_COUNT,
        status=_STATUS,
        model=_STRING,
        output=_list({"anyOf": list(_ITEMS)}),
        incomplete_details=_ANY_OBJECT,
        store={"const": False},
        usage=_object(
            input_tokens=_COUNT,
            input_tokens_details=_object(cached_tokens=_COUNT),
            output_tokens=_COUNT,
            output_tokens_details=_object(reasoning_tokens=_COUNT),
            total_tokens=_COUNT,
        ),
    ),
    "Message": _object(
        id=_STRING,
        type=_constant("message"),
        role=_constant("assistant"),
        model=_STRING,
        content=_list({"anyOf": list(_BLOCKS)}),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_TEXT_OR_NULL,
        usage=_object(
            input_tokens=_COUNT,
            cache_creation_input_tokens=_COUNT,
            cache_read_input_tokens=_COUNT,
            output_tokens=_COUNT,
        ),
    ),
    "TokenCount": _object(input_tokens=_COUNT),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list({"type": ["integer", "object"]}),
        token_strs={"type": ["array", "null"], "items": _STRING},
    ),
    "Text": _object(prompt=_STRING, content=_STRING),
    "Prompt": _object(prompt=_STRING),
    "TokenizerInfo": _object(
        vocab_size=_COUNT,
        model_max_length=_COUNT,
        bos_token=_TEXT_OR_NULL,
        eos_token=_TEXT_OR_NULL,
        chat_template=_TEXT_OR_NULL,
    ),
    "Model": _object(
        id=_STRING,
        object=_constant("model"),
        created=_COUNT,
        owned_by=_STRING,
        max_model_len=_COUNT,
        default_sampling_params={"type": "object"},
    ),
    "Models": _object(object=_constant("list"), data=_list(_ref("Model"))),
    "Cancelled": _object(id=_STRING, cancelled={"const": True}),
    "Reset": _object(reset={"const": True}),
    "Health": _object(status={"enum": ["ok", "stalled", "draining", "dead"]}),
    "Load": _object(server_load=_NUMBER),
    "Version": _object(version=_STRING),
    "Metrics": _STRING,
    "Description": _object(openapi=_constant("3.1.0"), paths={"type": "object"}),
    "ServerSentEvent": {
        "description": "One event of the stream; its data are JSON, or [DONE] at the end.",
        "type": "object",
        "required": ["data"],
        "properties": {"data": _STRING, "event": _STRING},
    },
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
    ),
    "AnthropicError": _object(
        type=_constant("error"), error=_object(type=_STRING, message=_STRING)
    ),
}
"""Maps names to the schemas of the answers, and of what they have in common."""
