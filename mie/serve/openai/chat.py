"""``POST /v1/chat/completions``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from mie.frontend.outputs import CompletionOutput
from mie.sched.result import TokenLogprobs
from mie.serve.asgi import header, json_string
from mie.serve.body import Body
from mie.serve.errors import unsupported
from mie.serve.openai.chunks import ChunkWriter, set_params
from mie.serve.openai.protocol import ChatCompletionRequest, TemplateFields
from mie.serve.openai.tools import choice_of, own_tools
from mie.serve.page.access import PAGE_HEADER
from mie.serve.serving import Serving, reasoning_variables
from mie.serve.writer import Choice, num_logprobs
from mie.text.tools.values import JsonEnd

_FUNCTION = ("function", "arguments")


async def chat_prompt(
    body: TemplateFields,
    serving: Serving,
    *,
    parallel_tool_calls: bool | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a conversation as a prompt, as text and in tokens.

    ``variables`` of the chat template make way for the request's own.

    Raises:
        ApiError: the request may not bring its own template.
        MieError: a message is malformed, or there is no template that takes it.
    """
    if body.chat_template is not None and not serving.config.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "requests may not bring their own (--trust-request-chat-template lets them)",
        )
    adds, choice, tools = body.add_generation_prompt, body.tool_choice, own_tools(body.tools)
    return await serving.chat_prompt(
        [message.given for message in body.messages],
        chat_template=body.chat_template,
        chat_template_content_format=body.chat_template_content_format or "auto",
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs={**variables, **(body.chat_template_kwargs or {})},
        tools=[tool.given for tool in tools] or None,
        tool_choice=choice_of(choice.given if isinstance(choice, Body) else choice, tools),
        parallel_tool_calls=parallel_tool_calls,
    )


class ChatWriter(ChunkWriter[ChatCompletionRequest]):
    """Answer a conversation."""

    id_prefix = "chatcmpl-"
    last_delta = '"delta": {}'
    empty_delta = '"delta": {"content": ""}'

    def __init__(self, **asked: Any) -> None:
        is_stream = asked["body"].stream
        object = "chat.completion.chunk" if is_stream else "chat.completion"
        super().__init__(object=object, **asked)
        self._sends_reasoning = self.body.include_reasoning is not False

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The defaults of the model, and on the page the defaults of a conversation."""
        is_page = header(self.scope, PAGE_HEADER) is not None
        return self.serving.conversation_defaults if is_page else self.serving.defaults

    async def run(self) -> ASGIApp:
        body = self.body
        name, max_tokens = "max_completion_tokens", body.max_completion_tokens
        if max_tokens is None:
            name, max_tokens = "max_tokens", body.max_tokens
        logprobs = num_logprobs(body.top_logprobs, body.logprobs, "logprobs=true")
        set_params(self, limit_name=name, max_tokens=max_tokens, logprobs=logprobs)
        template = body.chat_template or self.serving.template_text
        variables = reasoning_variables(template, effort=body.reasoning_effort)
        if body.reasoning_effort is not None and not variables:
            self.ignore("reasoning_effort")
        parallel = body.parallel_tool_calls
        prompt = await chat_prompt(
            body, self.serving, parallel_tool_calls=parallel, variables=variables
        )
        if body.prediction is not None and self.serving.facts.has_drafts:
            prompt["prediction"] = body.prediction.text
        elif body.prediction is not None:
            self.ignore("prediction")
        return await self.respond([prompt])

    def first(self, choice: Choice) -> tuple[str, str]:
        return '"delta": {"role": "assistant", "content": ""}', ""

    def deltas(self, choice: Choice) -> list[str]:
        deltas = []
        for what, part, text, _ in choice.parts.add(choice.new):
            if what == "begin" and part.kind == "call":
                call = {"index": part.call.index, **replace(part.call, arguments="").as_message()}
                deltas.append(f'"delta": {{"tool_calls": [{json.dumps(call)}]}}')
            elif what == "grow" and part.kind == "call":
                kind, name = ("custom", "input") if part.call.is_custom else _FUNCTION
                call_piece = f'"{kind}": {{"{name}": {json_string(text)}}}'
                piece = f'{{"index": {part.call.index}, {call_piece}}}'
                deltas.append(f'"delta": {{"tool_calls": [{piece}]}}')
            elif what == "grow" and (part.kind == "text" or self._sends_reasoning):
                key = "content" if part.kind == "text" else "reasoning"
                deltas.append(f'"delta": {{"{key}": {json_string(text)}}}')
        return deltas

    def reason_of(self, choice: Choice) -> str | None:
        call = choice.parts.last_call
        return finish_reason(choice.new, "" if call is None else call.arguments)

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: Sequence[TokenLogprobs | None]
    ) -> Any:
        assert self.logprobs is not None
        return self.logprobs.chat([row for row in rows if row is not None])

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        answer = super().whole(choices)
        output = choices[0].request
        if self.sends_prompt_logprobs:
            writer = self.logprobs or self.new_logprobs()
            answer["prompt_logprobs"] = writer.prompt(self.prompt_rows(choices[0]))
        if self.has_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def choice_of(self, choice: Choice) -> Any:
        output = choice.new
        calls = output.tool_calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not output.text else output.text,
            "refusal": None,
        }
        if output.reasoning is not None and self._sends_reasoning:
            message["reasoning"] = output.reasoning or None
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        written: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self.logprobs and self.logprobs.chat(choice.rows),
            "finish_reason": finish_reason(output, calls[-1].arguments if calls else ""),
            "stop_reason": output.stop_reason,
        }
        if self.has_token_ids:
            written["token_ids"] = output.token_ids
        return written


def finish_reason(output: CompletionOutput, arguments: str) -> str | None:
    """Return why a choice ended. Calls are the reason if there are any and the last call is whole.

    ``arguments`` are the last call's. A stop string may have cut them.
    """
    has_called = output.finish_reason == "stop" and JsonEnd().read(arguments)
    return "tool_calls" if has_called else output.finish_reason
