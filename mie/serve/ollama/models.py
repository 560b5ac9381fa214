"""``/api/tags``, ``/api/show``, ``/api/ps`` and ``/api/version``."""

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mie.base.version import __version__
from mie.errors import MieError
from mie.frontend.async_llm import ModelFacts
from mie.load.directory import ModelFiles
from mie.serve.errors import ApiError
from mie.serve.ollama.answers import reasons, time_text
from mie.serve.ollama.protocol import ShowRequest
from mie.serve.serving import LATEST, Asked, Serving
from mie.serve.writer import json_response

_NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays."""
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "num_predict",
}
"""mie's default sampling parameters by Ollama's names."""


async def tags(request: Request) -> Response:
    """List the models as Ollama does."""
    return json_response({"models": _entries(request.app.state.serving)})


async def running(request: Request) -> Response:
    """List the models that are loaded."""
    serving: Serving = request.app.state.serving
    state = state_of(serving.facts, _NEVER)
    return json_response({"models": [each | state for each in _entries(serving)]})


async def show(asked: Asked[ShowRequest]) -> Response:
    """Describe a model as Ollama does."""
    serving = asked.serving
    template = serving.template_text
    parent = serving.names[0] if serving.adapter_of(asked.model) else ""
    described = description(asked.model, serving.facts, serving.created, template, parent=parent)
    described["parameters"] = _parameters(serving.conversation_defaults)
    described["capabilities"] = await _capabilities(serving)
    return json_response(described, asked.headers)


async def version(request: Request) -> Response:
    """Name the version of mie."""
    return json_response({"version": __version__})


def _entries(serving: Serving) -> list[dict[str, Any]]:
    """Return the model by each of its names, and its adapters."""
    adapters = serving.engine.adapters
    digests = {
        **dict.fromkeys(serving.names, serving.digest),
        **{name: serving.digest_of(adapter) for name, adapter in adapters.items()},
    }
    facts, created, parent = serving.facts, serving.created, serving.names[0]
    return [
        entry(name, facts, digest, created, parent=parent if name in adapters else "")
        for name, digest in digests.items()
    ]


def entry(
    name: str, facts: ModelFacts | ModelFiles, digest: str, created: int, *, parent: str = ""
) -> dict[str, Any]:
    """Return a model as the lists have it. ``created`` is in seconds of the Unix epoch.

    ``parent`` is the name of an adapter's model.
    """
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _moment(created),
        "size": facts.weights_bytes,
        "digest": digest,
        "details": _details(facts, parent),
    }


def state_of(facts: ModelFacts, expires_at: str | None) -> dict[str, Any]:
    """Return the fields that only the list of loaded models has."""
    size = facts.weights_bytes + facts.kv_bytes
    return {
        "size": size,
        "size_vram": size if facts.backend.startswith("cupy") else 0,
        "expires_at": expires_at or _NEVER,
        "context_length": facts.max_model_len,
    }


def description(
    name: str, facts: ModelFacts | ModelFiles, created: int, template: str, *, parent: str = ""
) -> dict[str, Any]:
    """Return the details in the files of a model. ``parent`` is the name of an adapter's model."""
    family = _family(facts)
    return {
        "parameters": "",
        "template": template,
        "details": _details(facts, parent),
        "model_info": {
            "general.architecture": family,
            "general.basename": name.removesuffix(LATEST),
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": facts.max_model_len,
            f"{family}.vocab_size": facts.vocab_size,
        },
        "capabilities": capabilities_in(template),
        "modified_at": _moment(created),
    }


def _parameters(defaults: Mapping[str, Any]) -> str:
    given = [f"{own} {defaults[name]}" for name, own in _PARAMETERS.items() if name in defaults]
    return "\n".join(given)


def _details(facts: ModelFacts | ModelFiles, parent: str) -> dict[str, Any]:
    family = _family(facts)
    return {
        "parent_model": parent,
        "format": "gguf" if facts.directories[0].suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _short(facts.num_parameters),
        "quantization_level": facts.quantization or facts.dtype,
    }


def _family(facts: ModelFacts | ModelFiles) -> str:
    """Return the name of the model's family, such as "llama"."""
    return facts.architecture.removesuffix("ForCausalLM").lower()


def _short(number: int) -> str:
    """Return a number of parameters, such as "7.2M"."""
    unit, name = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / unit:.1f}{name}"


def _moment(seconds: float) -> str:
    return time_text(datetime.fromtimestamp(seconds, timezone.utc))


def capabilities_in(template: str) -> list[str]:
    """Return the abilities of a model that its chat template names."""
    tools = ["tools"] if re.search(r"\btools\b", template) else []
    thinks = re.search(r"</think>|\b(enable_thinking|reasoning_effort)\b", template)
    return ["completion", *tools, *(["thinking"] if thinks else [])]


async def _capabilities(serving: Serving) -> list[str]:
    """Return the abilities of a model that is loaded: an answer may be tried."""
    found = [each for each in capabilities_in(serving.template_text) if each != "thinking"]
    try:
        prompt = await serving.chat_prompt([{"role": "user", "content": "Hello"}])
    except (ApiError, MieError):  # a model without a template, or with another idea of roles
        return found
    return [*found, *(["thinking"] if reasons(prompt) else [])]
