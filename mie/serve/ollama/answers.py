"""``POST /api/chat`` and ``POST /api/generate``."""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar, cast

from starlette.responses import Response
from starlette.types import ASGIApp

from mie.config.params.structured import StructuredOutputsParams
from mie.sched.result import TokenLogprobs
from mie.serve.asgi import NDJSON
from mie.serve.errors import ApiError, invalid, ollama_body, too_long, unsupported
from mie.serve.json_text import json_object
from mie.serve.ollama.protocol import (
    Answered,
    ChatRequest,
    GenerateRequest,
    Options,
    Turn,
    sampling,
)
from mie.serve.openai.formats import closed_schema
from mie.serve.openai.tools import own_tools
from mie.serve.parts import Part, PartEvent
from mie.serve.parts_writer import PartsWriter
from mie.serve.serving import SWITCHES
from mie.serve.writer import Choice, check_logprobs, json_response, num_logprobs
from mie.text.tools.definitions import call_message

T = TypeVar("T", bound=Answered, covariant=True)


def unloaded(model: str, path: str) -> Response:
    """Answer a request of ``/api/chat`` or ``/api/generate`` with which a model is unloaded."""
    writer = ChatLines if path == "/api/chat" else GenerateLines
    return json_response(_line(model, writer.said(), done=True, done_reason="unload"))


# The request in the words of chats.


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.thinking:
        message["reasoning"] = turn.thinking
    if turn.tool_calls:
        message["tool_calls"] = [
            call_message(call.id, call.function.name, call.function.arguments)
            for call in turn.tool_calls
        ]
    if turn.role == "tool":
        message |= {"content": turn.content or "", "name": turn.tool_name}
        message |= {"tool_call_id": turn.tool_call_id}
    return {
        name: value for name, value in message.items() if value is not None or name == "content"
    }


def reasons(prompt: dict[str, Any]) -> bool:
    """Return whether the model's reasoning is separated from the text of the answer."""
    return "answer" in prompt and prompt["answer"].reasoning is not None


# The answer.


class LineWriter(PartsWriter[T]):
    """Writes an answer as lines of JSON. A route has the place of its text."""

    media_type = NDJSON
    id_prefix = "ollama-"

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.serving.conversation_defaults

    async def complete(self, prompt: dict[str, Any]) -> ASGIApp:
        """Answer a prompt with the parameters of the body."""
        body, serving = self.body, self.serving
        options: Options = body.options or Options()
        num_new, context = options.num_predict, options.num_ctx
        if context is not None:
            num_prompt, most = len(prompt["prompt_token_ids"]), serving.facts.max_model_len
            if context > most:
                self.ignore("options.num_ctx")
                context = most
            if num_prompt >= context:
                raise too_long(num_prompt, context)
            wanted = num_new or self.defaults.get("max_tokens") or context
            wanted = context if wanted < 0 else wanted
            num_new = min(wanted, context - num_prompt)
        logprobs = num_logprobs(body.top_logprobs, body.logprobs, "logprobs=true")
        structure = None
        if body.format == "json":
            structure = StructuredOutputsParams(json_object=True)
        elif body.format:
            structure = closed_schema(body.format)
        self.set_params(
            "format",
            body.stream is not False,
            n=1,
            **(sampling(options) | self._penalties(options)),
            limit_name="options.num_predict",
            max_tokens=num_new,
            logprobs=logprobs,
            structured_outputs=structure,
        )
        self._check_penalties(options)
        return await self.respond([prompt])

    @staticmethod
    def _penalties(options: Options) -> dict[str, float]:
        """Return the penalties of options that turn them off."""
        if options.repeat_last_n != 0:
            return {}
        return {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

    def _check_penalties(self, options: Options) -> None:
        """Name ``repeat_last_n`` where nothing is penalised.

        Raises:
            ApiError: penalties cover more tokens than it allows.
        """
        last, params = options.repeat_last_n, self.params
        if last is None or last <= 0 or last >= self.serving.facts.max_model_len:
            return
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            why = "penalties cover the prompt and the whole answer (send -1)"
            raise unsupported("options.repeat_last_n", f"{why}; got {last}")
        self.ignore("options.repeat_last_n")

    def loaded(self) -> Response:
        """Answer a request without a prompt, with which clients load a model or unload it."""
        body, limit = cast(Any, self.body), self.serving.config.max_logprobs
        check_logprobs("top_logprobs", body.top_logprobs, limit)
        if body.keep_alive in (0, "0", "0s"):
            raise unsupported("keep_alive", "the server does not unload its model; leave 0 out")
        line = _line(self.model, self.said(), done=True, done_reason="load")
        return json_response(line, self.headers)

    async def chat_prompt(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a conversation as a prompt. The answer continues a last turn of the assistant.

        Raises:
            ApiError: the model's reasoning cannot be turned on or off.
        """
        serving, think = self.serving, self.body.think
        is_prefilled = messages[-1]["role"] == "assistant" and bool(messages[-1]["content"])
        variables = {} if think is None else dict.fromkeys(SWITCHES, bool(think))
        prompt = await serving.chat_prompt(
            messages,
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
            chat_template_kwargs=variables
            | ({"reasoning_effort": think} if isinstance(think, str) else {}),
            **more,
        )
        if think is None or (think is False and not reasons(prompt)):
            return prompt
        if not reasons(prompt):
            raise unsupported("think", f"{self.model} does not support thinking")
        if not re.search(rf"\b({'|'.join(SWITCHES)}|reasoning_effort)\b", serving.template_text):
            message = "this model's chat template has no switch; the model decides"
            raise unsupported("think", message)
        return prompt

    @staticmethod
    def said(
        text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the keys of a line that hold new parts of the answer."""
        raise NotImplementedError

    def ended(self, choice: Choice) -> dict[str, Any]:
        texts = {"text": "", "reasoning": ""}
        rows: list[TokenLogprobs] = []
        for part in choice.parts.all:
            if part.kind != "call":
                texts[part.kind] += part.text
                rows += part.logprobs
        calls = [call for part in choice.parts.all for call in _calls(part)]
        said = self.said(texts["text"], texts["reasoning"], calls)
        more = {"logprobs": self.entries(rows)} if rows else {}
        return self._last(said, choice) | more

    def write(self, event: PartEvent, status: str) -> Iterator[str]:
        part = event.part
        if part.kind == "call":
            if event.what == "end" and (calls := _calls(part)):
                yield self._written(self.said(calls=calls))
        elif event.what == "grow":
            is_text = part.kind == "text"
            said = self.said(event.text) if is_text else self.said(thinking=event.text)
            more = {"logprobs": list(self.entries(event.logprobs))} if event.logprobs else {}
            yield self._written(said | more)

    def finish(self, choice: Choice) -> Iterator[str]:
        yield json.dumps(self._last(self.said(), choice), ensure_ascii=False) + "\n"

    def keepalive(self) -> str:
        return self._written(self.said())

    def failure(self, error: ApiError) -> str:
        return json.dumps(ollama_body(error)) + "\n"

    def _written(self, said: dict[str, Any]) -> str:
        line = _line(self.model, said, done=False)
        return json.dumps(line, ensure_ascii=False) + "\n"

    def _last(self, said: dict[str, Any], choice: Choice) -> dict[str, Any]:
        times = choice.request.metrics
        assert times is not None, "the engine has measured the request"
        return _line(
            self.model,
            said,
            done=True,
            done_reason=choice.new.finish_reason,
            total_duration=_nanoseconds(times.total_time),
            load_duration=0,
            prompt_eval_count=len(choice.request.prompt_token_ids),
            prompt_eval_duration=_nanoseconds(times.prefill_time),
            eval_count=choice.num_tokens,
            eval_duration=_nanoseconds(times.decode_time),
            **self.details([choice.request]),
        )


class ChatLines(LineWriter[ChatRequest]):
    """Answer a conversation in Ollama's shape."""

    async def run(self) -> ASGIApp:
        if not self.body.messages:
            return self.loaded()
        messages = [_message(turn) for turn in self.body.messages]
        tools = [tool.given for tool in own_tools(self.body.tools)] or None
        return await self.complete(await self.chat_prompt(messages, tools=tools))

    @staticmethod
    def said(
        text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        more = {"thinking": thinking, "tool_calls": calls}
        return {"message": message | {name: value for name, value in more.items() if value}}


class GenerateLines(LineWriter[GenerateRequest]):
    """Complete a prompt in Ollama's shape."""

    async def run(self) -> ASGIApp:
        body = self.body
        if not body.prompt:
            return self.loaded()
        if not body.raw:
            system = [{"role": "system", "content": body.system}] if body.system else []
            messages = [*system, {"role": "user", "content": body.prompt}]
            return await self.complete(await self.chat_prompt(messages))
        if body.system or body.think:
            name = "system" if body.system else "think"
            raise invalid(f"raw and {name} exclude each other; a raw prompt has no template", name)
        token_ids = await self.serving.encode(body.prompt)
        return await self.complete({"prompt": body.prompt, "prompt_token_ids": token_ids})

    @staticmethod
    def said(
        text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _calls(part: Part) -> list[dict[str, Any]]:
    """Return the call that a part is, or nothing if it is none, or was cut."""
    if part.kind != "call":
        return []
    try:
        arguments = json_object(part.text.encode())
    except ApiError:
        return []
    call = part.call
    function = {"index": call.index, "name": call.name, "arguments": arguments}
    return [{"id": call.id, "function": function}]


def _line(model: str, said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": model, "created_at": time_text(datetime.now(timezone.utc)), **said, **more}


def time_text(moment: datetime) -> str:
    """Return a moment of UTC as Ollama writes it."""
    return moment.isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)
