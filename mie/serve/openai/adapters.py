"""Load and unload adapters while the server runs, as vLLM does."""

from starlette.responses import Response

from mie.config.adapters import LoRARequest
from mie.errors import ModelError
from mie.serve.errors import ApiError, invalid, no_model
from mie.serve.openai.protocol import OtherFields
from mie.serve.serving import Asked, Serving
from mie.serve.writer import json_response


class LoadAdapterRequest(OtherFields):
    """The body of ``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(OtherFields):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str


async def load_adapter(asked: Asked[LoadAdapterRequest]) -> Response:
    """Load an adapter beside running requests."""
    body, serving = asked.body, asked.serving
    _check_is_allowed(serving)
    async with serving.adapting:
        if body.lora_name in (*serving.names, *serving.engine.adapters):
            message = f"lora_name {body.lora_name!r} is in use (choose another, or unload it first)"
            raise invalid(message, "lora_name")
        try:
            number = await serving.engine.next_lora_id()
            await serving.engine.add_lora(LoRARequest(body.lora_name, number, body.lora_path))
        except ModelError as error:
            raise invalid(str(error), "lora_path") from error
    return json_response({"success": True}, asked.headers)


async def unload_adapter(asked: Asked[UnloadAdapterRequest]) -> Response:
    """Refuse new requests of an adapter. Its running requests end as usual."""
    body, serving = asked.body, asked.serving
    _check_is_allowed(serving)
    async with serving.adapting:
        found = serving.engine.adapters.get(body.lora_name)
        if found is None or not await serving.engine.remove_lora(found.request.lora_int_id):
            raise no_model(body.lora_name, serving.engine.adapters)
    return json_response({"success": True}, asked.headers)


def _check_is_allowed(serving: Serving) -> None:
    """Raise the 403 of a server that keeps the adapters of the start."""
    if not serving.config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "adapters are loaded and unloaded at run time only with "
            "--allow-runtime-lora-updating, because a path names any file of the server",
            code="runtime_lora_updating_off",
        )
