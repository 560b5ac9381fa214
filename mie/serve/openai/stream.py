"""The chunks of a stream, written by hand: the only work of the server for each token."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from mie.frontend.outputs import CompletionOutput, LogprobRow, RequestOutput
from mie.params.sampling import RequestOutputKind
from mie.serve.errors import body_of, refuse_failed
from mie.serve.openai.logprobs import LogprobWriter, TextOffsets
from mie.serve.openai.params import wants_usage
from mie.serve.openai.protocol import GenerationBody
from mie.serve.openai.usage import metrics_of, usage_of
from mie.serve.serving import Generation, Job, Serving
from mie.serve.sse import DONE, EventStream, json_string


class Choice:
    """One choice of a stream, and what waits for its next chunk."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.offsets: TextOffsets | None = None
        self.has_begun = False
        self.has_news = False
        """Whether the extras of the last chunk report any token."""
        self.num_tokens = 0
        self.num_calls = 0
        """Calls of tools that were begun."""
        self.arguments = ""
        """The arguments of the last of them so far."""
        self.token_ids: list[int] = []
        self.rows: list[LogprobRow | None] = []


class ChunkWriter:
    """Turns outputs into the chunks of one request. A dialect says what a choice looks like."""

    def __init__(
        self,
        generation: Generation,
        body: GenerationBody,
        model: str,
        serving: Serving,
        *,
        object: str,
    ) -> None:
        self.generation = generation
        self.n = generation.job.params.n
        self.skips_special = generation.job.params.skip_special_tokens
        self.has_token_ids = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._serving = serving
        self._usage_at_end, self._usage_always = wants_usage(body)
        self.logprobs = None if generation.job.params.logprobs is None else self.new_logprobs()
        self._fields = {
            "id": generation.job.response_id,
            "object": object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": serving.system_fingerprint,
        }
        self._head = "data: " + json.dumps(self._fields)[:-1] + ', "choices": ['
        self._tail = '], "usage": null}\n\n' if self._usage_at_end else "]}\n\n"
        self._choices: dict[int, Choice] = {}
        self._cached: dict[int, int] = {}
        self._has_extras = self.logprobs is not None or self.has_token_ids

    def new_logprobs(self) -> LogprobWriter:
        """Return what writes this request's log-probabilities."""
        tokenizer = self._serving.tokenizer
        return LogprobWriter(
            None if tokenizer is None else tokenizer.tokenizer,
            num_top=self.generation.job.params.logprobs or 0,
            as_ids=self._as_ids,
            skips_special=self.skips_special,
        )

    def whole(self, outputs: list[RequestOutput], choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed.

        Raises:
            ApiError: a request failed.
        """
        refuse_failed(outputs)
        num_tokens = []
        if self.has_new_tokens:
            num_tokens = [len(each.token_ids) for output in outputs for each in output.outputs]
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {
            **self._fields,
            "choices": choices,
            "usage": usage_of(num_prompt, sum(num_tokens), num_cached),
            "metrics": metrics_of(outputs, num_tokens),
        }

    # What a dialect says

    has_new_tokens = True
    """Whether generated tokens are part of the answer."""

    def begin(self, choice: Choice, output: RequestOutput) -> list[str]:
        """Return the choices, as JSON, that come before the first text of a choice."""
        return []

    def news(self, choice: Choice, output: CompletionOutput, extras: str) -> list[str]:
        """Return choices, as JSON, with what is new."""
        raise NotImplementedError

    def end(self, choice: Choice, output: CompletionOutput, extras: str) -> list[str]:
        """Return the last choices, as JSON: what is new, and why it ended."""
        raise NotImplementedError

    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: list[LogprobRow | None]
    ) -> Any:
        """Return the ``logprobs`` of tokens."""
        raise NotImplementedError

    # The stream

    async def events(self, outputs: list[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; ``outputs`` came already.

        If it fails, the last event is the error, and no choice has a ``finish_reason``.
        """
        generation = self.generation
        try:
            while True:
                events = self.render(outputs)
                if generation.is_finished:
                    if self._usage_at_end:
                        events += self._usage_chunk()
                    yield events.encode() + DONE
                    return
                if not events and generation.is_overdue:
                    events = self._keepalive()
                if events:
                    yield events.encode()
                    generation.sent()
                outputs = await generation.next()
        except Exception as error:
            yield b"data: " + body_of(generation.failed(error), "") + b"\n\n" + DONE

    def render(self, outputs: list[RequestOutput]) -> str:
        """Return the events of outputs.

        Raises:
            ApiError: a request failed.
        """
        pieces: list[str] = []
        refuse_failed(outputs)
        for output in outputs:
            first = self.generation.place(output) * self.n
            for each in output.outputs:
                choice = self._choices.get(first + each.index)
                if choice is None:
                    choice = self._new_choice(first + each.index, output)
                self._add(pieces, choice, each, output)
        return "".join(pieces)

    def _add(
        self, pieces: list[str], choice: Choice, each: CompletionOutput, output: RequestOutput
    ) -> None:
        if self.has_new_tokens:
            choice.num_tokens += len(each.token_ids)
        if self._has_extras:
            choice.token_ids += each.token_ids
            if each.logprobs is not None:
                choice.rows += each.logprobs
        is_over = each.finish_reason is not None
        if not choice.has_begun:
            choice.has_begun = True
            for json_choice in self.begin(choice, output):
                self._write(pieces, json_choice)
        is_new = each.text or each.reasoning or each.tool_calls
        if not is_new and not is_over and not (self.has_token_ids and choice.token_ids):
            return  # half a character, or the beginning of a stop string or of a tag
        extras = self._extras(choice) if self._has_extras else ""
        write = self.end if is_over else self.news
        for json_choice in write(choice, each, extras):
            self._write(pieces, json_choice)

    def _write(self, pieces: list[str], json_choice: str) -> None:
        if self._usage_always:
            tail = f'], "usage": {json.dumps(self._usage())}}}\n\n'
            pieces.append(f"{self._head}{json_choice}{tail}")
        else:
            pieces.append(f"{self._head}{json_choice}{self._tail}")

    def _new_choice(self, index: int, output: RequestOutput) -> Choice:
        choice = self._choices[index] = Choice(index)
        self._cached[index // self.n] = output.num_cached_tokens or 0
        return choice

    def _extras(self, choice: Choice) -> str:
        """Return further keys of a choice, and forget what they report."""
        token_ids, choice.token_ids = choice.token_ids, []
        rows, choice.rows = choice.rows, []
        choice.has_news = bool(token_ids)
        extras = ""
        if self.logprobs is not None:
            value = self.logprobs_of(choice, token_ids, rows) if token_ids else None
            extras = f', "logprobs": {json.dumps(value)}'
        if self.has_token_ids:
            extras += f', "token_ids": {token_ids}'
        return extras

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(each.token_ids) for each in self.generation.prepared)
        return usage_of(num_prompt, self.num_completion, sum(self._cached.values()))

    @property
    def num_completion(self) -> int:
        """Tokens that were generated so far."""
        return sum(choice.num_tokens for choice in self._choices.values())

    def _usage_chunk(self) -> str:
        finished = self.generation.finished
        num_tokens = [choice.num_tokens for choice in self._choices.values()]
        metrics = json.dumps(metrics_of(finished, num_tokens))
        return f'{self._head}], "usage": {json.dumps(self._usage())}, "metrics": {metrics}}}\n\n'

    def _keepalive(self) -> str:
        computed, total = self.generation.progress()
        return f": keepalive {computed}/{total}\n\n"


def reason(output: CompletionOutput, finish_reason: str | None) -> str:
    """Return the keys that say why a choice ended."""
    return (
        f'"finish_reason": {json_string(finish_reason or "")}, '
        f'"stop_reason": {json.dumps(output.stop_reason)}'
    )


class Writer(Protocol):
    """Something that turns outputs into an answer, whole or as the events of a stream."""

    def answer(self, outputs: list[RequestOutput]) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed."""

    def events(self, outputs: list[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; ``outputs`` came already, and may be empty."""


async def respond(
    request: Request,
    job: Job,
    headers: Mapping[str, str],
    new_writer: Callable[[Generation], Writer],
) -> Response:
    """Run a job, and return its answer, or the stream of it once there is something to send.

    Raises:
        ApiError: it failed before anything was sent, so that the status can say so.
        MieError: it can never be served, or the engine cannot go on.
    """
    serving: Serving = request.app.state.serving
    generation = await serving.start(request, job)
    try:
        writer = new_writer(generation)
        if job.params.output_kind is RequestOutputKind.DELTA:
            generation.keep_alive(serving.config.keepalive_interval)
            first = await generation.next()
            refuse_failed(first)
            return EventStream(writer.events(first), generation, headers)
        answer = writer.answer(await generation.all())
    except BaseException:
        generation.close()
        raise
    generation.close()
    return json_response(answer, headers)


def json_response(content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer that is not streamed."""
    data = json.dumps(content, ensure_ascii=False).encode()
    return Response(data, 200, headers, media_type="application/json")
