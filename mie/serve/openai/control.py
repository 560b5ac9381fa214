"""Routes that control the server, and those of OpenAI's that it does not have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.errors import shown
from mie.serve.asgi import route_of
from mie.serve.errors import ApiError
from mie.serve.openai.stream import json_response
from mie.serve.serving import Serving

NOT_SUPPORTED = {
    "/v1/embeddings": "embeddings need an embedding model, and mie runs generative ones",
    "/v1/score": "scores need an embedding model, and mie runs generative ones",
    "/v1/rerank": "ranking needs an embedding model, and mie runs generative ones",
    "/v1/moderations": "nothing is moderated",
    "/v1/audio/{rest:path}": "the model reads and writes text only",
    "/v1/images/{rest:path}": "the model reads and writes text only",
    "/v1/files": "nothing is stored between requests",
    "/v1/files/{rest:path}": "nothing is stored between requests",
    "/v1/uploads": "nothing is stored between requests",
    "/v1/batches": "mie generate --input runs batch files",
    "/v1/batches/{rest:path}": "mie generate --input runs batch files",
    "/v1/responses/{rest:path}": "nothing is stored between requests",
    "/v1/messages/batches": "send one request for each conversation",
    "/v1/chat/completions/batch": "send one request for each conversation",
    "/v1/fine_tuning/{rest:path}": "models are not trained here",
    "/v1/assistants": "nothing is stored between requests",
    "/v1/threads": "nothing is stored between requests",
    "/v1/vector_stores": "nothing is stored between requests",
    "/v1/realtime": "there are no sessions",
    "/v1/load_lora_adapter": "there are no adapters",
    "/v1/unload_lora_adapter": "there are no adapters",
    "/score": "scores need an embedding model, and mie runs generative ones",
    "/rerank": "ranking needs an embedding model, and mie runs generative ones",
    "/pooling": "pooling needs an embedding model, and mie runs generative ones",
    "/classify": "classes need a classification model, and mie runs generative ones",
    "/infill": "text is generated after the prompt only",
}
"""Routes that clients of such servers know, and why they are not here."""


def refused_routes() -> list[Route]:
    """Return a route for each of `NOT_SUPPORTED`, which says why it is not here."""
    methods = ["GET", "POST", "DELETE"]
    return [Route(path, _refusal(why), methods=methods) for path, why in NOT_SUPPORTED.items()]


def _refusal(why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        message = f"{route_of(request.scope)} is not supported: {why}"
        raise ApiError(501, message, type="not_supported_error", code="not_supported")

    return refuse


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached blocks, unless a request holds blocks."""
    serving: Serving = request.app.state.serving
    if not await serving.engine.reset_prefix_cache():
        raise ApiError(
            409,
            "the prefix cache was not reset because requests hold blocks (try again when none "
            "runs)",
            code="requests_running",
        )
    return json_response({"reset": True})


async def cancel(request: Request) -> Response:
    """End a request that runs; its own answer ends with finish_reason "abort"."""
    serving: Serving = request.app.state.serving
    response_id = request.path_params["id"]
    generation = serving.running.get(response_id)
    if generation is None or generation.client != request.scope.get("mie.client"):
        raise ApiError(
            404,
            f"no request with the id {shown(response_id)} runs",
            type="not_found_error",
            code="request_not_found",
            param="id",
        )
    await serving.engine.abort([str(each.request_id) for each in generation.prepared])
    return json_response({"id": response_id, "cancelled": True})
