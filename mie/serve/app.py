"""`create_app`: the routes of the server in their middlewares."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mie.async_llm import AsyncLLM
from mie.config.params.sampling import SamplingParams
from mie.errors import MieError, shown_text
from mie.serve.asgi import route_of
from mie.serve.config import ServeConfig
from mie.serve.edge import Edge
from mie.serve.errors import ApiError, api_error
from mie.serve.routes import routes
from mie.serve.serving import Serving

_NAMES = {
    *SamplingParams.__dataclass_fields__,
    *("cache_salt", "messages", "priority", "prompt"),
    *("tools", "tool_choice", "parallel_tool_calls"),
}
"""The parameters that messages of mie may begin with."""


def create_app(engine: AsyncLLM, config: ServeConfig | None = None) -> Starlette:
    """Return the server's application. The caller shuts the engine down afterwards."""
    config = config or ServeConfig()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.serving = await Serving.of(engine, config, edge.queue_limit)
        yield
        await edge.page.close()

    edge = Edge(engine, config)
    all_routes = [*routes(), *edge.page_routes()]
    app = Starlette(
        routes=all_routes,
        middleware=edge.middleware([route.path for route in all_routes]),
        exception_handlers={
            ApiError: _refuse,
            MieError: _refuse,
            HTTPException: _refuse_http,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # it would send clients to the host that they name
    app.state.edge = edge
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    refused = api_error(error, _NAMES)
    if refused is not error:
        refused.message = request.app.state.serving.without_paths(refused.message)
    return refused.response(route_of(request.scope))


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Answer a request that Starlette itself refuses: an unknown route, or a wrong method."""
    assert isinstance(error, HTTPException)
    path = route_of(request.scope)
    messages = {
        404: f"there is no route {shown_text(path)}",
        405: f"{shown_text(path)} does not take {request.method}",
    }
    refused = ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code="not_found" if error.status_code == 404 else "method_not_allowed",
        headers=error.headers,
    )
    return refused.response(path)
