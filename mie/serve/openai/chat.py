"""``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mie.frontend.outputs import CompletionOutput, LogprobRow, RequestOutput
from mie.serve.body import Body, read
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.params import sampling_params
from mie.serve.openai.protocol import ChatCompletionRequest, TemplateFields
from mie.serve.openai.stream import Choice, ChunkWriter, reason, respond
from mie.serve.openai.structure import structure_of
from mie.serve.serving import Generation, Job, Serving, new_id
from mie.serve.sse import json_string
from mie.tools.calls import ToolCall
from mie.tools.parser import JsonEnd


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    serving: Serving = request.app.state.serving
    body, model, headers = await read(request, ChatCompletionRequest)
    max_tokens = _max_tokens(body)
    structure, structure_name = structure_of(body)
    if structure is not None and body.tools and body.tool_choice != "none":
        message = f"{structure_name} and tools exclude each other, unless tool_choice is 'none'"
        raise invalid(message, structure_name)
    params = sampling_params(
        body,
        serving,
        structure_name,
        max_tokens=max_tokens,
        logprobs=_num_logprobs(body),
        structured_outputs=structure,
    )
    if max_tokens is None and "max_tokens" not in serving.defaults:
        params.max_tokens = None  # the rest of the context
    parallel = body.parallel_tool_calls
    prompt = await chat_prompt(body, serving, parallel_tool_calls=parallel)
    job = Job(
        response_id=new_id("chatcmpl"),
        prompts=[prompt],
        params=params,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        is_max_tokens_given=max_tokens is not None,
        structure_name=structure_name,
        logprobs_name="top_logprobs",
    )
    return await respond(
        request, job, headers, lambda generation: ChatWriter(generation, body, model, serving)
    )


async def chat_prompt(
    body: TemplateFields, serving: Serving, *, parallel_tool_calls: bool | None = None
) -> dict[str, Any]:
    """Return a conversation as a prompt, as text and in tokens.

    Raises:
        ApiError: the request may not bring its own template.
        MieError: a message is malformed, or there is no template that takes it.
    """
    serving.required_tokenizer()
    template = body.chat_template
    if template is None:
        template = serving.chat_template
    elif not serving.config.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "requests may not bring their own (--trust-request-chat-template lets them)",
        )
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "add_generation_prompt and continue_final_message exclude each other",
            "continue_final_message",
        )
    adds, choice = body.add_generation_prompt, body.tool_choice
    return await serving.engine.chat_prompt(
        [message.given for message in body.messages],
        chat_template=template,
        chat_template_content_format=body.chat_template_content_format or "auto",
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        tools=None if body.tools is None else [tool.given for tool in body.tools],
        tool_choice=choice.given if isinstance(choice, Body) else choice,
        parallel_tool_calls=parallel_tool_calls,
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """Return the limit under either of its names; the newer one wins."""
    newer = body.max_completion_tokens
    return body.max_tokens if newer is None else newer


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    """Return how many log-probabilities each token needs."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatWriter(ChunkWriter):
    """The answers of ``/v1/chat/completions``, whole or in chunks."""

    def __init__(
        self, generation: Generation, body: ChatCompletionRequest, model: str, serving: Serving
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(generation, body, model, serving, object=kind)
        self._sends_prompt_logprobs = body.prompt_logprobs is not None
        self._sends_reasoning = body.include_reasoning is not False

    # Chunks

    def begin(self, choice: Choice, output: RequestOutput) -> list[str]:
        """Return the chunks that begin a choice."""
        delta = '{"role": "assistant", "content": ""}'
        return [self._delta(choice, delta, "")]

    def news(self, choice: Choice, output: CompletionOutput, extras: str) -> list[str]:
        """Return the chunks with what is new. The extras are in the first one."""
        deltas = []
        if output.reasoning and self._sends_reasoning:
            deltas.append(f'{{"reasoning": {json_string(output.reasoning)}}}')
        if output.text:
            deltas.append(f'{{"content": {json_string(output.text)}}}')
        for call in output.tool_calls or ():
            deltas += _call_deltas(choice, call)
        if extras and not deltas:
            deltas.append('{"content": ""}')
        return [
            self._delta(choice, delta, "" if place else extras)
            for place, delta in enumerate(deltas)
        ]

    def end(self, choice: Choice, output: CompletionOutput, extras: str) -> list[str]:
        """Return the chunks that end a choice."""
        chunks = self.news(choice, output, extras if choice.has_news else "")
        ending = reason(output, finish_reason(output, choice.arguments))
        last = f'{{"index": {choice.index}, "delta": {{}}, "logprobs": null, {ending}}}'
        return [*chunks, last]

    def _delta(self, choice: Choice, delta: str, extras: str) -> str:
        extras = extras or ', "logprobs": null'
        return f'{{"index": {choice.index}, "delta": {delta}{extras}, "finish_reason": null}}'

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: list[LogprobRow | None]
    ) -> Any:
        """Return log-probabilities in the shape of this route."""
        assert self.logprobs is not None
        return self.logprobs.chat([row for row in rows if row is not None])

    # A whole answer

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        [output] = outputs
        answer = self.whole(outputs, [self._whole(each) for each in output.outputs])
        if self._sends_prompt_logprobs:
            writer = self.logprobs or self.new_logprobs()
            answer["prompt_logprobs"] = writer.prompt(output.prompt_logprobs or ())
        if self.has_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _whole(self, each: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if each.tool_calls and not each.text else each.text,
            "refusal": None,
        }
        if each.reasoning is not None and self._sends_reasoning:
            message["reasoning"] = each.reasoning or None
        if each.tool_calls:
            message["tool_calls"] = [call.as_message() for call in each.tool_calls]
        arguments = each.tool_calls[-1].arguments if each.tool_calls else ""
        choice: dict[str, Any] = {
            "index": each.index,
            "message": message,
            "logprobs": self.logprobs and self.logprobs.chat(each.logprobs or ()),
            "finish_reason": finish_reason(each, arguments),
            "stop_reason": each.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = each.token_ids
        return choice


def finish_reason(output: CompletionOutput, arguments: str) -> str | None:
    """Return why a choice ended, which is its calls if it has any and the last one is whole.

    ``arguments`` are those of the last call, which a stop string may have cut.
    """
    has_called = output.finish_reason == "stop" and JsonEnd().read(arguments)
    return "tool_calls" if has_called else output.finish_reason


def _call_deltas(choice: Choice, call: ToolCall) -> Iterator[str]:
    """Yield the deltas of what is new of a call: first its name, then pieces of its arguments."""
    if call.index >= choice.num_calls:
        choice.num_calls, choice.arguments = call.index + 1, ""
        begun = {"index": call.index, **replace(call, arguments="").as_message()}
        yield f'{{"tool_calls": [{json.dumps(begun)}]}}'
    if call.arguments:
        choice.arguments += call.arguments
        piece = f'{{"arguments": {json_string(call.arguments)}}}'
        yield f'{{"tool_calls": [{{"index": {call.index}, "function": {piece}}}]}}'
