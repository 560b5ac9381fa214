"""The routes of the server: a table, and the handlers of routes that generate nothing."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mie.base.version import __version__
from mie.errors import shown
from mie.serve.anthropic.messages import MessageWriter, count_tokens
from mie.serve.anthropic.protocol import CountTokensRequest, MessagesRequest
from mie.serve.asgi import route_of
from mie.serve.errors import ApiError
from mie.serve.ollama import answers as ollama
from mie.serve.ollama import models as ollama_models
from mie.serve.ollama.protocol import ChatRequest, GenerateRequest, ShowRequest
from mie.serve.openai.adapters import (
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_adapter,
    unload_adapter,
)
from mie.serve.openai.chat import ChatWriter
from mie.serve.openai.completions import CompletionWriter
from mie.serve.openai.protocol import ChatCompletionRequest, CompletionRequest
from mie.serve.openai.responses import ResponseWriter
from mie.serve.openai.responses_protocol import ResponsesRequest
from mie.serve.openai.tokenize import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    apply_template,
    detokenize,
    tokenize,
    tokenizer_info,
)
from mie.serve.openapi import Operation, document
from mie.serve.serving import Serving, names_of
from mie.serve.writer import json_response

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling parameters with defaults in a model's description."""


async def _list_models(request: Request) -> Response:
    """List the model once for each name that clients may use, and its adapters."""
    serving: Serving = request.app.state.serving
    models = [model_of(name, serving) for name in (*serving.names, *serving.engine.adapters)]
    return json_response({"object": "list", "data": models})


async def _retrieve_model(request: Request) -> Response:
    """Describe a model."""
    serving: Serving = request.app.state.serving
    return json_response(model_of(serving.check_model(request.path_params["id"]), serving))


def model_of(name: str, serving: Serving) -> dict[str, Any]:
    """Return the description of a loaded model, or of an adapter."""
    adapter = serving.adapter_of(name)
    defaults = {name: getattr(serving.default_params, name) for name in _DEFAULTS}
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "mie",
        "root": names_of(adapter.request.lora_path)[0] if adapter else serving.facts.model,
        "parent": serving.names[0] if adapter else None,
        "max_model_len": serving.facts.max_model_len,
        "default_sampling_params": defaults,
    }


async def _cancel(request: Request) -> Response:
    """End a request that runs; its own answer ends with finish_reason "abort"."""
    return await cancel(request, [request.app.state.serving])


async def cancel(request: Request, servings: Sequence[Serving]) -> Response:
    """End a request that runs in one of these engines.

    Raises:
        ApiError: there is no such request of the client's.
    """
    response_id = request.path_params["id"]
    for serving in servings:
        writer = serving.running.get(response_id)
        if writer and writer.scope.get("mie.client") == request.scope.get("mie.client"):
            await serving.engine.abort([str(each.request_id) for each in writer.prepared])
            return json_response({"id": response_id, "cancelled": True})
    raise ApiError(
        404,
        f"no request with the id {shown(response_id)} runs",
        code="request_not_found",
        param="id",
    )


async def _reset_prefix_cache(request: Request) -> Response:
    """Drop all cached blocks, unless a request holds blocks."""
    serving: Serving = request.app.state.serving
    if not await serving.engine.reset_prefix_cache():
        raise ApiError(
            409,
            "the prefix cache was not reset because requests hold blocks (try again when none "
            "runs)",
            code="requests_running",
        )
    return json_response({"reset": True})


async def _health(request: Request) -> Response:
    """Report whether the server serves."""
    status = request.app.state.edge.health.status
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


async def _load(request: Request) -> Response:
    """Count the requests that are being served."""
    return JSONResponse({"server_load": request.app.state.edge.health.num_requests})


async def _version(request: Request) -> Response:
    """Name the version of mie."""
    return JSONResponse({"version": __version__})


async def _metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    response: Response = await request.app.state.edge.metrics.scrape()
    return response


async def _openapi(request: Request) -> Response:
    """Describe the server in OpenAPI 3.1. The description is written once."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = document(state.edge.config, OPERATIONS, state.serving)
    return json_response(state.openapi)


_ROWS: tuple[tuple[Any, ...], ...] = (
    ("post", "/v1/completions", CompletionWriter, "Completion", CompletionRequest),
    ("post", "/v1/chat/completions", ChatWriter, "ChatCompletion", ChatCompletionRequest),
    ("post", "/v1/responses", ResponseWriter, "Response", ResponsesRequest),
    ("post", "/v1/messages", MessageWriter, "Message", MessagesRequest),
    ("post", "/v1/messages/count_tokens", count_tokens, "TokenCount", CountTokensRequest),
    ("post", "/tokenize", tokenize, "Tokens", TokenizeRequest),
    ("post", "/detokenize", detokenize, "Text", DetokenizeRequest),
    ("post", "/apply-template", apply_template, "Prompt", TemplateRequest),
    ("get", "/tokenizer_info", tokenizer_info, "TokenizerInfo", None, (400,)),
    ("post", "/api/chat", ollama.ChatLines, "OllamaChat", ChatRequest),
    ("post", "/api/generate", ollama.GenerateLines, "OllamaText", GenerateRequest),
    ("post", "/api/show", ollama_models.show, "OllamaModel", ShowRequest),
    ("get", "/api/tags", ollama_models.tags, "OllamaModels"),
    ("get", "/api/ps", ollama_models.running, "OllamaModels"),
    ("get", "/api/version", ollama_models.version, "Version"),
    ("get", "/v1/models", _list_models, "Models"),
    ("post", "/v1/load_lora_adapter", load_adapter, "Success", LoadAdapterRequest, (403,)),
    ("post", "/v1/unload_lora_adapter", unload_adapter, "Success", UnloadAdapterRequest, (403,)),
    ("get", "/v1/models/{id}", _retrieve_model, "Model", None, (404,)),
    ("post", "/v1/requests/{id}/cancel", _cancel, "Cancelled", None, (404, 413)),
    ("post", "/reset_prefix_cache", _reset_prefix_cache, "Reset", None, (409, 413)),
    ("get", "/health", _health, "Health"),
    ("get", "/ready", _health, "Health"),
    ("get", "/ping", _health, "Health"),
    ("post", "/ping", _health, "Health"),
    ("get", "/load", _load, "Load"),
    ("get", "/version", _version, "Version"),
    ("get", "/metrics", _metrics, ""),
    ("get", "/openapi.json", _openapi, "Description"),
)
OPERATIONS = tuple(Operation(*row) for row in _ROWS)

NOT_SUPPORTED: Mapping[str, Sequence[str]] = MappingProxyType(
    yaml.safe_load(Path(__file__).with_name("refused_routes.yaml").read_text(encoding="utf-8"))
)
"""Why some routes of such servers are not here."""


def routes(
    operations: Sequence[Operation] = OPERATIONS, others: Mapping[str, Any] = MappingProxyType({})
) -> list[Route]:
    """Return the routes of the server, and the routes that explain why they are not here.

    ``others`` are endpoints in place of the operations' own handlers, by paths.
    """
    found = []
    for path, of_path in groupby(operations, lambda operation: operation.path):
        group = list(of_path)
        methods = [operation.method.upper() for operation in group]
        path = "/v1/models/{id:path}" if path == "/v1/models/{id}" else path
        endpoint = others.get(group[0].path, group[0].endpoint)
        found.append(Route(path, endpoint, methods=methods))
    methods = ["GET", "POST", "DELETE"]
    for why, paths in NOT_SUPPORTED.items():
        found += [Route(path, _refusal(why), methods=methods) for path in paths]
    return found


def _refusal(why: str) -> Any:
    async def refuse(request: Request) -> Response:
        message = f"{route_of(request.scope)} is not supported: {why}"
        raise ApiError(501, message, code="not_supported")

    return refuse
