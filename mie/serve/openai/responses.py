"""``POST /v1/responses``, without storage."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.params.sampling import RequestOutputKind, SamplingParams
from mie.serve.asgi import route_of
from mie.serve.errors import invalid, refuse_failed, refuse_unfinished, stream_error
from mie.serve.openai.logprobs import LogprobWriter
from mie.serve.openai.params import ignored_fields, parse
from mie.serve.openai.responses_protocol import FIELDS, ResponsesRequest, conversation
from mie.serve.openai.stream import respond
from mie.serve.serving import Generation, Job, Serving, new_id


async def responses(request: Request) -> Response:
    """Answer a conversation in the shape of OpenAI's Responses API."""
    serving: Serving = request.app.state.serving
    body = parse(await request.body(), ResponsesRequest)
    model = serving.check_model(body.model)
    headers = ignored_fields(body, serving, route_of(request.scope), FIELDS)
    params = _sampling_params(body, serving)
    serving.required_tokenizer()
    prompt = await serving.engine.chat_prompt(
        conversation(body), chat_template=serving.chat_template
    )
    job = Job(
        response_id=new_id("resp").replace("-", "_"),
        prompts=[prompt],
        params=params,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        is_max_tokens_given=body.max_output_tokens is not None,
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


def _sampling_params(body: ResponsesRequest, serving: Serving) -> SamplingParams:
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
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
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
        self._item_id = f"msg_{generation.job.response_id[5:]}"
        self._text = ""
        self._num_tokens = 0
        self._logprobs: list[dict[str, Any]] = []
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def add(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        """Take what is new of the answer, and return the log-probabilities of its tokens."""
        self._text += choice.text
        self._num_tokens += len(choice.token_ids)
        if self._writer is None or not choice.logprobs:
            return []
        entries: list[dict[str, Any]] = self._writer.chat(choice.logprobs)["content"]
        self._logprobs += entries
        return entries

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        refuse_failed(outputs)
        [output] = outputs
        choice = output.outputs[0]
        self.add(choice)
        return self.finished(output, choice)

    def finished(self, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        """Return the response after its last token."""
        refuse_unfinished(choice)
        is_whole = choice.finish_reason == "stop"
        num_prompt = len(output.prompt_token_ids)
        return {
            **self._fields,
            "status": "completed" if is_whole else "incomplete",
            "completed_at": int(time.time()) if is_whole else None,
            "error": None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": [self._item("completed" if is_whole else "incomplete", [self._part()])],
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {
                    "cached_tokens": output.num_cached_tokens or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": self._num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + self._num_tokens,
            },
        }

    async def events(self, outputs: list[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; ``outputs`` came already."""
        generation = self._generation
        try:
            while True:
                events = "".join(self._render(outputs))
                if events or not outputs:
                    yield events.encode() or b": keepalive\n\n"
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
                logprobs = self.add(choice)
                if choice.text or logprobs:
                    yield self._event(
                        "response.output_text.delta",
                        **self._place,
                        delta=choice.text,
                        logprobs=logprobs,
                    )
                if choice.finish_reason is not None:
                    yield from self._end(output, choice)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _begin(self) -> Iterator[str]:
        response = self._unfinished("in_progress", None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=self._part())

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> Iterator[str]:
        response = self.finished(output, choice)
        [item] = response["output"]
        yield self._event(
            "response.output_text.done", **self._place, text=self._text, logprobs=self._logprobs
        )
        yield self._event("response.content_part.done", **self._place, part=self._part())
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def _failure(self, error: Exception) -> bytes:
        failed = {"code": "server_error", "message": stream_error(error).message}
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

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def _event(self, name: str, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        data = json.dumps({"type": name, "sequence_number": number, **fields})
        return f"event: {name}\ndata: {data}\n\n"
