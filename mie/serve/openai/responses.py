"""``POST /v1/responses``, without storage."""

import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from mie.config.params.structured import StructuredOutputsParams
from mie.frontend.outputs import RequestOutput
from mie.serve.errors import ApiError, invalid
from mie.serve.openai.chunks import schema_of
from mie.serve.openai.formats import JsonObjectFormat
from mie.serve.openai.responses_protocol import (
    LOGPROBS,
    AllowedFunctions,
    CallItem,
    CustomCallItem,
    CustomOutputItem,
    FlatSchemaFormat,
    InputItem,
    MessageItem,
    NamedFunction,
    OutputItem,
    ResponsesRequest,
)
from mie.serve.openai.tools import choice_of, own_tools
from mie.serve.parts import Part, PartEvent
from mie.serve.parts_writer import PartsWriter, status_of
from mie.serve.serving import reasoning_variables
from mie.serve.writer import Choice, num_logprobs
from mie.serve.written import json_text
from mie.text.tools.definitions import call_message, custom_call

# The request in the words of chats.


def _structure_of(body: ResponsesRequest) -> StructuredOutputsParams | None:
    """Return the structure of the answer, or None for text."""
    given = None if body.text is None else body.text.format
    return schema_of(given) if isinstance(given, FlatSchemaFormat | JsonObjectFormat) else None


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    about = {k: v for k, v in given.items() if k != "type"}
    if (form := about.get("format")) and form["type"] == "grammar":
        about["format"] = {"type": "grammar", "grammar": form}
    return {"type": given["type"], given["type"]: about}


def _named(tool: NamedFunction) -> dict[str, Any]:
    return {"type": tool.type, tool.type: {"name": tool.name}}


def _conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them, the instructions first.

    System messages at the beginning are joined, since templates take one in the first place only.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add an item to the messages. Calls and reasoning belong to an assistant's message."""
    last: dict[str, Any] = messages[-1] if messages else {"role": None}
    if isinstance(item, MessageItem):
        content = item.given["content"]
        if len(messages) == 1 and {last["role"], item.role} <= {"system", "developer"}:
            last["content"] = _parts(last["content"]) + _parts(content)
        elif "reasoning" in last and last["content"] is None and item.role == "assistant":
            last["content"] = content
        else:
            messages.append({"role": item.role, "content": content})
    elif isinstance(item, CallItem | CustomCallItem):
        if last["role"] != "assistant":
            last = {"role": "assistant", "content": None}
            messages.append(last)
        call = (
            call_message(item.call_id, item.name, item.arguments)
            if isinstance(item, CallItem)
            else custom_call(item.call_id, item.name, item.input)
        )
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, OutputItem | CustomOutputItem):
        output = {"tool_call_id": item.call_id, "content": item.given["output"]}
        messages.append({"role": "tool", **output})
    elif text := "".join(part.text for part in item.content or ()):
        messages.append({"role": "assistant", "content": None, "reasoning": text})


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# The answer.

_ITEMS = MappingProxyType(
    {
        "text": ("message", "msg", "output_text"),
        "reasoning": ("reasoning", "rs", "reasoning_text"),
        "call": ("function_call", "fc", "function_call_arguments"),
        "custom": ("custom_tool_call", "ctc", "custom_tool_call_input"),
    }
)
"""Kinds of parts -> the type of the item, the beginning of its id, and the name of its events."""


def _about(part: Part) -> tuple[str, str, str]:
    is_custom = part.kind == "call" and part.call.is_custom
    return _ITEMS["custom" if is_custom else part.kind]


class ResponseWriter(PartsWriter[ResponsesRequest]):
    """Answer a conversation in the shape of OpenAI's Responses API."""

    id_prefix = "resp_"

    _number = 0  # sequence number of the next event
    _effort: str | None = None  # of the reasoning, if the chat template reads it

    async def run(self) -> ASGIApp:
        body = self.body
        has_logprobs = LOGPROBS in (body.include or ())
        logprobs = num_logprobs(body.top_logprobs, has_logprobs, f"include=['{LOGPROBS}']")
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options needs stream=true", "stream_options")
        self.set_params(
            "text",
            body.stream,
            n=1,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            limit_name="max_output_tokens",
            max_tokens=body.max_output_tokens,
            logprobs=logprobs,
            structured_outputs=_structure_of(body),
        )
        choice: Any = body.tool_choice
        if isinstance(choice, NamedFunction):
            choice = _named(choice)
        elif isinstance(choice, AllowedFunctions):
            allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
        self.ignore(*(f"include.{i}" for i, x in enumerate(body.include or ()) if x != LOGPROBS))
        tools = own_tools(body.tools)
        prompt = await self.serving.chat_prompt(
            _conversation(body),
            chat_template_kwargs=self._reasoning(),
            tools=[_tool(tool.given) for tool in tools] or None,
            tool_choice=choice_of(choice, tools),
            parallel_tool_calls=body.parallel_tool_calls,
            max_tool_calls=body.max_tool_calls,
        )
        return await self.respond([prompt])

    def _reasoning(self) -> dict[str, Any]:
        """Return the template's variables about reasoning, and name an effort without effect."""
        effort = None if self.body.reasoning is None else self.body.reasoning.effort
        found = reasoning_variables(self.serving.template_text, effort=effort)
        if effort is not None and not found:
            self.ignore("reasoning.effort")
        self._effort = effort if found else None
        return found

    @cached_property
    def _fields(self) -> dict[str, Any]:
        body, params = self.body, self.params
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self._effort, "summary": None},
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

    def ended(self, choice: Choice) -> dict[str, Any]:
        output, status = choice.request, status_of(choice.new)
        is_whole = choice.new.finish_reason == "stop"
        num_prompt, num_tokens = len(output.prompt_token_ids), choice.num_tokens
        parts = choice.parts.all
        return {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if is_whole else None,
            "error": None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": [
                self._item(part, status if part is parts[-1] else "completed") for part in parts
            ],
            "usage": {
                "input_tokens": num_prompt,
                "input_tokens_details": {
                    "cached_tokens": output.num_cached_tokens or 0,
                    "cache_write_tokens": 0,
                },
                "output_tokens": num_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": output.metrics.num_reasoning_tokens if output.metrics else 0
                },
                "total_tokens": num_prompt + num_tokens,
                **self.details([output]),
            },
        }

    # Events

    def begin(self, output: RequestOutput | None) -> str:
        response = self._unfinished("in_progress", None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def write(self, event: PartEvent, status: str) -> Iterator[str]:
        part, name = event.part, _about(event.part)[2]
        place = {"item_id": self._id(part), "output_index": part.index}
        content = place if part.kind == "call" else {**place, "content_index": 0}
        if event.what == "grow":
            more = {"logprobs": self.entries(event.logprobs)} if part.kind == "text" else {}
            yield self._event(f"response.{name}.delta", **content, delta=event.text, **more)
        elif event.what == "begin":
            item = self._item(part, "in_progress")
            yield self._event("response.output_item.added", output_index=part.index, item=item)
            if part.kind == "text":
                yield self._event(
                    "response.content_part.added", **content, part=self._content(part)
                )
        else:
            done: dict[str, Any] = {"text": part.text}
            if part.kind == "call" and part.call.is_custom:
                done = {"input": part.text}
            elif part.kind == "call":
                done = {"name": part.call.name, "arguments": part.text}
            elif part.kind == "text":
                done["logprobs"] = self.entries(part.logprobs)
            yield self._event(f"response.{name}.done", **content, **done)
            if part.kind == "text":
                yield self._event("response.content_part.done", **content, part=self._content(part))
            item = self._item(part, status)
            yield self._event("response.output_item.done", output_index=part.index, item=item)

    def finish(self, choice: Choice) -> Iterator[str]:
        yield self._event(f"response.{status_of(choice.new)}", response=self.ended(choice))

    def failure(self, error: ApiError) -> str:
        failed = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._unfinished("failed", failed))

    def _id(self, part: Part) -> str:
        place = f"_{part.index}" if part.index else ""
        number = self.response_id.removeprefix(self.id_prefix)
        return f"{_about(part)[1]}_{number}{place}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(part), "type": _about(part)[0], "status": status}
        if part.kind == "call":
            text = "input" if part.call.is_custom else "arguments"
            return {**item, "call_id": part.call.id, "name": part.call.name, text: part.text}
        about: dict[str, Any] = {"role": "assistant"} if part.kind == "text" else {"summary": []}
        return {
            **item,
            **about,
            "content": [] if status == "in_progress" else [self._content(part)],
        }

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
        data = json_text({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: {data}\n\n"

    def _content(self, part: Part) -> dict[str, Any]:
        """Return the content of an item that has text."""
        content: dict[str, Any] = {"type": _ITEMS[part.kind][2], "text": part.text}
        if part.kind == "reasoning":
            return content
        return {**content, "annotations": [], "logprobs": self.entries(part.logprobs)}
