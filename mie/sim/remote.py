"""Send a workload to an OpenAI-compatible server, and record when its tokens came back.

The requests, their moments and the records are those of `mie.sim.driver`, so a measured run and a
simulated one of the same workload can be compared.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mie.errors import ConfigError, needing_extra
from mie.sim.costs import SECOND, WallClock
from mie.sim.driver import Progress
from mie.sim.metrics import RequestRecord
from mie.sim.workload import Answer, Workload, WorkloadRequest

if TYPE_CHECKING:
    import httpx2

CONNECT_TIMEOUT = 30.0
READ_TIMEOUT = 600.0
"""Seconds without a byte after which a request counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, the model to ask it for, and the fields that it understands."""

    base_url: str
    """Its address, with or without ``/v1``."""
    model: str | None = None
    """None: the first model that the server lists."""
    vocab_size: int | None = None
    """None: the number in ``/tokenizer_info``."""
    api_key: str | None = None
    openai_only: bool = False
    """Whether to send only fields that OpenAI's API has. Answers may then end early."""

    @property
    def root(self) -> str:
        """The address without ``/v1``."""
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class ServedResult:
    """The results of a run: a record for each request of the workload, in order.

    A server does not tell about its steps, so these fields of `LoadResult` are None here.
    """

    model: str
    records: list[RequestRecord]
    duration_ns: int
    """Time from the load's start to its last token."""
    num_preempted: int | None
    """The number of preemptions, or None if a response does not have it."""
    num_steps: None = None
    peak_blocks: None = None

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens that were found in the prefix cache, as ``usage`` says."""
        return sum(record.num_cached for record in self.records)


def run_load_on(
    server: Server,
    workload: Workload,
    *,
    max_concurrency: int | None = None,
    reset_prefix_cache: bool = False,
    progress: Progress = lambda num_ended: None,
) -> ServedResult:
    """Send every request at its time over HTTP and wait until all have ended.

    Without ``max_concurrency`` the load is open: requests are sent when they are due. With it, the
    load is closed: at most that many are out at once, and the others arrive when one of these ends.
    A request that fails is recorded with its error, and so are those that come after it.
    ``progress`` is called with the number of requests that have just ended.

    Raises:
        ConfigError: the server cannot be reached, or does not name its models or vocabulary.
        MissingExtraError: httpx2 is not installed.
    """
    if server.openai_only:
        _refuse_extensions(workload)
    return asyncio.run(_serve(server, workload, max_concurrency, reset_prefix_cache, progress))


def _refuse_extensions(workload: Workload) -> None:
    for request in workload.requests:
        for name, is_used in (
            ("a priority", request.priority),
            ("a cache_salt", request.cache_salt is not None),
            ("an answer to quote", any(isinstance(part, Answer) for part in request.prompt)),
        ):
            if is_used:
                raise ConfigError(
                    f"request {request.request_id!r} has {name}, which OpenAI's API cannot express"
                    " (leave out --openai-only)"
                )


async def _serve(
    server: Server, workload: Workload, max_concurrency: int | None, reset: bool, progress: Progress
) -> ServedResult:
    with needing_extra("serve", "a benchmark over HTTP"):
        import httpx2
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with httpx2.AsyncClient(
        base_url=server.root,
        headers=headers,
        timeout=httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        model = server.model or (await _get(client, "/v1/models"))["data"][0]["id"]
        vocab_size = server.vocab_size or await _vocab_size(client)
        if reset:
            await _reset_prefix_cache(client)
        run = _Run(client, server, workload, model, vocab_size, max_concurrency, progress)
        return await run.serve()


async def _get(client: httpx2.AsyncClient, path: str) -> Any:
    import httpx2

    try:
        response = await client.get(path)
        response.raise_for_status()
        return response.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(
            f"{client.base_url} does not answer GET {path}: {_described(error)} (start the server,"
            " or correct --base-url and --api-key)"
        ) from error


async def _vocab_size(client: httpx2.AsyncClient) -> int:
    remedy = "give --vocab-size"
    try:
        found = (await _get(client, "/tokenizer_info")).get("vocab_size")
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from error
    if not isinstance(found, int):
        raise ConfigError(f"/tokenizer_info of {client.base_url} has no vocab_size ({remedy})")
    return found


async def _reset_prefix_cache(client: httpx2.AsyncClient) -> None:
    response = await client.post("/reset_prefix_cache")
    if response.status_code != 200:
        raise ConfigError(
            f"{client.base_url} does not reset its prefix cache: it answers POST"
            f" /reset_prefix_cache with {response.status_code} (leave out --reset-prefix-cache)"
        )


@dataclass
class _Reply:
    """The contents of a stream so far."""

    token_ids: list[list[int]]
    has_token_ids: bool = True
    is_complete: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


class _Run:
    """One run: a task for each request, and the records."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        server: Server,
        workload: Workload,
        model: str,
        vocab_size: int,
        max_concurrency: int | None,
        progress: Progress,
    ) -> None:
        self._client = client
        self._progress = progress
        self._server = server
        self._workload = workload
        self._model = model
        self._vocab_size = vocab_size
        self._seats: asyncio.Semaphore | None = None
        if max_concurrency is not None:
            self._seats = asyncio.Semaphore(max_concurrency)
        self._records: dict[str, RequestRecord] = {}
        self._answers: dict[tuple[str, int], list[int]] = {}
        self._prompts: dict[str, list[int]] = {}
        self._ended = {request.request_id: asyncio.Event() for request in workload.requests}
        self._num_preempted: int | None = 0
        for request in workload.requests:
            if not any(isinstance(part, Answer) for part in request.prompt):
                self._prompts[request.request_id] = request.token_ids(vocab_size, {})
        self._clock = WallClock()
        self._began = self._clock.now_ns()

    async def serve(self) -> ServedResult:
        self._began = self._clock.now_ns()
        await asyncio.gather(*map(self._serve_one, self._workload.requests))
        records = [self._records[request.request_id] for request in self._workload.requests]
        return ServedResult(
            model=self._model,
            records=records,
            duration_ns=max((record.end_ns or 0 for record in records), default=0),
            num_preempted=self._num_preempted,
        )

    def _now(self) -> int:
        return self._clock.now_ns() - self._began

    async def _serve_one(self, request: WorkloadRequest) -> None:
        try:
            due = request.arrival_ns
            if request.after is not None:
                await self._ended[request.after].wait()
                due += self._now()
                if self._records[request.after].error is not None:
                    message = f"it depends on {request.after!r}, which failed"
                    self._records[request.request_id] = RequestRecord(
                        request_id=request.request_id, num_prompt=0, arrival_ns=due, error=message
                    )
                    return
            await asyncio.sleep(max(0, due - self._now()) / SECOND)
            has_to_wait = self._seats is not None and self._seats.locked()
            async with self._seats or nullcontext():
                await self._send(request, self._now() if has_to_wait else due)
        finally:
            self._ended[request.request_id].set()
            self._progress(1)

    async def _send(self, request: WorkloadRequest, arrival_ns: int) -> None:
        import httpx2

        record = RequestRecord(request_id=request.request_id, num_prompt=0, arrival_ns=arrival_ns)
        record.token_ns = [[] for _ in range(request.n)]
        self._records[request.request_id] = record
        prompt = self._prompts.pop(request.request_id, None)
        try:
            if prompt is None:
                prompt = request.token_ids(self._vocab_size, self._answers)
            record.num_prompt = len(prompt)
            reply = _Reply([[] for _ in range(request.n)])
            async with self._stream(self._body(request, prompt)) as response:
                if response.status_code != 200:
                    record.error = _refusal(response.status_code, await response.aread())
                    return
                await self._read(response.aiter_lines(), record, reply)
        except KeyError as error:
            request_id, _ = error.args[0]
            record.error = f"it quotes the answer to {request_id!r}, which came without token ids"
            return
        except (httpx2.HTTPError, ValueError) as error:
            record.error = _described(error)
            return
        if record.error is None and not reply.is_complete:
            record.error = "the stream broke off: it ended without [DONE]"
        if record.error is None:
            self._finish(record, reply)

    def _stream(self, body: Mapping[str, Any]) -> AbstractAsyncContextManager[httpx2.Response]:
        return self._client.stream("POST", "/v1/completions", json=body)

    def _body(self, request: WorkloadRequest, prompt: list[int]) -> dict[str, Any]:
        """Return the request, with the parameters that `mie.sim.driver` gives the engine."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "temperature": 1.0 if request.n > 1 else 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.n > 1:
            body["n"] = request.n
        if not self._server.openai_only:
            body |= {"ignore_eos": True, "return_token_ids": True}
            if request.priority:
                body["priority"] = request.priority
            if request.cache_salt is not None:
                body["cache_salt"] = request.cache_salt
        return body

    async def _read(self, lines: AsyncIterator[str], record: RequestRecord, reply: _Reply) -> None:
        async for line in lines:
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                reply.is_complete = True
                continue
            now = self._now()
            event = json.loads(data)
            if "error" in event:
                record.error = _error_text(event)
                return
            reply.usage = event.get("usage") or reply.usage
            reply.metrics = event.get("metrics") or reply.metrics
            for choice in event.get("choices", ()):
                _note(choice, now, record, reply)

    def _finish(self, record: RequestRecord, reply: _Reply) -> None:
        if reply.has_token_ids:
            for choice, token_ids in enumerate(reply.token_ids):
                self._answers[record.request_id, choice] = token_ids
        # Tokens that were not streamed separately came with the last chunk.
        num_missing = (reply.usage.get("completion_tokens") or 0) - record.num_output
        if num_missing > 0:
            times = max(record.token_ns, key=lambda times: times[-1:])
            times += [times[-1] if times else self._now()] * num_missing
        details = reply.usage.get("prompt_tokens_details") or {}
        record.num_cached = details.get("cached_tokens") or 0
        queue_ms = reply.metrics.get("queue_time_ms")
        if queue_ms is not None:
            record.first_step_ns = record.arrival_ns + round(queue_ms * SECOND / 1000)
        preemptions = reply.metrics.get("num_preemptions")
        record.num_preemptions = preemptions or 0
        if preemptions is None or self._num_preempted is None:
            self._num_preempted = None
        else:
            self._num_preempted += preemptions


def _note(choice: Mapping[str, Any], now: int, record: RequestRecord, reply: _Reply) -> None:
    """Count the tokens of a chunk: its token ids, or one for a text if the server sends no ids."""
    index, token_ids = choice.get("index", 0), choice.get("token_ids")
    if token_ids is not None:
        reply.token_ids[index] += token_ids
        record.token_ns[index] += [now] * len(token_ids)
    elif choice.get("text"):
        reply.has_token_ids = False
        record.token_ns[index].append(now)


def _refusal(status: int, body: bytes) -> str:
    try:
        text = _error_text(json.loads(body))
    except (ValueError, AttributeError):
        text = body[:200].decode(errors="replace")
    return f"{status}: {text}"


def _error_text(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
