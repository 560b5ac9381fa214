"""From a request to an answer: the common part of all dialects.

A dialect is a `Writer`. It renders each choice as events of a stream, or as one whole answer.
Dialects with answers in parts, one after another, render the same stream of part events.
"""

import asyncio
import json
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from starlette.responses import Response
from starlette.types import ASGIApp

from mie.base.threads import call_in_thread
from mie.config.params.sampling import RequestOutputKind
from mie.engine.watch.queue import most_logprobs
from mie.errors import MieError
from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.frontend.prepare import PreparedRequest
from mie.frontend.stream import OutputStream
from mie.sched.result import TokenLogprobs
from mie.serve.access_log import work_of
from mie.serve.asgi import EventStream, facts_of, header
from mie.serve.departs import WANTED, departure_of, header_of
from mie.serve.errors import ApiError, api_error, invalid, naming_structure, refuse_failed
from mie.serve.openai.logprobs import LogprobWriter, TextOffsets
from mie.serve.parts import Parts
from mie.serve.serving import A, Asked, salt_of
from mie.serve.written import PART_BYTES, LargeAnswer, json_text, written

logger = logging.getLogger(__name__)

HELD_BYTES, WRITTEN_BYTES = 80, 160
"""Memory of a log-probability that an answer holds, and of each of its texts in the answer."""


class Choice:
    """One choice of an answer, and the tokens that wait for its next event."""

    request: RequestOutput
    """The newest output of its prompt."""
    new: CompletionOutput
    """The choice's part of that output."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Index of the choice among the choices of all prompts."""
        self.parts = Parts()
        self.offsets: TextOffsets | None = None
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.rows: list[TokenLogprobs] = []

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        """Return the waiting tokens and their log-probabilities, and drop them."""
        taken = self.token_ids, self.rows
        self.token_ids, self.rows = [], []
        return taken


class Writer(Asked[A], EventStream, ABC):
    """Runs one HTTP request, and writes its answer. A dialect defines the form of the answer."""

    id_prefix: ClassVar[str]
    """The beginning of the ids of answers."""
    logprobs_name: ClassVar[str] = "top_logprobs"
    """The client's parameter with the number of log-probabilities of each token."""

    add_special_tokens = True
    """Whether texts are encoded with the special tokens that the model expects."""

    def __init__(self, **asked: Any) -> None:
        """Take over the fields of `Asked`."""
        Asked.__init__(self, **asked)
        EventStream.__init__(self, self.events(), self.headers)
        self.response_id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.prepared: Sequence[PreparedRequest] = ()
        """The prompts."""
        self.finished: list[RequestOutput] = []
        """The final outputs so far."""
        self.choices: dict[int, Choice] = {}
        self.logprobs: LogprobWriter | None = None
        """Writes log-probabilities, if they are wanted."""
        self.keeps_tokens = False
        """Whether tokens wait for an event that reports them."""
        self._news: list[RequestOutput] = []  # outputs with events to write
        self._has_begun = False
        self._stream: OutputStream
        self._answer_bytes = 0  # the memory that is counted for the log-probabilities
        self._num_logprobs = 0  # that the engine may compute
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_quiet = self._is_overdue = self._is_paced = False

    @property
    def spelling(self) -> dict[str, bool]:
        """How log-probabilities are written, as options of `LogprobWriter`."""
        return {}

    @abstractmethod
    async def run(self) -> ASGIApp:
        """Read the parameters and the prompts from the body, and `respond`."""

    def new_logprobs(self) -> LogprobWriter:
        """Return a writer of this request's log-probabilities."""
        tokenizer, num_top = self.serving.tokenizer, self.params.logprobs or 0
        known = None if tokenizer is None else tokenizer.tokenizer
        return LogprobWriter(known, num_top=num_top, **self.spelling)

    # The dialect

    def begin(self, output: RequestOutput | None) -> str:
        """Return the first events. Without an output yet, they may be left for later."""
        return ""

    def open(self, choice: Choice) -> Iterator[str]:
        """Yield the events before the first text of a choice."""
        return iter(())

    @abstractmethod
    def grow(self, choice: Choice) -> Iterator[str]:
        """Yield the events of a choice's new output, and at its end the last ones."""

    @abstractmethod
    def whole(self, choices: list[Choice]) -> Any:
        """Return the body of an answer that is not streamed, from all of its choices."""

    def end(self) -> str:
        """Return the events after the last output."""
        return ""

    def keepalive(self) -> str:
        """Return a sign of life for a client that waits for the engine."""
        computed, total = self._stream.progress()
        return f": keepalive {computed}/{total}\n\n"

    @abstractmethod
    def failure(self, error: ApiError) -> str:
        """Return the events that end a stream which has failed."""

    # The answer

    def place(self, output: RequestOutput) -> int:
        """Return the number of an output's prompt."""
        suffix = output.request_id.removeprefix(self.response_id)
        return int(suffix[1:] or 0)

    def render(self, outputs: list[RequestOutput]) -> Iterator[str]:
        """Yield the events of outputs, even of none."""
        if not self._has_begun and (begun := self.begin(outputs[0] if outputs else None)):
            self._has_begun = True
            yield begun
        for output in outputs:
            for new in output.outputs:
                num_open = len(self.choices)
                choice = self._noted(output, new)
                if len(self.choices) > num_open:
                    yield from self.open(choice)
                yield from self.grow(choice)

    def _noted(self, output: RequestOutput, new: CompletionOutput) -> Choice:
        """Return the choice of an output, with its new tokens."""
        index = self.place(output) * self.params.n + new.index
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = Choice(index)
        choice.request, choice.new = output, new
        first, choice.num_tokens = choice.num_tokens, choice.num_tokens + len(new.token_ids)
        if self.keeps_tokens:
            request = self._stream.answers[self.place(output)].request
            rows = request.sequences[new.index].logprobs
            choice.token_ids += new.token_ids
            choice.rows += rows[first : choice.num_tokens]
        return choice

    def prompt_rows(self, choice: Choice) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of a choice's prompt. The first token has none."""
        request = self._stream.answers[choice.index // self.params.n].request
        return [] if self.params.prompt_logprobs is None else [None, *request.prompt_logprobs]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream, the first from outputs that have come."""
        try:
            while True:
                refuse_failed(self._news)
                events = "".join(self.render(self._news))
                if not self._stream.num_unfinished:
                    yield (events + self.end()).encode()
                    return
                if not events and self._is_overdue:
                    events = self.keepalive()
                if events:
                    yield events.encode()
                    self._is_quiet = self._is_overdue = False
                self._news = await self._next()
        except Exception as error:
            if not isinstance(error, (ApiError, MieError)):
                logger.error("a stream met a bug: %r", error, exc_info=error)
            failed = api_error(error)
            facts_of(self.scope)["status"] = failed.status
            yield self.failure(failed).encode("utf-8", "replace")

    # The run

    async def respond(self, prompts: Sequence[Any]) -> ASGIApp:
        """Run the request, and return its answer, or a stream once there is something to send.

        ``prompts`` are texts, lists of token ids, or prompts of `AsyncLLM.chat_prompt`.

        Raises:
            ApiError: it failed before anything was sent, so that the status can report it.
            MieError: it can never be served, or the engine cannot go on.
        """
        await self._start(prompts)
        try:
            if self.params.output_kind is RequestOutputKind.DELTA:
                self._keep_alive()
                self._news = await self._next()
                refuse_failed(self._news)
                self.headers |= header_of(self._departure(self._news))
                return self
            while self._stream.num_unfinished:
                await self._next()
            outputs = sorted(self.finished, key=self.place)
            refuse_failed(outputs)
            self.headers |= header_of(self._departure(outputs))
            choices = [self._noted(x, new) for x in outputs for new in x.outputs]
            if self._answer_bytes < PART_BYTES:
                answer: ASGIApp = _json_answer(json_text(self.whole(choices)), self.headers)
            else:
                # One after another, so that they leave threads and memory to others.
                async with self.serving.writing:
                    parts = await call_in_thread(self.parts_of, choices)
                answer = LargeAnswer(parts, self.headers, self._release)
        except BaseException:
            self.close()
            self._release()
            raise
        self.close()
        if not isinstance(answer, LargeAnswer):
            self._release()
        return answer

    def parts_of(self, choices: list[Choice]) -> list[bytes]:
        """Return the pieces of the whole answer, or none if the request was given up."""
        return written(self.whole(choices), lambda: not self._is_closed)

    def details(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return mie's part of the ``usage``, if the client requests it by a header."""
        if header(self.scope, WANTED) != "1":
            return {}
        return {"prefix_departs": self._departure(sorted(outputs, key=self.place))}

    def _departure(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """Return where the prompts depart, with texts if no other client can have sent them."""
        is_alone = self.scope.get("mie.client") is None or bool(salt_of(self.scope, None))
        return departure_of(outputs, self.serving.tokenizer if is_alone else None)

    def _release(self) -> None:
        """Count the memory of the log-probabilities no more."""
        num_bytes, self._answer_bytes = self._answer_bytes, 0
        if num_bytes:
            limit = self.serving.queue_limit
            limit.release_answer(limit.client_of(self.scope), num_bytes)

    async def _start(self, prompts: Sequence[Any]) -> None:
        """Prepare the prompts and queue them, all or none."""
        serving, scope = self.serving, self.scope
        if self.params.logprobs is not None:
            self.logprobs, self.keeps_tokens = self.new_logprobs(), True
        self._is_paced = self.params.output_kind is not RequestOutputKind.DELTA
        limit, engine = serving.queue_limit, serving.engine
        check_logprobs(self.logprobs_name, self.params.logprobs, serving.config.max_logprobs)
        check_logprobs("prompt_logprobs", self.params.prompt_logprobs, serving.config.max_logprobs)
        many = len(prompts) > 1
        with limit.entering(limit.client_of(scope), len(prompts)):
            self.prepared = [
                await self._prepare(
                    prompt, f"{self.response_id}-{place}" if many else self.response_id
                )
                for place, prompt in enumerate(prompts)
            ]
            self._hold()
            try:
                check = partial(limit.check, self.prepared, self._num_logprobs)
                self._stream = await engine.add(self.prepared, check)
            except BaseException:
                self._release()
                raise
        serving.running[self.response_id] = self
        if serving.config.log_prompts:
            texts = [each.prompt or each.token_ids for each in self.prepared]
            facts_of(scope)["prompts"] = json.dumps(texts, ensure_ascii=True)

    def _hold(self) -> None:
        """Count the memory of the log-probabilities, which are read from the requests."""
        num_bytes, facts = 0, self.serving.facts
        is_stream = self.params.output_kind is RequestOutputKind.DELTA
        for each in self.prepared:
            count = most_logprobs(
                each.params, len(each.token_ids), facts.vocab_size, facts.max_model_len
            )
            # Each of n choices repeats the log-probabilities of the prompt, and an echo adds one.
            num_texts = 1 if is_stream else self.params.n + (self.params.logprobs is not None)
            self._num_logprobs += count
            num_bytes += count * (HELD_BYTES + num_texts * WRITTEN_BYTES)
        if num_bytes:
            limit = self.serving.queue_limit
            limit.hold_answer(limit.client_of(self.scope), num_bytes, facts.answer_bytes)
            self._answer_bytes = num_bytes

    async def _prepare(self, prompt: Any, request_id: str) -> PreparedRequest:
        serving, body = self.serving, cast(Any, self.body)
        adapter = serving.adapter_of(self.model)
        with naming_structure(self.structure_name):
            prepared = await serving.engine.prepare(
                prompt,
                self.params,
                request_id,
                priority=serving.priority_of(body.priority),
                client=serving.queue_limit.client_of(self.scope),
                cache_salt=salt_of(self.scope, body.cache_salt),
                caller=self.scope.get("mie.client"),
                add_special_tokens=self.add_special_tokens,
                lora_request=None if adapter is None else adapter.request,
            )
        rest = serving.facts.max_model_len - len(prepared.token_ids)
        if self.limit is not None and self.limit[1] > rest:
            self.ignore(self.limit[0])
            self.limit = None  # it is named once for all prompts
        return replace(prepared, has_rows=False)

    async def _next(self) -> list[RequestOutput]:
        """Wait for outputs, and return the outputs that arrived, merged for each prompt.

        The list is empty if a sign of life is due.

        Raises:
            EngineDeadError: the engine cannot go on.
        """
        outputs: list[RequestOutput] = []
        while not outputs and not self._is_overdue:
            await self._stream.arrival
            outputs = self._stream.take()
        if outputs and not self._is_paced:  # later tokens may be merged
            self._stream.delay(self.serving.pace.hold)
            self._is_paced = True
        self.finished += [output for output in outputs if output.finished]
        return outputs

    def _keep_alive(self) -> None:
        """Make `_next` end when nothing was sent for the interval, unless this is 0."""
        if interval := self.serving.config.keepalive_interval:
            self._is_quiet = True
            self._timer = asyncio.get_running_loop().call_later(interval, self.tick)

    def tick(self) -> None:
        """Make `_next` end if nothing was sent since the last tick."""
        if self._is_quiet:
            self._is_overdue = True
            self._stream.nudge()
        self._keep_alive()

    def close(self) -> None:
        """End unfinished prompts before the next step, and drop the request. It never waits."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.params.output_kind is RequestOutputKind.DELTA:
            self._release()
        self.serving.running.pop(self.response_id, None)
        self._stream.close()
        num_prompt = sum(len(each.token_ids) for each in self.prepared)
        work = work_of(num_prompt, self._stream.num_generated, self._stream.metrics)
        facts_of(self.scope).update(work)


def check_logprobs(name: str, count: int | None, limit: int) -> None:
    """Check a number of log-probabilities against the server's limit; a limit of -1 is none.

    Raises:
        ApiError: it is more than the server gives.
    """
    if limit >= 0 and count is not None and not 0 <= count <= limit:
        wanted = "all" if count == -1 else count
        raise invalid(f"{name} asks for {wanted}; the limit is {limit} (--max-logprobs)", name)


def num_logprobs(wanted: int | None, is_on: bool | None, switch: str) -> int | None:
    """Return how many log-probabilities each token gets beside its own; None is none at all.

    Raises:
        ApiError: some are wanted without the ``switch`` that turns them on.
    """
    if wanted and not is_on:
        raise invalid(f"top_logprobs needs {switch}", "top_logprobs")
    return (wanted or 0) if is_on else None


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer that is not streamed."""
    return _json_answer(json.dumps(content, ensure_ascii=False), headers)


def _json_answer(text: str, headers: Mapping[str, str] | None) -> Response:
    data = text.encode("utf-8", "replace")  # paths may be bytes
    return Response(data, 200, headers, media_type="application/json")
