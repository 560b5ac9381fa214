"""The description of the server in OpenAPI 3.1.

It is made of the models that check bodies, and of the shapes of answers in ``answers.yaml``.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.types import ASGIApp

from mie.base.version import __version__
from mie.serve.asgi import NDJSON, OPEN_ROUTES, SSE
from mie.serve.auth import is_of_clients
from mie.serve.body import Body, read
from mie.serve.config import ServeConfig
from mie.serve.errors import dialect_of
from mie.serve.serving import Asked, Serving

STATUSES = {
    400: "The request is wrong, or asks for something that is not supported; `param` names it.",
    401: "The key is missing or wrong.",
    403: "The route needs the admin key, or an option of the server.",
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
    handler: Callable[..., Any]
    """If there is a body, it is a `Writer`, or a function that gets the request as an `Asked`."""
    answer: str
    """The name of its shape in ``answers.yaml``; "" is plain text."""
    body: type[Body] | None = None
    statuses: Sequence[int] = ()

    @property
    def summary(self) -> str:
        """The first sentence about the handler."""
        first = (self.handler.__doc__ or "").partition("\n")[0]
        return first.partition(". ")[0].removesuffix(".")

    @property
    def endpoint(self) -> Callable[[Request], Awaitable[ASGIApp]]:
        """The handler of the route. It gets the body of a route that has one."""
        handler, body = self.handler, self.body
        if body is None:
            return handler
        is_writer = isinstance(handler, type)

        async def endpoint(request: Request) -> ASGIApp:
            asked = await read(request, body, handler if is_writer else Asked)
            answer: ASGIApp = await (asked.run() if is_writer else handler(asked))
            return answer

        return endpoint

    @property
    def streams(self) -> bool:
        """Whether the answer may be a stream."""
        return self.body is not None and "stream" in self.body.model_fields


_EVENT = {
    "description": "One event of the stream; its data are JSON, or [DONE] at the end.",
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
_ERRORS = {"openai": "Error", "anthropic": "AnthropicError", "ollama": "OllamaError"}
_IGNORED = {
    "description": "The paths of the request's unknown fields, which had no effect.",
    "schema": {"type": "string"},
}


def document(
    config: ServeConfig, operations: Sequence[Operation], serving: Serving | None
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server. ``serving`` is None for several models."""
    schemas = _schemas(operations)
    narrower = {} if serving is None else _of_server(serving)
    for body in {each.body.__name__ for each in operations if each.body is not None}:
        properties = dict(schemas[body]["properties"])
        for name, schema in narrower.items():
            if name in properties and "enum" not in properties[name]:
                properties[name] = schema
        schemas = {**schemas, body: {**schemas[body], "properties": properties}}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        item = paths.setdefault(operation.path, {})
        item[operation.method] = _described(operation, config)
        for name in re.findall(r"\{(\w+)\}", operation.path):
            schema = {"type": "string"}
            item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    components: dict[str, Any] = {"schemas": schemas}
    if config.has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    description = "A server of OpenAI's, Anthropic's and Ollama's interfaces."
    return {
        "openapi": "3.1.0",
        "info": {"title": "mie", "version": __version__, "description": description},
        "paths": paths,
        "components": components,
    }


def _of_server(serving: Serving) -> dict[str, Any]:
    """Return the schemas of fields in which this server takes less than others may."""
    config, facts = serving.config, serving.facts
    names = [*serving.names, *([] if config.strict_openai else [None])]
    token = {"type": "integer", "minimum": 0, "maximum": facts.vocab_size - 1}
    found: dict[str, Any] = {
        "model": {"enum": names, "description": "One of the server's models."},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": facts.max_num_seqs},
        "tokens": {"type": "array", "items": token},
    }
    if serving.engine.engine_config.enable_lora:
        del found["model"]  # adapters come and go
    if serving.engine.engine_config.scheduling_policy != "priority":
        found["priority"] = {"enum": [None, 0], "description": "The server serves in turn."}
    if not config.trust_request_chat_template:
        found["chat_template"] = {"enum": [None], "description": "The server has its own."}
    if config.max_logprobs >= 0:
        count = {"type": ["integer", "null"], "minimum": 0, "maximum": config.max_logprobs}
        found |= {"prompt_logprobs": count, "top_logprobs": count}
    return found


def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the schemas of all bodies and answers by name."""
    bodies = dict.fromkeys(each.body for each in operations if each.body is not None)
    _, parts = TypeAdapter.json_schemas(
        [(each, "validation", TypeAdapter(each)) for each in bodies],
        ref_template="#/components/schemas/{model}",
    )
    shapes = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))
    named = {name: _object(each) for name, each in shapes.items() if not name.startswith(".")}
    return {**parts["$defs"], **named}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name.removesuffix("?"): _schema(each) for name, each in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
    }


def _schema(shape: Any) -> dict[str, Any]:
    """Return the schema of a field, of a name, or of a list."""
    if isinstance(shape, str):
        return {"$ref": f"#/components/schemas/{shape}"}
    if isinstance(shape, list):
        kinds = [_schema(each) for each in shape]
        return {"type": "array", "items": {"anyOf": kinds} if len(kinds) > 1 else kinds[0]}
    return dict(shape)


def _described(operation: Operation, config: ServeConfig) -> dict[str, Any]:
    needs_admin = config.admin_keys is not None and not is_of_clients(operation.path)
    needs_key = (config.keys is not None or needs_admin) and operation.path not in OPEN_ROUTES
    statuses = {*operation.statuses, 500, 503}
    statuses |= {415} if operation.method == "post" else set()
    statuses |= {400, 404, 413} if operation.body is not None else set()
    statuses |= {429} if operation.streams else set()
    statuses |= {401} if needs_key else set()
    statuses |= {403} if needs_admin else set()
    error = "Health" if operation.answer == "Health" else _ERRORS[dialect_of(operation.path)]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}",
        "responses": {
            "200": _success(operation),
            **{
                str(status): {"description": STATUSES[status], "content": _json(error)}
                for status in sorted(statuses)
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body.__name__)}
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _success(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer:
        content = _json(operation.answer)
    if operation.streams:
        is_lines = dialect_of(operation.path) == "ollama"
        content |= {NDJSON: content["application/json"]} if is_lines else {SSE: {"schema": _EVENT}}
    headers = {} if operation.body is None else {"headers": {"x-mie-ignored": _IGNORED}}
    return {"description": operation.summary, "content": content, **headers}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(name)}}
