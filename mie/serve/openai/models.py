"""``/v1/models``: the model under each of its names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mie.serve.openai.stream import json_response
from mie.serve.serving import Serving

_SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


async def list_models(request: Request) -> Response:
    """List the model once for each name that clients may use."""
    serving: Serving = request.app.state.serving
    return json_response(
        {"object": "list", "data": [_model(name, serving) for name in serving.names]}
    )


async def retrieve_model(request: Request) -> Response:
    """Describe the model under one of its names."""
    serving: Serving = request.app.state.serving
    return json_response(_model(serving.check_model(request.path_params["id"]), serving))


def _model(name: str, serving: Serving) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "mie",
        "root": serving.facts.model,
        "parent": None,
        "max_model_len": serving.facts.max_model_len,
        "default_sampling_params": {name: getattr(serving.default_params, name) for name in _SHOWN},
    }
