"""``GET /openapi.json``: the routes of the server, described by what checks their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.serve.answers import (
    AnthropicError,
    Cancelled,
    ChatCompletion,
    Completion,
    Description,
    Error,
    Health,
    Load,
    Message,
    Model,
    Models,
    Prompt,
    Reset,
    Text,
    TokenCount,
    TokenizerInfo,
    Tokens,
    Version,
)
from mie.serve.answers import Response as ResponseAnswer
from mie.serve.anthropic.protocol import CountTokensRequest, MessagesRequest
from mie.serve.asgi import OPEN_ROUTES
from mie.serve.auth import is_of_clients
from mie.serve.body import Body
from mie.serve.config import ServeConfig
from mie.serve.openai.protocol import ChatCompletionRequest, CompletionRequest
from mie.serve.openai.responses_protocol import ResponsesRequest
from mie.serve.openai.stream import json_response
from mie.serve.openai.tokenize import DetokenizeRequest, TemplateRequest, TokenizeRequest
from mie.serve.serving import Serving
from mie.version import __version__

STATUSES = {
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


@dataclass(frozen=True)
class Operation:
    """A route with its answer, its body, and the statuses that not every route has."""

    method: str
    path: str
    summary: str
    answer: Any
    body: type[Body] | None = None
    statuses: Sequence[int] = ()

    @property
    def streams(self) -> bool:
        """Whether the answer may be a stream."""
        return self.body is not None and "stream" in self.body.model_fields


_OF_RESPONSES = "Answer a conversation in the shape of the Responses API"
_OF_ANTHROPIC = "Answer a conversation in Anthropic's shape"

OPERATIONS = (
    Operation("post", "/v1/completions", "Complete prompts", Completion, CompletionRequest),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatCompletion,
        ChatCompletionRequest,
    ),
    Operation("post", "/v1/responses", _OF_RESPONSES, ResponseAnswer, ResponsesRequest),
    Operation("post", "/v1/messages", _OF_ANTHROPIC, Message, MessagesRequest),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        TokenCount,
        CountTokensRequest,
    ),
    Operation("post", "/tokenize", "Turn text or messages into tokens", Tokens, TokenizeRequest),
    Operation("post", "/detokenize", "Turn tokens into text", Text, DetokenizeRequest),
    Operation("post", "/apply-template", "Write messages as a prompt", Prompt, TemplateRequest),
    Operation("get", "/tokenizer_info", "Describe the tokenizer", TokenizerInfo, None, (400,)),
    Operation("get", "/v1/models", "List the models", Models),
    Operation("get", "/v1/models/{id}", "Describe a model", Model, None, (404,)),
    Operation(
        "post",
        "/v1/requests/{id}/cancel",
        "End a request that runs",
        Cancelled,
        None,
        (404, 413),
    ),
    Operation("post", "/reset_prefix_cache", "Forget all cached blocks", Reset, None, (409, 413)),
    Operation("get", "/health", "Say whether the server serves", Health),
    Operation("get", "/ready", "The same as /health", Health),
    Operation("get", "/ping", "The same as /health", Health),
    Operation("post", "/ping", "The same as /health", Health),
    Operation("get", "/load", "Count the requests in work", Load),
    Operation("get", "/version", "Name the version of mie", Version),
    Operation("get", "/metrics", "Metrics in Prometheus' format", str),
    Operation("get", "/openapi.json", "This description", Description),
)
_EVENT = {
    "description": "One event of the stream; its data are JSON, or [DONE] at the end.",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_IGNORED = {
    "description": "The paths of the request's unknown fields, which had no effect.",
    "schema": {"type": "string"},
}


async def openapi(request: Request) -> Response:
    """Describe the server in OpenAPI 3.1. The description is written once."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = document(state.serving)
    return json_response(state.openapi)


ROUTES = (Route("/openapi.json", openapi),)


def document(serving: Serving) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server."""
    config = serving.config
    schemas, refs = _schemas()
    narrower = _of_server(serving)
    for body in {each.body.__name__ for each in OPERATIONS if each.body is not None}:
        properties = dict(schemas[body]["properties"])
        for name, schema in narrower.items():
            if name in properties and "enum" not in properties[name]:
                properties[name] = schema
        schemas = {**schemas, body: {**schemas[body], "properties": properties}}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        item = paths.setdefault(operation.path, {})
        item[operation.method] = _described(operation, config, refs)
        for name in re.findall(r"\{(\w+)\}", operation.path):
            schema = {"type": "string"}
            item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    components: dict[str, Any] = {"schemas": schemas}
    if config.keys is not None or config.admin_keys is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    description = "A server of OpenAI's and Anthropic's interfaces."
    return {
        "openapi": "3.1.0",
        "info": {"title": "mie", "version": __version__, "description": description},
        "paths": paths,
        "components": components,
    }


def _of_server(serving: Serving) -> dict[str, Any]:
    """Return what this server takes in fields that others may take more in, by name."""
    config, facts = serving.config, serving.facts
    names = [*serving.names, *([] if config.strict_openai else [None])]
    token = {"type": "integer", "minimum": 0, "maximum": facts.vocab_size - 1}
    found: dict[str, Any] = {
        "model": {"enum": names, "description": "One of the server's models."},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": facts.max_num_seqs},
        "tokens": {"type": "array", "items": token},
    }
    if serving.engine.engine_config.scheduling_policy != "priority":
        found["priority"] = {"enum": [None, 0], "description": "The server serves in turn."}
    if not config.trust_request_chat_template:
        found["chat_template"] = {"enum": [None], "description": "The server has its own."}
    if config.max_logprobs >= 0:
        count = {"type": ["integer", "null"], "minimum": 0, "maximum": config.max_logprobs}
        found |= {"prompt_logprobs": count, "top_logprobs": count}
    return found


def _schemas() -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return the schemas of all bodies and answers by name, and a reference to each by type."""
    types = dict.fromkeys(each.answer for each in OPERATIONS)
    types |= dict.fromkeys((Error, AnthropicError))
    types |= dict.fromkeys(each.body for each in OPERATIONS if each.body is not None)
    found, parts = TypeAdapter.json_schemas(
        [(each, "validation", TypeAdapter(each)) for each in types],
        ref_template="#/components/schemas/{model}",
    )
    return parts["$defs"], {each: schema for (each, _), schema in found.items()}


def _described(operation: Operation, config: ServeConfig, refs: dict[Any, Any]) -> dict[str, Any]:
    needs_admin = config.admin_keys is not None and not is_of_clients(operation.path)
    needs_key = (config.keys is not None or needs_admin) and operation.path not in OPEN_ROUTES
    statuses = {*operation.statuses, 500, 503}
    statuses |= {415} if operation.method == "post" else set()
    statuses |= {400, 404, 413} if operation.body is not None else set()
    statuses |= {429} if operation.streams else set()
    statuses |= {401} if needs_key else set()
    statuses |= {403} if needs_admin else set()
    error: Any = Health if operation.answer is Health else Error
    if operation.path.startswith("/v1/messages"):
        error = AnthropicError
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}",
        "responses": {
            "200": _success(operation, refs),
            **{
                str(status): {"description": STATUSES[status], "content": _json(refs[error])}
                for status in sorted(statuses)
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(refs[operation.body])}
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _success(operation: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    is_text = operation.answer is str
    content = {"text/plain" if is_text else "application/json": {"schema": refs[operation.answer]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    headers = {} if operation.body is None else {"headers": {"x-mie-ignored": _IGNORED}}
    return {"description": operation.summary, "content": content, **headers}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
