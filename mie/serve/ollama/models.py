"""``/api/tags``, ``/api/show``, ``/api/ps`` and ``/api/version``."""

import re
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mie.errors import MieError
from mie.serve.body import read
from mie.serve.errors import ApiError
from mie.serve.ollama.answers import reasons, time_text
from mie.serve.ollama.protocol import ShowRequest
from mie.serve.serving import LATEST, Serving
from mie.serve.writer import json_response
from mie.version import __version__

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
    serving: Serving = request.app.state.serving
    size = serving.facts.weights_bytes
    return json_response({"models": [_entry(n, serving) | {"size": size} for n in serving.names]})


async def running(request: Request) -> Response:
    """List the models that are loaded."""
    serving: Serving = request.app.state.serving
    facts = serving.facts
    size = facts.weights_bytes + facts.kv_bytes
    state = {
        "size": size,
        "size_vram": size if facts.backend.startswith("cupy") else 0,
        "expires_at": _NEVER,
        "context_length": facts.max_model_len,
    }
    return json_response({"models": [_entry(name, serving) | state for name in serving.names]})


async def show(request: Request) -> Response:
    """Describe a model as Ollama does."""
    asked = await read(request, ShowRequest)
    serving = asked.serving
    facts, family = serving.facts, _family(serving)
    defaults = serving.defaults
    given = [f"{own} {defaults[name]}" for name, own in _PARAMETERS.items() if name in defaults]
    return json_response(
        {
            "parameters": "\n".join(given),
            "template": serving.template_text,
            "details": _details(serving),
            "model_info": {
                "general.architecture": family,
                "general.basename": asked.model.removesuffix(LATEST),
                "general.parameter_count": facts.num_parameters,
                f"{family}.context_length": facts.max_model_len,
                f"{family}.vocab_size": facts.vocab_size,
            },
            "capabilities": await _capabilities(serving),
            "modified_at": _modified(serving),
        },
        asked.headers,
    )


async def version(request: Request) -> Response:
    """Name the version of mie."""
    return json_response({"version": __version__})


def _entry(name: str, serving: Serving) -> dict[str, Any]:
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _modified(serving),
        "digest": serving.digest,
        "details": _details(serving),
    }


def _details(serving: Serving) -> dict[str, Any]:
    facts, family = serving.facts, _family(serving)
    return {
        "parent_model": "",
        "format": "gguf" if facts.directories[0].suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _short(facts.num_parameters),
        "quantization_level": facts.quantization or facts.dtype,
    }


def _family(serving: Serving) -> str:
    """Return the name of the model's family, such as "llama"."""
    return serving.facts.architecture.removesuffix("ForCausalLM").lower()


def _short(number: int) -> str:
    """Return a number of parameters, such as "7.2M"."""
    unit, name = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / unit:.1f}{name}"


def _modified(serving: Serving) -> str:
    moment = datetime.fromtimestamp(serving.created, timezone.utc)
    return time_text(moment)


async def _capabilities(serving: Serving) -> list[str]:
    """Return the abilities of a model, found in its chat template."""
    found = ["completion"]
    if re.search(r"\btools\b", serving.template_text):
        found.append("tools")
    try:
        prompt = await serving.chat_prompt([{"role": "user", "content": "Hello"}])
    except (ApiError, MieError):  # a model without a template, or with another idea of roles
        return found
    return [*found, *(["thinking"] if reasons(prompt) else [])]
