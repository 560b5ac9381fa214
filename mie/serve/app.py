"""`create_app`: the routes of the server, and what wraps them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mie.async_llm import AsyncLLM
from mie.errors import MieError
from mie.sched.params import SamplingParams
from mie.serve.anthropic.messages import ROUTES as MESSAGES_ROUTES
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, api_error
from mie.serve.openai.chat import chat_completions
from mie.serve.openai.completions import completions
from mie.serve.openai.responses import ROUTES as RESPONSES_ROUTES
from mie.serve.serving import Serving
from mie.serve.sse import DisconnectMiddleware
from mie.version import __version__

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


def create_app(engine: AsyncLLM, config: ServeConfig | None = None) -> Starlette:
    """Return the server's application. The caller shuts the engine down afterwards."""
    config = config or ServeConfig()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.serving = await Serving.of(engine, config)
        yield

    return Starlette(
        routes=routes(),
        middleware=[Middleware(DisconnectMiddleware)],
        exception_handlers={
            ApiError: _refuse,
            MieError: _refuse,
            HTTPException: _refuse_http,
            Exception: _fail,
        },
        lifespan=lifespan,
    )


def routes() -> list[Route]:
    """Return the routes of the server."""
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        *RESPONSES_ROUTES,
        *MESSAGES_ROUTES,
        Route("/version", _version),
    ]


def path_of(request: Request) -> str:
    """Return the path of a request below the root path."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _refuse(request: Request, error: Exception) -> Response:
    return api_error(error, SamplingParams.__dataclass_fields__).response(path_of(request))


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Answer what Starlette itself refuses: an unknown route, or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {
        404: f"there is no route {path}",
        405: f"{path} does not take {request.method}",
    }
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    refused = ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        type=kind,
        code="not_found" if error.status_code == 404 else "method_not_allowed",
        headers=error.headers,
    )
    return refused.response(path_of(request))


async def _fail(request: Request, error: Exception) -> Response:
    return api_error(error).response(path_of(request))
