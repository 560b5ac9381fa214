"""The application of several models: it finds the model of a request, and passes the request to it.

Each loaded model has the routes of a server with one engine. The lists of models, the state of the
server and the files of its page are the application's own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mie.config.arguments import format_size
from mie.errors import EngineDeadError
from mie.frontend.async_llm import AsyncLLM
from mie.load.directory import ModelsDirectory, PlannedModel
from mie.serve.app import SAMPLE_SECONDS, Edge, EngineEdge, new_app
from mie.serve.asgi import Failures, Pace, facts_of, route_of
from mie.serve.body import Body, parse
from mie.serve.catalogue import Model
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, invalid
from mie.serve.health import ServerHealth, Status
from mie.serve.json_text import json_object
from mie.serve.metrics import ServerMetrics
from mie.serve.models import Models
from mie.serve.ollama import models as ollama
from mie.serve.ollama.answers import time_text, unloaded
from mie.serve.ollama.protocol import ShowRequest, seconds_of
from mie.serve.openapi import Operation, document
from mie.serve.routes import OPERATIONS, cancel, model_of, routes
from mie.serve.writer import json_response

logger = logging.getLogger(__name__)

KEEP_ALIVE_ROUTES = ("/api/chat", "/api/generate")
"""Routes of requests that may set how long a model stays loaded."""
NOT_LOADING = ("/mie/", "/reset_prefix_cache")
"""Routes that show or change a loaded model. They load no model, and keep no model loaded."""


class ModelsHealth(ServerHealth):
    """The health of a server with several models."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self._models = models

    @property
    def status(self) -> Status:
        """The state of the server. A dead engine is replaced when a request needs it."""
        if self.is_draining:
            return "draining"
        states = {edge.health.status for edge in self._models.edges}
        return "stalled" if "stalled" in states else "ok"


class ModelsEdge(Edge):
    """The edge of several models."""

    def __init__(
        self,
        directory: ModelsDirectory,
        load: Callable[[PlannedModel], AsyncLLM],
        config: ServeConfig,
    ) -> None:
        self._pace = Pace(config.max_chunks_per_second)
        max_num_seqs = directory.max_num_seqs
        self.models = Models(
            directory,
            load,
            max_models=config.models_max,
            max_waiting=max_num_seqs + config.max_waiting(max_num_seqs),
            on_rejection=lambda limit: self.metrics.reject(limit),
            new_edge=self._new_edge,
        )
        metrics = ServerMetrics(None, "", lambda: [each.metrics for each in self.models.edges])
        super().__init__(config, ModelsHealth(self.models), metrics)

    async def _new_edge(self, name: str, engine: AsyncLLM) -> EngineEdge:
        """Return the routes of a model that was loaded."""
        edge = EngineEdge(engine, replace(self.config, served_model_name=[name]))
        serving = await edge.start()
        serving.pace = self._pace
        page = edge.page.routes() if self.config.page else []
        edge.app = new_app(edge, [*routes(), *page], [Middleware(Failures)])
        edge.app.state.serving = serving
        return edge

    @property
    def dead_error(self) -> EngineDeadError | None:
        return None

    async def summary(self) -> list[str]:
        models = await self.models.catalogue.all()
        directory = self.models.catalogue.directory
        names = ", ".join(model.name for model in models) or "none yet"
        return [
            f"{len(models)} models in {directory.folder}: {names}",
            f"models are loaded when a request names them, and may take "
            f"{format_size(directory.memory_bytes)} together",
        ]

    def without_paths(self, message: str) -> str:
        return message.replace(str(self.models.catalogue.directory.folder), "the models' directory")

    async def watch(self) -> None:
        was_stalled: set[EngineEdge] = set()
        while True:
            stalled = {each for each in self.models.edges if each.health.status == "stalled"}
            for each in stalled - was_stalled:
                name = each.serving.names[0]
                logger.critical("the engine of %s has work and computes no step", name)
            was_stalled = stalled
            await asyncio.sleep(SAMPLE_SECONDS)

    async def end_engine(self) -> bool:
        self.models.close()
        return await super().end_engine()

    def shutdown(self) -> None:
        self.models.shut_down()


class Dispatch:
    """An endpoint that passes each request to the model that the request names."""

    def __init__(self, edge: ModelsEdge) -> None:
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, path = Request(scope, receive), route_of(scope)
        body = await request.body()
        values = json_object(body) if body else {}
        model = await self._chosen(values.get("model", request.query_params.get("model")))
        facts_of(scope)["model"] = model.name
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        if path.startswith(NOT_LOADING):
            if model.edge is None:
                raise ApiError(
                    409,
                    f"the model {model.name} is not loaded (send it a request, or load it with "
                    "POST /models/load)",
                    code="model_not_loaded",
                    param="model",
                )
            return await model.edge.app(scope, receive_again, send)
        keep_alive = None
        if path in KEEP_ALIVE_ROUTES:
            keep_alive = seconds_of(values.get("keep_alive"))
            is_unload = keep_alive == 0 and not (values.get("messages") or values.get("prompt"))
            if keep_alive is not None and not self._may_unload(scope):
                if is_unload:
                    raise ApiError(
                        403,
                        "keep_alive of 0 unloads the model, and this needs the admin key "
                        "(--admin-api-key); leave keep_alive out",
                        code="admin_key_required",
                        param="keep_alive",
                    )
                keep_alive, send = None, _naming_keep_alive(send)
            elif is_unload:
                self._edge.models.unload(model)
                name = str(values.get("model", model.name))
                return await unloaded(name, path)(scope, receive_again, send)
        async with self._edge.models.using(model, scope.get("mie.client")) as edge:
            if keep_alive is not None:
                model.keep_alive = keep_alive
            return await edge.app(scope, receive_again, send)

    def _may_unload(self, scope: Scope) -> bool:
        """Return whether a client decides how long a model stays loaded, as ``/models/unload``."""
        admin_keys = self._edge.config.admin_keys
        return admin_keys is None or scope.get("mie.client") in admin_keys.names

    async def _chosen(self, name: object) -> Model:
        """Return the model of a request.

        Raises:
            ApiError: there is no such model, or the request names none and there are several.
        """
        if name is None and self._edge.config.strict_openai:
            raise invalid("model is missing (--strict-openai demands it)", "model")
        if name is None:
            return await self._edge.models.catalogue.only()
        if not isinstance(name, str):
            raise invalid("model must be a text", "model")
        return await self._edge.models.catalogue.find(name)


def _naming_keep_alive(send: Send) -> Send:
    """Return a function that sends an answer with ``keep_alive`` among the ignored fields."""

    async def send_and_name(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-mie-ignored", b"keep_alive")]
            message = {**message, "headers": headers}
        await send(message)

    return send_and_name


class ModelRequest(Body):
    """The body of ``POST /models/load`` and ``POST /models/unload``."""

    model: str


def _edge(request: Request) -> ModelsEdge:
    edge: ModelsEdge = request.app.state.edge
    return edge


async def _load(request: Request) -> Response:
    """Load a model, and answer when it is loaded."""
    models = _edge(request).models
    model = await models.catalogue.find(parse(await request.body(), ModelRequest).model)
    async with models.using(model, request.scope.get("mie.client")):
        return json_response({"success": True})


async def _unload(request: Request) -> Response:
    """Unload a model when no request uses it. The answer does not wait for that."""
    models = _edge(request).models
    models.unload(await models.catalogue.find(parse(await request.body(), ModelRequest).model))
    return json_response({"success": True})


async def _list_models(request: Request) -> Response:
    """List all models, with the state of each as in llama.cpp."""
    models = await _edge(request).models.catalogue.all()
    described = [await _described(request, model) for model in models]
    return json_response({"object": "list", "data": described})


async def _retrieve_model(request: Request) -> Response:
    """Describe a model."""
    catalogue = _edge(request).models.catalogue
    model = await catalogue.find(request.path_params["id"])
    return json_response(await _described(request, model) | {"id": request.path_params["id"]})


async def _described(request: Request, model: Model) -> dict[str, Any]:
    files = await _edge(request).models.catalogue.describe(model)
    status: dict[str, Any] = {"value": model.status}
    if model.has_failed:
        status["failed"] = True
    found = {"id": model.name, "object": "model", "owned_by": "mie", "root": model.name}
    if model.edge is not None:
        found |= model_of(model.name, model.edge.serving) | {"root": model.name}
    return found | {"created": 0 if files is None else files.created, "status": status}


async def _tags(request: Request) -> Response:
    """List the models as Ollama does."""
    catalogue = _edge(request).models.catalogue
    found = [(each.name, await catalogue.describe(each)) for each in await catalogue.all()]
    entries = [ollama.entry(n, f, f.digest, f.created) for n, f in found if f is not None]
    return json_response({"models": entries})


async def _running(request: Request) -> Response:
    """List the models that are loaded."""
    catalogue = _edge(request).models.catalogue
    entries = []
    for model in catalogue.loaded:
        files, edge = await catalogue.describe(model), model.edge
        if edge is None or files is None:
            continue
        entry = ollama.entry(model.name, files, files.digest, files.created)
        state = ollama.state_of(edge.serving.facts, _moment(model.expires_at))
        entries.append(entry | state)
    return json_response({"models": entries})


def _moment(at: float | None) -> str | None:
    """Return a time of the event loop as Ollama writes it."""
    if at is None:
        return None
    seconds = at - asyncio.get_running_loop().time()
    return time_text(datetime.now(timezone.utc) + timedelta(seconds=seconds))


async def _show(request: Request) -> Response:
    """Describe a model as Ollama does, without loading it."""
    catalogue = _edge(request).models.catalogue
    name = parse(await request.body(), ShowRequest).model
    model = await (catalogue.only() if name is None else catalogue.find(name))
    files = await catalogue.describe(model)
    if files is None:
        raise ApiError(500, f"the model {model.name} cannot be used", code="model_load_failed")
    shown = ollama.description(name or model.name, files, files.created, files.template_text)
    return json_response(shown)


async def _cancel(request: Request) -> Response:
    """End a request that runs; its own answer ends with finish_reason "abort"."""
    return await cancel(request, [each.serving for each in _edge(request).models.edges])


async def _openapi(request: Request) -> Response:
    """Describe the server in OpenAPI 3.1."""
    return json_response(document(request.app.state.edge.config, OWN_OPERATIONS, None))


_OWN: Mapping[str, Any] = {
    "/v1/models": _list_models,
    "/v1/models/{id}": _retrieve_model,
    "/api/tags": _tags,
    "/api/ps": _running,
    "/api/show": _show,
    "/v1/requests/{id}/cancel": _cancel,
    "/openapi.json": _openapi,
    "/models/load": _load,
    "/models/unload": _unload,
}
"""Endpoints of routes that no model answers."""
_SAME = frozenset({"/api/version", "/health", "/ready", "/ping", "/load", "/version", "/metrics"})
"""Routes with the handlers of a server with one engine, because these use no engine."""
OWN_OPERATIONS = (
    *(
        replace(
            each,
            handler=_OWN.get(each.path, each.handler),
            statuses=(*each.statuses, *((403,) if each.path in KEEP_ALIVE_ROUTES else ())),
        )
        for each in OPERATIONS
    ),
    Operation("post", "/models/load", _load, "Success", ModelRequest),
    Operation("post", "/models/unload", _unload, "Success", ModelRequest),
)


def create_router(edge: ModelsEdge) -> Starlette:
    """Return the application of several models. Their engines end with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        edge.models.close()
        for each in edge.models.edges:
            await each.page.close()
        edge.shell.close()

    dispatch, own = Dispatch(edge), {*_OWN, *_SAME}
    others = {**dict.fromkeys({each.path for each in OPERATIONS} - own, dispatch), **_OWN}
    page = []
    if edge.config.page:
        data = ("config", "events", "history", "state", "text", "why")
        page = [*edge.shell.routes(), *(Route(f"/mie/{name}", dispatch) for name in data)]
    all_routes = [*routes(OWN_OPERATIONS, others), *page]
    return new_app(
        edge, all_routes, edge.middleware([route.path for route in all_routes]), lifespan=lifespan
    )
