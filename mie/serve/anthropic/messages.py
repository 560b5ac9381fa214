"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.params.sampling import RequestOutputKind, SamplingParams
from mie.params.structured import StructuredOutputsParams
from mie.serve.anthropic.conversation import conversation, structure_of, tools_of
from mie.serve.anthropic.protocol import CountTokensRequest, MessagesRequest
from mie.serve.anthropic.stream import MessageWriter
from mie.serve.body import read
from mie.serve.errors import invalid, naming_structure
from mie.serve.openai.stream import json_response, respond
from mie.serve.serving import Job, Serving, new_id


async def messages(request: Request) -> Response:
    """Answer a conversation in Anthropic's shape."""
    serving: Serving = request.app.state.serving
    body, model, headers = await read(request, MessagesRequest)
    structure = structure_of(body)
    prompt = await _prompt(body, serving)
    if structure is not None and "answer" in prompt and prompt["answer"].calls is not None:
        message = "output_config and tools exclude each other, unless tool_choice is 'none'"
        raise invalid(message, "output_config")
    job = Job(
        response_id=new_id("msg").replace("-", "_"),
        prompts=[prompt],
        params=_sampling_params(body, serving, structure),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        is_max_tokens_given=True,
        structure_name="output_config",
    )
    return await respond(request, job, headers, lambda generation: MessageWriter(generation, model))


async def count_tokens(request: Request) -> Response:
    """Count the tokens that a conversation has as a prompt."""
    serving: Serving = request.app.state.serving
    body, _, headers = await read(request, CountTokensRequest)
    prompt = await _prompt(body, serving)
    return json_response({"input_tokens": len(prompt["prompt_token_ids"])}, headers)


ROUTES = (
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
)


async def _prompt(body: CountTokensRequest, serving: Serving) -> dict[str, Any]:
    """Return the conversation as a prompt. The answer continues a last turn of the assistant."""
    serving.required_tokenizer()
    is_prefilled = body.messages[-1].role == "assistant"
    return await serving.engine.chat_prompt(
        conversation(body),
        chat_template=serving.chat_template,
        add_generation_prompt=not is_prefilled,
        continue_final_message=is_prefilled,
        **tools_of(body),
    )


def _sampling_params(
    body: MessagesRequest, serving: Serving, structure: StructuredOutputsParams | None
) -> SamplingParams:
    given = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "structured_outputs": structure,
    }
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    values = {name: value for name, value in given.items() if value is not None}
    with naming_structure("output_config"):
        return SamplingParams(**{**serving.defaults, **values, "n": 1}, output_kind=kind)
