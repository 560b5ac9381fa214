"""Serve many concurrent requests from asyncio with `AsyncLLM`, as in vLLM."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mie.base.refusals import refuse_options, refuses_names
from mie.base.stats.metric import Metric
from mie.base.stats.step import QueueState
from mie.base.threads import call_in_thread
from mie.checkpoint.generation import GenerationConfig
from mie.checkpoint.tensors import num_parameters
from mie.config.adapters import LoRARequest
from mie.config.engine import EngineConfig
from mie.config.engine_args import AsyncEngineArgs, EngineArgs, with_arguments_of
from mie.config.params.checks import check_request_id
from mie.config.params.sampling import SamplingParams
from mie.engine.watch.look import Look, look_at, numerics_of, tokens_of
from mie.engine.watch.metrics import Snapshot, metrics_of, snapshot_of
from mie.engine.watch.queue import queue_of
from mie.engine.watch.waiting import Wait, why_waiting
from mie.errors import EngineDeadError, RequestError, RequestFailedError, ThreadLimitError, shown
from mie.frontend.llm import LLM
from mie.frontend.outputs import Prompt, RequestOutput
from mie.frontend.prepare import PreparedRequest, naming_tools
from mie.frontend.stream import OutputStream
from mie.load.adapters import Adapter
from mie.text.messages import Message
from mie.text.pretrained import PretrainedTokenizer


@refuses_names
@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the model that an engine serves."""

    model: str
    """The name or directory that it was loaded from."""
    max_model_len: int
    """Maximum number of tokens in a prompt and its answer together."""
    max_num_seqs: int
    """Maximum number of sequences that run at once."""
    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens of a block."""
    vocab_size: int
    has_drafts: bool
    """Whether the engine makes drafts, also from predicted answers."""
    backend: str
    dtype: str
    directories: tuple[Path, ...]
    """Where its weights and its tokenizer are."""
    architecture: str
    num_parameters: int
    quantization: str | None
    """The method that made the weights smaller, if any."""
    weights_bytes: int
    """Memory of the weights."""
    kv_bytes: int
    """Memory of the KV cache."""
    answer_bytes: int
    """Memory that the plan leaves to the log-probabilities of answers."""


class Pulse(NamedTuple):
    """The state of an engine that other threads may read."""

    num_turns: int
    """Steps, and other turns of the engine's loop. It does not move while the engine idles."""
    has_work: bool
    num_running: int
    num_waiting: int


@refuses_names
class AsyncLLM:
    """A model, its tokenizer, and an engine with its own thread::

        async with AsyncLLM("bundled") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(), "request 1"):
                print(output.outputs[0].text)

    Coroutines may be awaited from any event loop. Prompts are tokenized outside the event loop's
    thread. New tokens become text when their output is taken.
    """

    @with_arguments_of(AsyncEngineArgs)
    def __init__(self, *args: Any, **settings: Any) -> None:
        """Load a model; the arguments are the same as `LLM`'s.

        Raises:
            ConfigError: a setting is unknown, out of range, or refused with the reason.
            ModelError: the model cannot be used.
        """
        self._llm = LLM(*args, **settings)
        if self._llm.tokenizer is not None:
            self._llm.tokenizer.complete()
        self.loop = self._llm.loop
        self.limits = self._llm.engine_args.limits
        """The limits of one request."""
        self.loop.start()
        # The thread must not keep this object alive: it ends when the object is collected.
        self._finalizer = weakref.finalize(self, self.loop.stop)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> AsyncLLM:
        """Load the model that ``engine_args`` describes."""
        refuse_options(AsyncLLM.from_engine_args, others)
        return cls(**vars(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client: str | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they arrive; the last one has ``finished``.

        ``sampling_params.output_kind`` selects the content of each output. Outputs are merged if
        the consumer is slower than the engine. Cancelling the task, or closing the generator,
        aborts the request before the next step. Under the fair policy, each ``client`` gets an
        equal share of tokens. The adapter of ``lora_request`` is loaded if necessary. vLLM's other
        arguments are accepted as None.

        Raises:
            ConfigError: a parameter is unknown, or refused with the reason.
            RequestError: the request could never be served.
            RequestFailedError: the request failed while it ran.
            EngineDeadError: the engine is dead.
        """
        refuse_options(AsyncLLM.generate, others)
        labels: dict[str, Any] = {"priority": priority, "client": client}
        if lora_request is not None:
            await self.add_lora(lora_request)
            labels["lora_request"] = lora_request
        prepared = await self.prepare(prompt, sampling_params, request_id, **labels)
        stream = await self.add([prepared])
        try:
            while stream.num_unfinished:
                await stream.arrival
                for output in stream.take():
                    if output.error is not None:
                        message = f"request {output.request_id} failed: {output.error}"
                        raise RequestFailedError(message, [output])
                    yield output
        finally:
            stream.close()

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        caller: str | None = None,
        **labels: Any,
    ) -> PreparedRequest:
        """Check and tokenize a request in a worker thread, for `add`.

        ``labels`` are ``priority``, ``client``, ``cache_salt``, ``add_special_tokens`` and
        ``lora_request``, whose adapter must be loaded.
        Constraints are compiled for one ``caller`` after the other. Cancelling the task ends it.

        Raises:
            ConfigError: a parameter is not allowed.
            RequestError: the prompt or a label is malformed, or exceeds a limit.
            WorkerError: the process that compiles constraints failed.
            EngineDeadError: the engine cannot go on.
        """
        self.loop.check_alive()
        preparer = self._llm.llm_engine.preparer
        prepared = await call_in_thread(
            preparer.prepare, prompt, sampling_params, request_id=request_id, **labels
        )
        if prepared.params.structured_outputs is None:
            return prepared
        with naming_tools(prepared.form):
            compiling = preparer.submit(prepared, caller)
            if compiling is not None:
                await asyncio.wrap_future(compiling)  # it holds no thread while it waits
        return await call_in_thread(preparer.constrained, prepared)

    async def add(
        self,
        prepared: Sequence[PreparedRequest],
        check: Callable[[QueueState], object] | None = None,
    ) -> OutputStream:
        """Queue one client's requests, all or none, and return the stream of their outputs.

        Cancelling the task aborts them. ``check`` is called in the engine's thread with the
        client's queue, and may raise a `MieError` to refuse them.

        Raises:
            RequestError: one of them could never be served; nothing was added.
            EngineDeadError: the engine cannot go on.
        """
        stream = OutputStream(self.loop, len(prepared))
        add = partial(self.loop.processor.add_all, prepared, stream, stream.answers, check)
        try:
            await self.loop.call_async(add)
        except BaseException:
            stream.close()
            raise
        return stream

    def queue(self, client: str | None = None) -> QueueState:
        """Return a client's queue; under other policies than fair, the queue of all clients."""
        return queue_of(self.loop.engine, client)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids, or raise `RequestError`: no tokenizer, or too long a text."""
        encode = self._llm.llm_engine.preparer.encode
        return await call_in_thread(encode, text, add_special_tokens=add_special_tokens)

    async def chat_prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """Render a conversation as a prompt in a worker thread; see `LLM.chat_prompt`."""
        return await call_in_thread(self._llm.chat_prompt, messages, **options)

    async def abort(self, request_id: str | Collection[str], **others: Any) -> None:
        """End requests before the next step; each generator yields a final output."""
        refuse_options(AsyncLLM.abort, others)
        request_ids = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(request_ids, Collection):
            raise RequestError(f"request_id must be a string or a list; got {shown(request_id)}")
        for each in request_ids:
            check_request_id(each)
        await self.loop.call_async(lambda: [*map(self.loop.processor.abort, list(request_ids))])

    async def reset_prefix_cache(self, **others: Any) -> bool:
        """Drop all cached blocks, or return False if a request holds blocks."""
        refuse_options(AsyncLLM.reset_prefix_cache, others)
        return await self.loop.call_async(self.loop.engine.reset_prefix_cache)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter beside running requests; see `LLMEngine.add_lora`."""
        return await call_in_thread(self._llm.llm_engine.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Refuse new requests of an adapter; see `LLMEngine.remove_lora`."""
        return await call_in_thread(self._llm.llm_engine.remove_lora, lora_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return self._llm.llm_engine.list_loras()

    async def next_lora_id(self) -> int:
        """Return a number that no loaded adapter has."""
        return self._llm.llm_engine.required_adapters().next_id

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name."""
        return {each.request.lora_name: each for each in self.loop.engine.adapters or ()}

    async def index_vocabulary(self) -> None:
        """Prepare for structured outputs, so that the first one does not delay other requests.

        For a large vocabulary this takes seconds, in a worker thread.
        """
        if (constraints := self._llm.llm_engine.preparer.constraints) is not None:
            await call_in_thread(constraints.index)

    async def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer with the interface of transformers."""
        return self._llm.get_tokenizer()

    @property
    def tokenizer(self) -> PretrainedTokenizer | None:
        """The tokenizer of `get_tokenizer`, or None if there is none."""
        return self._llm.llm_engine.tokenizer

    async def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests."""
        return len(self.loop.engine.requests)

    async def get_model_config(self) -> ModelFacts:
        """Return facts about the model."""
        engine, args, model = self.loop.engine, self._llm.engine_args, self._llm.model_config
        of_files = model.quantisation.method if model.quantisation else None
        names = ("weights_bytes", "kv_bytes", "answer_bytes")
        sizes, is_auto = metrics_of(engine).sizes, args.dtype_name == "auto"
        return ModelFacts(
            model=os.fspath(args.model),
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            num_blocks=engine.scheduler.manager.num_blocks,
            block_size=engine.scheduler.manager.block_size,
            vocab_size=engine.vocab_size,
            has_drafts=engine.scheduler.speculation is not None,
            backend=engine.backend,
            dtype=str(numerics_of(engine)["dtype"]) if is_auto else args.dtype_name,
            directories=(self._llm.directory, self._llm.text_directory),
            architecture=model.architecture,
            num_parameters=num_parameters(model),
            quantization=of_files if args.quantization in (None, "auto") else args.quantization,
            **{name: sizes[f"mie:{name}"] for name in names},
        )

    async def weights_digest(self) -> str:
        """Return a digest of the weights; see `LLM.weights_digest`."""
        return await call_in_thread(self._llm.weights_digest)

    @property
    def generation_config(self) -> GenerationConfig:
        """The default sampling parameters, and where they come from."""
        return self._llm.generation_config

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return self._llm.tokenizer is not None

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
        if self.loop.dead_error is not None:  # no thread runs steps any more
            return self._llm.get_metrics()
        name = os.fspath(self._llm.engine_args.model)
        return await call_in_thread((await self.metrics_snapshot()).read, name)

    async def look(self) -> Look:
        """Return the whole log of the engine, and the engine's counts."""
        return await self.loop.call_async(lambda: look_at(self.loop.engine, None))

    def look_and_wait(self, after: int | None, *, with_metrics: bool) -> Look:
        """Return the log after a step, for a thread without an event loop: see `look_at`.

        Raises:
            EngineDeadError: the engine cannot go on.
        """
        engine = self.loop.engine
        return self.loop.call(lambda: look_at(engine, after, with_metrics=with_metrics))

    async def why_waiting(self, seq_id: tuple[int, int]) -> Wait | None:
        """Return why a sequence waits, or None if it does not: see `mie.engine.watch.waiting`."""
        scheduler = self.loop.engine.scheduler
        return await self.loop.call_async(lambda: why_waiting(scheduler, seq_id))

    async def tokens_of(
        self, places: Mapping[int, tuple[str, int, int, int]]
    ) -> dict[int, tuple[int, ...]]:
        """Return tokens of requests that run: see `mie.engine.watch.look.tokens_of`."""
        return await self.loop.call_async(lambda: tokens_of(self.loop.engine, places))

    async def metrics_snapshot(self) -> Snapshot:
        """Return the numbers of `get_metrics`; the engine does not wait while they are read."""
        return await self.loop.call_async(lambda: snapshot_of(self.loop.engine))

    @property
    def model(self) -> str:
        """The name or directory under which the model was loaded."""
        return os.fspath(self._llm.engine_args.model)

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        return self.loop.engine.config

    @property
    def pulse(self) -> Pulse:
        """The state of the engine that other threads may read."""
        loop, scheduler = self.loop, self.loop.engine.scheduler
        return Pulse(
            num_turns=loop.num_turns,
            has_work=loop.has_work,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
        )

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        self.loop.check_alive()

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
        return self.loop.dead_error

    def shutdown(self, **others: Any) -> None:
        """Stop the engine and its thread; unfinished requests get `EngineDeadError`."""
        refuse_options(AsyncLLM.shutdown, others)
        self._finalizer()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await call_in_thread(self.shutdown)
        except ThreadLimitError:
            self.shutdown()  # it holds the event loop up to the end of a step


AsyncLLMEngine = AsyncLLM
"""Another name of `AsyncLLM`, as in vLLM."""
