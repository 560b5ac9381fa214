"""Run requests step by step with `LLMEngine`, as in vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from mie.base.refusals import refuse_options, refuses_names
from mie.base.stats.metric import Metric
from mie.config.adapters import LoRARequest
from mie.config.engine_args import EngineArgs
from mie.config.params.checks import check_request_id
from mie.config.params.sampling import SamplingParams
from mie.engine.watch.metrics import snapshot_of
from mie.errors import RequestError, shown
from mie.frontend.collector import Collector
from mie.frontend.loop import EngineLoop
from mie.frontend.outputs import Prompt, RequestOutput
from mie.frontend.prepare import PreparedRequest, Preparer
from mie.load.adapters import Adapters
from mie.load.parts import LoadedModelConfig, load_parts
from mie.text.pretrained import PretrainedTokenizer
from mie.text.template_files import TemplateFiles


@refuses_names
class LLMEngine:
    """A model, its tokenizer and an engine, for programs that run the steps themselves::

        engine = LLMEngine.from_engine_args(EngineArgs("bundled"))
        engine.add_request("1", "Once upon a time", SamplingParams())
        while engine.has_unfinished_requests():
            for output in engine.step():
                …

    `LLM.llm_engine` is the engine of an `LLM`. Any number of threads may call any method.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        """Load the model that ``engine_args`` describes.

        Raises:
            ConfigError: a setting is refused with the reason.
            ModelError: the model cannot be used.
        """
        self.engine_args = engine_args
        self.parts = parts = load_parts(engine_args)
        self.engine = parts.engine
        self.model_config = LoadedModelConfig.of(parts.model, parts.engine.max_model_len)
        self.preparer = Preparer(
            engine=parts.engine,
            tokenizer=parts.tokenizer,
            limits=engine_args.limits,
            defaults=parts.generation.sampling,
            constraints=parts.grammars,
        )
        survives_fork = parts.engine.backend != "cupy" and engine_args.tensor_parallel_size == 1
        self.loop = EngineLoop(parts.engine, parts.tokenizer, survives_fork=survives_fork)
        self._collector = self.loop.new_collector()
        self._tokenizer: PretrainedTokenizer | None = None
        for adapter in engine_args.loras.values():
            self.add_lora(adapter)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> LLMEngine:
        """Load the model that ``engine_args`` describes."""
        refuse_options(LLMEngine.from_engine_args, others)
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> str:
        """Queue one prompt for `step`, and return its request id.

        Under the priority policy the lowest ``priority`` goes first. vLLM's other arguments are
        accepted as None.

        Raises:
            RequestError: the request could never be served; nothing was added.
        """
        refuse_options(LLMEngine.add_request, others)
        labels: dict[str, Any] = {"request_id": request_id, "priority": priority}
        self.load_adapters([lora_request])
        return self.add(self.prepare(prompt, params, lora_request=lora_request, **labels))

    def add(self, prepared: PreparedRequest) -> str:
        """Queue a prepared request for `step`, and return its request id."""
        [request_id] = self.loop.add([prepared], self._own_collector())
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step and return new outputs of the requests that were added.

        Outputs from steps of other callers are returned at once, without a step. Each request gets
        one output with ``finished``, even if it was aborted or failed.
        """
        return self.loop.step(self._own_collector())

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is unfinished, or `step` has outputs to return."""
        self.loop.settle()
        return self.engine.has_work or self._own_collector().has_news

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests of all callers."""
        self.loop.settle()
        return len(self.engine.requests)

    def abort_request(self, request_ids: str | Iterable[str], **others: Any) -> None:
        """End requests before the next step and free their blocks; ignore unknown ids."""
        refuse_options(LLMEngine.abort_request, others)
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if not isinstance(ids, Iterable):
            raise RequestError(f"request_ids must be a string or a list; got {shown(ids)}")
        for request_id in ids:
            check_request_id(request_id)
            self.loop.abort(request_id)

    def reset_prefix_cache(self, **others: Any) -> bool:
        """Drop all cached blocks, or return False if a request holds blocks."""
        refuse_options(LLMEngine.reset_prefix_cache, others)
        return self.loop.call(self.engine.reset_prefix_cache)

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms under vLLM's names."""
        name = os.fspath(self.engine_args.model)
        if self.loop.dead_error is not None:  # no thread runs steps any more
            return snapshot_of(self.engine).read(name)
        return self.loop.call(lambda: snapshot_of(self.engine)).read(name)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the model supports."""
        return ("generate",)

    def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer with the interface of transformers."""
        if self._tokenizer is None:
            tokenizer = self.preparer.required_tokenizer()
            files = TemplateFiles(self.parts.text_directory, tokenizer.config)
            self._tokenizer = PretrainedTokenizer(tokenizer, files)
        return self._tokenizer

    @property
    def tokenizer(self) -> PretrainedTokenizer | None:
        """The tokenizer of `get_tokenizer`, or None if there is none."""
        return None if self.preparer.tokenizer is None else self.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a new copy of the parameters of calls without parameters.

        They come from the model's generation_config.json, unless ``generation_config`` or
        ``override_generation_config`` replaces them.
        """
        return SamplingParams(**self.parts.generation.sampling)

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None, **options: Any
    ) -> PreparedRequest:
        """Prepare a request with `Preparer.prepare`, and wait for its constraint."""
        prepared = self.preparer.prepare(prompt, params, **options)
        return self.preparer.constrained(prepared)

    # Adapters.

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, unless it is loaded, and return True.

        Raises:
            ModelError: the adapter cannot be used with this model.
            RequestError: no slot is free, or another adapter has its name or its number.
        """
        adapters = self.required_adapters()
        if adapters.find(lora_request) is None:
            self.loop.call(partial(adapters.add, lora_request, adapters.read(lora_request)))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Refuse new requests of an adapter, and return whether it was loaded.

        Its unfinished requests end as usual.
        """
        adapters = self.required_adapters()
        for adapter in adapters:
            if adapter.request.lora_int_id == lora_id:
                return self.loop.call(partial(adapters.remove, adapter.request.lora_name))
        return False

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return {adapter.request.lora_int_id for adapter in self.required_adapters()}

    def required_adapters(self) -> Adapters:
        """Return the adapters of the engine, or raise `RequestError` if it has no slots."""
        if self.engine.adapters is None:
            raise RequestError("this engine has no slots for adapters (set enable_lora=True)")
        adapters: Adapters = self.engine.adapters
        return adapters

    def load_adapters(self, requests: Iterable[LoRARequest | None]) -> None:
        """Load the adapters of requests that are not loaded yet."""
        for each in dict.fromkeys(requests):
            if isinstance(each, LoRARequest):  # `Preparer.adapter` refuses anything else
                self.add_lora(each)

    def _own_collector(self) -> Collector:
        if self._collector.process_id != os.getpid():  # after a fork: the requests are the parent's
            self._collector = self.loop.new_collector()
        return self._collector
