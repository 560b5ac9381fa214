"""Serve many concurrent requests from asyncio with `AsyncLLM`, as in vLLM."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from mie.config.engine_args import AsyncEngineArgs, EngineArgs, with_arguments_of
from mie.engine.metrics import Metric
from mie.errors import ConfigError, EngineDeadError, RequestError, RequestFailedError, shown
from mie.frontend.loop import Command, EngineLoop
from mie.frontend.outputs import RequestOutput
from mie.frontend.prepare import Prompt
from mie.frontend.request_state import Collector, CollectorRef
from mie.llm import LLM
from mie.params.checks import check_request_id
from mie.params.sampling import SamplingParams
from mie.text.pretrained import PretrainedTokenizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the model that an engine serves."""

    model: str
    """The name or directory that it was loaded from."""
    max_model_len: int
    """Maximum number of tokens in a prompt and its answer together."""
    vocab_size: int
    backend: str
    dtype: str


class AsyncLLM:
    """A model, its tokenizer, and an engine with its own thread.

        async with AsyncLLM("bundled") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(), "request 1"):
                print(output.outputs[0].text)

    Coroutines may be awaited from any event loop. Text is tokenized and detokenized outside the
    event loop's thread.
    """

    @with_arguments_of(AsyncEngineArgs)
    def __init__(self, *args: Any, **settings: Any) -> None:
        """Load a model; the arguments are those of `LLM`.

        Raises:
            ConfigError: a setting is unknown, out of range, or refused with the reason.
            ModelError: the model cannot be used.
        """
        self._llm = LLM(*args, **settings)
        self._loop = self._llm.loop
        self._thread = EngineThread(self._loop)
        # The thread must not keep this object alive: it ends when the object is collected.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Load the model that ``engine_args`` describes."""
        return cls(**vars(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        data_parallel_rank: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they arrive; the last one has ``finished``.

        ``sampling_params.output_kind`` selects what each output contains. Outputs are merged if the
        consumer is slower than the engine. Cancelling the task, or closing the generator, aborts
        the request before the next step. The last four arguments exist for compatibility with vLLM
        and must be None.

        Raises:
            ConfigError: one of the last four is not None.
            RequestError: the request could never be served.
            RequestFailedError: the request failed while it ran.
            EngineDeadError: the engine is dead.
        """
        refuse_unless_none(
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        self._thread.check_alive()
        prepared = await asyncio.to_thread(
            self._llm.prepare, prompt, sampling_params, None, request_id, priority=priority
        )
        processor = self._loop.processor
        collector = processor.new_collector()
        is_over = False
        with self._thread.listening(collector) as news:
            try:
                await self._thread.call(lambda: processor.add_all([prepared], collector))
                while not is_over:
                    await news.arrival
                    news.expect_more()
                    for output in collector.take():
                        is_over = output.finished
                        if output.error is not None:
                            message = f"request {output.request_id} failed: {output.error}"
                            raise RequestFailedError(message, [output])
                        yield output
                    if not is_over:
                        self._loop.check_alive()
            finally:
                if not is_over:
                    self._thread.post(Command(lambda: processor.drop(collector.ref)))

    def encode(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse every call: vLLM has this method for embedding models.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            "AsyncLLM.encode needs an embedding model; mie runs generative models (call generate)"
        )

    async def abort(self, request_id: str | Collection[str]) -> None:
        """End requests before the next step; each generator yields a final output."""
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(request_ids, Collection):
            raise RequestError(f"request_id must be a string or a list; got {shown(request_id)}")
        for each in request_ids:
            check_request_id(each)
        await self._thread.call(lambda: [*map(self._loop.processor.abort, list(request_ids))])

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks, or return False if a request holds blocks."""
        return await self._thread.call(self._loop.engine.reset_prefix_cache)

    async def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer with the interface of transformers."""
        return self._llm.get_tokenizer()

    async def get_model_config(self) -> ModelFacts:
        """Return facts about the model."""
        engine, args = self._loop.engine, self._llm.engine_args
        return ModelFacts(
            model=os.fspath(args.model),
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            backend=args.backend,
            dtype=args.dtype_name,
        )

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the default parameters; see `LLM.get_default_sampling_params`."""
        return self._llm.get_default_sampling_params()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the model supports."""
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        """Return False: requests are not traced with OpenTelemetry."""
        return False

    async def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms under vLLM's names."""
        if self._loop.dead_error is not None:  # no thread runs steps any more
            return self._llm.get_metrics()
        name = os.fspath(self._llm.engine_args.model)
        return await self._thread.call(lambda: self._loop.engine.get_metrics(name))

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        self._thread.check_alive()

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self.dead_error is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return not self.is_running

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine accepts no requests, or None if it does."""
        return self._loop.dead_error

    def shutdown(self) -> None:
        """Stop the engine and its thread; unfinished requests get `EngineDeadError`."""
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.shutdown)


def refuse_unless_none(**arguments: object) -> None:
    """Raise `ConfigError` for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(f"{name} is not supported; got {value!r} (leave it out)")


class _News:
    """Wakes the one task that waits for news of a collector.

    It does what an `asyncio.Event` that is cleared after every wait does, at half the cost. The
    task awaits ``arrival`` and then calls `expect_more`.
    """

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self.arrival: asyncio.Future[None] = self.event_loop.create_future()

    def expect_more(self) -> None:
        """Start waiting for news that arrives from now on."""
        self.arrival = self.event_loop.create_future()

    def set(self) -> None:
        """End the wait. Call it in the event loop's thread."""
        if not self.arrival.done():
            self.arrival.set_result(None)


class _Listening:
    """A context in which a caller is woken when its collector gets news."""

    def __init__(self, listeners: dict[CollectorRef, _News], collector: Collector) -> None:
        self._listeners = listeners
        self._collector = collector

    def __enter__(self) -> _News:
        news = self._listeners[self._collector.ref] = _News()
        return news

    def __exit__(self, *error: object) -> None:
        self._listeners.pop(self._collector.ref, None)


class EngineThread:
    """Runs an `EngineLoop` in its own thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._process_id = os.getpid()
        self._listeners: dict[CollectorRef, _News] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="mie-engine", daemon=True)
        self._thread.start()

    def listening(self, collector: Collector) -> _Listening:
        """Return a context in which a caller is woken when its collector gets news."""
        return _Listening(self._listeners, collector)

    def post(self, command: Command[Any]) -> None:
        """Queue a command to run before the next step."""
        self._loop.inbox.append(command)
        self._wake.put(None)
        self._refuse_if_dead()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function between two steps and return its result."""
        self.check_alive()
        done = _News()
        command = Command(function, lambda: _set_all(done.event_loop, [done]))
        self.post(command)
        await done.arrival
        return command.result()

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine is dead or belongs to another process."""
        if self._process_id != os.getpid():
            raise EngineDeadError(
                "the engine's thread belongs to the parent process; load an AsyncLLM after the fork"
            )
        self._loop.check_alive()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._is_stopping = True
        self._wake.put(None)
        if self._process_id == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        changed = self._loop.processor.changed
        try:
            while not self._is_stopping:
                if not self._loop.has_work:
                    self._sleep()
                self._loop.turn()
                self._tell(changed)
                changed.clear()
        except EngineDeadError:
            pass  # the callers are notified below
        finally:
            if self._loop.dead_error is None:
                self._loop.die("the engine was shut down")
            self._refuse_if_dead()
            self._tell(list(self._listeners))

    def _sleep(self) -> None:
        self._wake.get()
        while not self._wake.empty():
            self._wake.get()

    def _refuse_if_dead(self) -> None:
        """Refuse queued commands if the engine is dead."""
        while self._loop.dead_error is not None and self._loop.inbox:
            with suppress(IndexError):  # another thread popped it first
                self._loop.inbox.popleft().refuse(self._loop.dead_error)

    def _tell(self, collectors: Iterable[CollectorRef]) -> None:
        """Wake the tasks that wait for collectors with news, once per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for ref in collectors:
            news = self._listeners.get(ref)
            if news is not None:
                by_loop.setdefault(news.event_loop, []).append(news)
        for event_loop, all_news in by_loop.items():
            _set_all(event_loop, all_news)


def _set_all(event_loop: asyncio.AbstractEventLoop, all_news: list[_News]) -> None:
    """Wake tasks from another thread. A closed event loop has no waiting tasks."""

    def set_here() -> None:
        for news in all_news:
            news.set()

    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(set_here)
