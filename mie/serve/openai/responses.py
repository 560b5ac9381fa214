"""``POST /v1/responses``, without storage."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.params.sampling import RequestOutputKind, SamplingParams
from mie.params.structured import StructuredOutputsParams
from mie.serve.body import read
from mie.serve.errors import (
    invalid,
    naming_structure,
    refuse_failed,
    refuse_unfinished,
)
from mie.serve.openai.logprobs import LogprobWriter
from mie.serve.openai.responses_input import conversation, format_of, tool_choice_of, tools_of
from mie.serve.openai.responses_items import Event, OutputItems
from mie.serve.openai.responses_protocol import ResponsesRequest
from mie.serve.openai.stream import respond
from mie.serve.serving import Generation, Job, Serving, new_id


async def responses(request: Request) -> Response:
    """Answer a conversation in the shape of OpenAI's Responses API."""
    serving: Serving = request.app.state.serving
    body, model, headers = await read(request, ResponsesRequest)
    structure = format_of(body)
    if structure is not None and body.tools and body.tool_choice != "none":
        message = "text and tools exclude each other, unless tool_choice is 'none'"
        raise invalid(message, "text")
    params = _sampling_params(body, serving, structure)
    serving.required_tokenizer()
    prompt = await serving.engine.chat_prompt(
        conversation(body),
        chat_template=serving.chat_template,
        tools=tools_of(body),
        tool_choice=tool_choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls,
    )
    job = Job(
        response_id=new_id("resp").replace("-", "_"),
        prompts=[prompt],
        params=params,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        is_max_tokens_given=body.max_output_tokens is not None,
        structure_name="text",
        logprobs_name="top_logprobs",
    )
    logprobs = None
    if body.has_logprobs:
        tokenizer = serving.required_tokenizer().tokenizer
        logprobs = LogprobWriter(tokenizer, num_top=body.top_logprobs or 0)
    return await respond(
        request, job, headers, lambda generation: ResponseWriter(generation, body, model, logprobs)
    )


ROUTES = (Route("/v1/responses", responses, methods=["POST"]),)


def _sampling_params(
    body: ResponsesRequest, serving: Serving, structure: StructuredOutputsParams | None
) -> SamplingParams:
    if body.top_logprobs and not body.has_logprobs:
        raise invalid("top_logprobs needs include=['message.output_text.logprobs']", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    values: dict[str, Any] = {"max_tokens": None, **serving.defaults, "n": 1}
    for name in ("temperature", "top_p", "seed"):
        if getattr(body, name) is not None:
            values[name] = getattr(body, name)
    if body.max_output_tokens is not None:
        values["max_tokens"] = body.max_output_tokens
    if body.has_logprobs:
        values["logprobs"] = body.top_logprobs or 0
    if structure is not None:
        values["structured_outputs"] = structure
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    with naming_structure("text"):
        return SamplingParams(**values, output_kind=kind)


class ResponseWriter:
    """The answer of ``/v1/responses``, whole or as events."""

    def __init__(
        self,
        generation: Generation,
        body: ResponsesRequest,
        model: str,
        logprobs: LogprobWriter | None,
    ) -> None:
        params = generation.job.params
        self._generation = generation
        self._items = OutputItems(generation.job.response_id)
        self._num_tokens = 0
        self._writer = logprobs
        self._number = 0
        self._has_begun = False
        self._fields = {
            "id": generation.job.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(body.given.get("text") or {})},
            "tool_choice": body.given.get("tool_choice") or "auto",
            "tools": body.given.get("tools") or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def add(self, choice: CompletionOutput) -> Iterator[Event]:
        """Take what is new of the answer, and yield its events."""
        self._num_tokens += len(choice.token_ids)
        logprobs: list[dict[str, Any]] = []
        if self._writer is not None and choice.logprobs:
            logprobs = self._writer.chat(choice.logprobs)["content"]
        yield from self._items.add(choice, logprobs)

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        refuse_failed(outputs)
        [output] = outputs
        choice = output.outputs[0]
        for _ in chain(self.add(choice), self._items.end(_status(choice))):
            pass  # nothing is sent before the end
        return self.finished(output, choice)

    def finished(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """Return the response after its last token."""
        refuse_unfinished(choice)
        status, is_whole = _status(choice), choice.finish_reason == "stop"
        num_prompt = len(output.prompt_token_ids)
        return {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if is_whole else None,
            "error": None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._items.as_list(status),
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {
                    "cached_tokens": output.num_cached_tokens or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": self._num_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": output.metrics.num_reasoning_tokens if output.metrics else 0
                },
                "total_tokens": num_prompt + self._num_tokens,
            },
        }

    async def events(self, outputs: list[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; ``outputs`` came already."""
        generation = self._generation
        try:
            while True:
                events = "".join(self._render(outputs))
                if not events and generation.is_overdue:
                    events = ": keepalive\n\n"
                if events:
                    yield events.encode()
                    generation.sent()
                if generation.is_finished:
                    return
                outputs = await generation.next()
        except Exception as error:
            yield self._failure(error)

    def _render(self, outputs: list[RequestOutput]) -> Iterator[str]:
        refuse_failed(outputs)
        if not self._has_begun:
            self._has_begun = True
            yield from self._begin()
        for output in outputs:
            for choice in output.outputs:
                yield from self._written(self.add(choice))
                if choice.finish_reason is not None:
                    yield from self._end(output, choice)

    def _begin(self) -> Iterator[str]:
        response = self._unfinished("in_progress", None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> Iterator[str]:
        refuse_unfinished(choice)
        yield from self._written(self._items.end(_status(choice)))
        response = self.finished(output, choice)
        yield self._event(f"response.{response['status']}", response=response)

    def _written(self, events: Iterable[Event]) -> Iterator[str]:
        for name, fields in events:
            yield self._event(name, **fields)

    def _failure(self, error: Exception) -> bytes:
        failed = {"code": "server_error", "message": self._generation.failed(error).message}
        return self._event("response.failed", response=self._unfinished("failed", failed)).encode()

    def _unfinished(self, status: str, error: dict[str, Any] | None) -> dict[str, Any]:
        return {
            **self._fields,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _event(self, kind: str, /, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        data = json.dumps({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: {data}\n\n"


def _status(choice: CompletionOutput) -> str:
    return "completed" if choice.finish_reason == "stop" else "incomplete"
