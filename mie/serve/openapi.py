"""``GET /openapi.json``: the routes of the server, described from what they check."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.serve.anthropic.protocol import FIELDS as MESSAGES_FIELDS
from mie.serve.anthropic.protocol import CountTokensRequest, MessagesRequest
from mie.serve.asgi import OPEN_ROUTES
from mie.serve.auth import is_of_clients
from mie.serve.config import ServeConfig
from mie.serve.openai.fields import OPENAI, Fields
from mie.serve.openai.protocol import Body, ChatCompletionRequest, CompletionRequest
from mie.serve.openai.responses_protocol import FIELDS as RESPONSES_FIELDS
from mie.serve.openai.responses_protocol import ResponsesRequest
from mie.serve.openai.stream import json_response
from mie.serve.openai.tokenize import FIELDS as TOKENIZE_FIELDS
from mie.serve.openai.tokenize import DetokenizeRequest, TemplateRequest, TokenizeRequest
from mie.serve.openapi_schemas import ANSWERS
from mie.serve.serving import Serving
from mie.version import __version__

_REF = "#/components/schemas/{model}"

STATUSES: Mapping[int, str] = {
    400: "The request is wrong, or asks for something that is not supported; `param` names it.",
    401: "The key is missing or wrong.",
    403: "The route needs the admin key.",
    404: "There is no such model or request.",
    409: "Requests hold blocks.",
    413: "The body is too large.",
    415: "The body has a content type that web pages of any site can send.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    500: "The server failed; its log has the details.",
    503: "The server is starting, ending or dead; `Retry-After` says when to try again.",
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A route with its parameters, its body and its answers."""

    method: str
    path: str
    summary: str
    answer: str
    """The name of a schema in `ANSWERS`."""
    body: type[Body] | None = None
    fields: Fields | None = None
    streams: bool = False
    statuses: Sequence[int] = ()
    """Further statuses than those that every route may have."""


_GENERATION = (400, 404, 413, 429)
_TEXT = (400, 404, 413)

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/completions",
        summary="Complete prompts",
        answer="Completion",
        body=CompletionRequest,
        fields=OPENAI,
        streams=True,
        statuses=_GENERATION,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        answer="ChatCompletion",
        body=ChatCompletionRequest,
        fields=OPENAI,
        streams=True,
        statuses=_GENERATION,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a conversation in the shape of the Responses API",
        answer="Response",
        body=ResponsesRequest,
        fields=RESPONSES_FIELDS,
        streams=True,
        statuses=_GENERATION,
    ),
    Operation(
        method="post",
        path="/v1/messages",
        summary="Answer a conversation in Anthropic's shape",
        answer="Message",
        body=MessagesRequest,
        fields=MESSAGES_FIELDS,
        streams=True,
        statuses=_GENERATION,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a conversation",
        answer="TokenCount",
        body=CountTokensRequest,
        fields=MESSAGES_FIELDS,
        statuses=_TEXT,
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Turn a text or a conversation into tokens",
        answer="Tokens",
        body=TokenizeRequest,
        fields=TOKENIZE_FIELDS,
        statuses=_TEXT,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Turn tokens into text",
        answer="Text",
        body=DetokenizeRequest,
        fields=TOKENIZE_FIELDS,
        statuses=_TEXT,
    ),
    Operation(
        method="post",
        path="/apply-template",
        summary="Write a conversation as a prompt",
        answer="Prompt",
        body=TemplateRequest,
        fields=TOKENIZE_FIELDS,
        statuses=_TEXT,
    ),
    Operation(
        method="get",
        path="/tokenizer_info",
        summary="Describe the tokenizer",
        answer="TokenizerInfo",
        statuses=(400,),
    ),
    Operation(method="get", path="/v1/models", summary="List the models", answer="Models"),
    Operation(
        method="get",
        path="/v1/models/{id}",
        summary="Describe a model",
        answer="Model",
        statuses=(404,),
    ),
    Operation(
        method="post",
        path="/v1/requests/{id}/cancel",
        summary="End a request that runs",
        answer="Cancelled",
        statuses=(404, 413),
    ),
    Operation(
        method="post",
        path="/reset_prefix_cache",
        summary="Forget all cached blocks",
        answer="Reset",
        statuses=(409, 413),
    ),
    Operation(
        method="get", path="/health", summary="Say whether the server serves", answer="Health"
    ),
    Operation(method="get", path="/ready", summary="The same as /health", answer="Health"),
    Operation(method="get", path="/ping", summary="The same as /health", answer="Health"),
    Operation(method="post", path="/ping", summary="The same as /health", answer="Health"),
    Operation(method="get", path="/load", summary="Count the requests in work", answer="Load"),
    Operation(method="get", path="/version", summary="Name the version of mie", answer="Version"),
    Operation(
        method="get", path="/metrics", summary="Metrics in Prometheus' format", answer="Metrics"
    ),
    Operation(method="get", path="/openapi.json", summary="This description", answer="Description"),
)


async def openapi(request: Request) -> Response:
    """Describe the server in OpenAPI 3.1."""
    return json_response(document(request.app.state.serving))


ROUTES = (Route("/openapi.json", openapi),)


def document(serving: Serving) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server."""
    config = serving.config
    schemas: dict[str, Any] = {**ANSWERS}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        item = paths.setdefault(operation.path, {})
        item[operation.method] = _described(operation, config)
        names = re.findall(r"\{(\w+)\}", operation.path)
        if names:
            item["parameters"] = [_path_parameter(name) for name in names]
        if operation.body is not None:
            schemas |= _schemas(operation.body, operation.fields, serving)
    components: dict[str, Any] = {"schemas": schemas}
    if config.keys is not None or config.admin_keys is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mie",
            "version": __version__,
            "description": "A server of OpenAI's and Anthropic's interfaces.",
        },
        "paths": paths,
        "components": components,
    }


def _described(operation: Operation, config: ServeConfig) -> dict[str, Any]:
    needs_admin = config.admin_keys is not None and not is_of_clients(operation.path)
    needs_key = (config.keys is not None or needs_admin) and operation.path not in OPEN_ROUTES
    further = ([401, 403] if needs_admin else [401]) if needs_key else []
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}",
        "responses": _responses(operation, further),
    }
    if operation.body is not None:
        schema = _ref(operation.body.__name__)
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _responses(operation: Operation, further: Sequence[int]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.answer == "Metrics":
        content = {"text/plain": {"schema": _ref(operation.answer)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _ref("ServerSentEvent")}
    success: dict[str, Any] = {"description": operation.summary, "content": content}
    if operation.body is not None:
        success["headers"] = {
            "x-mie-ignored": {
                "description": "The unknown fields of the request, which had no effect.",
                "schema": {"type": "string"},
            }
        }
    is_anthropic = operation.path.startswith("/v1/messages")
    error = _ref("AnthropicError" if is_anthropic else "Error")
    error_content = {"application/json": {"schema": error}}
    if operation.answer == "Health":
        error_content = {"application/json": {"schema": _ref("Health")}}
    of_method = [415] if operation.method == "post" else []
    statuses = sorted({*operation.statuses, *of_method, 500, 503, *further})
    failures = {
        str(status): {"description": STATUSES[status], "content": error_content}
        for status in statuses
    }
    return {"200": success, **failures}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _schemas(body: type[Body], fields: Fields | None, serving: Serving) -> dict[str, Any]:
    """Return the schema of a body, and those that it refers to."""
    schema = body.model_json_schema(ref_template=_REF)
    parts = schema.pop("$defs", {})
    properties = schema["properties"]
    names: list[str | None] = [*serving.names]
    if not serving.config.strict_openai:
        names.append(None)
    properties["model"] = {"enum": names, "description": "One of the server's models."}
    if fields is not None:
        for name, (neutral, why) in fields.unsupported.items():
            properties.setdefault(name, {"enum": _distinct(neutral), "description": why})
        for name in sorted(fields.without_effect):
            properties.setdefault(name, {"description": "It has no effect."})
    return {body.__name__: schema, **parts}


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Return values that differ in JSON, where 1 and 1.0 are one number."""
    distinct: dict[str, Any] = {}
    for value in values:
        is_whole = isinstance(value, float) and value.is_integer()
        distinct.setdefault(json.dumps(int(value) if is_whole else value), value)
    return list(distinct.values())


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}
