"""Generate text from prompts with `LLM`, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from mie.base.refusals import refuse_options, refuses_names
from mie.base.stats.metric import Metric
from mie.config.adapters import LoRARequest
from mie.config.engine_args import EngineArgs, with_arguments_of
from mie.config.params.sampling import BeamSearchParams, RequestOutputKind, SamplingParams
from mie.errors import ConfigError
from mie.frontend.beam_search import BeamSearcher, BeamSearchOutput
from mie.frontend.collector import Collector
from mie.frontend.llm_engine import LLMEngine
from mie.frontend.outputs import Prompt, RequestOutput, raise_failed
from mie.frontend.prepare import PreparedRequest, each_prompt, one_for_each
from mie.frontend.progress import progress_bar
from mie.load.parts import digest_of_weights
from mie.text.messages import Message, is_batch
from mie.text.pretrained import PretrainedTokenizer

Loras = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one for each."""


@refuses_names
class LLM:
    """A model, its tokenizer and an engine::

        llm = LLM("bundled")
        [output] = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
        print(output.outputs[0].text)

    All requests of all calls and threads share one paged cache. Any number of threads may call any
    method. The engine has no thread: a caller that waits for outputs runs steps for all callers.
    """

    @with_arguments_of(EngineArgs)
    def __init__(self, *args: Any, **settings: Any) -> None:
        """Load a model: "bundled", a directory in Hugging Face format, or a hub id.

        The arguments are the fields of `EngineArgs`, including the settings of `EngineConfig`.
        docs/settings.md explains all of them, and docs/vllm.md the arguments without an effect.

        Raises:
            ConfigError: a setting is unknown, out of range, or refused with the reason.
            ModelError: the model cannot be used.
        """
        self.llm_engine = LLMEngine(EngineArgs(*args, **settings))
        """The engine with its step-by-step interface."""
        self.engine_args = self.llm_engine.engine_args
        parts = self.llm_engine.parts
        self.directory = parts.directory
        self.model_config = self.llm_engine.model_config
        self.tokenizer = parts.tokenizer
        self.engine = parts.engine
        self.text_directory = parts.text_directory
        self.generation_config = parts.generation
        self.loop = self.llm_engine.loop
        self.supported_tasks = self.llm_engine.get_supported_tasks()
        self.runner_type = "generate"
        self.prepare = self.llm_engine.prepare
        """Check and tokenize a request in the caller's thread."""
        self._enqueued: list[tuple[list[str], Collector]] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Load the model that ``engine_args`` describes."""
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: Loras = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the completions of all prompts in order.

        ``sampling_params`` is used for all prompts, or is a list with one for each. ``priority`` is
        a number, or a list with one for each prompt. Under the priority policy the lowest number
        goes first. ``lora_request`` is the adapter of all prompts, or a list with one or None for
        each. Ctrl-C ends all requests and frees their blocks. vLLM's other arguments are accepted
        as None.

        Raises:
            ConfigError: a parameter is unknown, or refused with the reason.
            RequestError: a prompt could never be served; nothing was run.
        """
        refuse_options(LLM.generate, others)
        collector = self.loop.new_collector()
        prepared = self._prepared(prompts, sampling_params, priority, lora_request)
        return self._finish([(self.loop.add(prepared, collector), collector)], use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: Loras = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **others: Any,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion`, and return their request ids.

        The parameters are the same as in `generate`. ``use_tqdm`` has no effect, because adding
        takes no time.
        """
        refuse_options(LLM.enqueue, others)
        collector = self.loop.new_collector()
        prepared = self._prepared(prompts, sampling_params, priority, lora_request)
        ids = self.loop.add(prepared, collector)
        self._enqueued.append((ids, collector))
        return ids

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: Loras = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **options: Any,
    ) -> list[str]:
        """Queue conversations for `wait_for_completion`, with the options of `chat_prompt`."""
        prompts = self._chat_prompts(messages, options)
        labels: dict[str, Any] = {"priority": priority, "lora_request": lora_request}
        return self.enqueue(prompts, sampling_params, use_tqdm=use_tqdm, **labels)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Finish the requests of `enqueue` and `enqueue_chat`, and return the outputs in order.

        Raises:
            ConfigError: ``output_type`` is given and is not `RequestOutput`.
            RequestFailedError: a request failed.
        """
        types = output_type if isinstance(output_type, tuple) else (output_type,)
        if not {None, RequestOutput} & {*types}:
            raise ConfigError(f"output_type must be RequestOutput; got {output_type!r}")
        batches, self._enqueued = self._enqueued, []
        return self._finish(batches, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: Loras = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        max_tool_calls: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the assistant's answers to one conversation or to several.

        `chat_prompt` explains the parameters after ``priority``.
        """
        refuse_options(LLM.chat, others)
        options = {
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "max_tool_calls": max_tool_calls,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = self._chat_prompts(messages, options)
        labels: dict[str, Any] = {"priority": priority, "lora_request": lora_request}
        return self.generate(prompts, sampling_params, use_tqdm, **labels)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of one prompt after every token.

        `CompletionOutput.new_text` is the new piece. The ``output_kind`` of the parameters selects
        the content of each output. Outputs are merged if other threads run steps faster than the
        caller takes outputs. Closing the iterator aborts the request.

        Raises:
            RequestFailedError: the request failed.
        """
        collector = self.loop.new_collector()
        try:
            self.llm_engine.load_adapters([lora_request])
            prepared = self.prepare(prompt, sampling_params, lora_request=lora_request)
            self.loop.add([prepared], collector)
            finished = False
            while not finished:
                for output in self.loop.wait(collector):
                    finished = output.finished
                    raise_failed([output])
                    yield output
        finally:
            collector.close()

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Loras = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of each prompt.

        Beams share the blocks of their prompt and of their common beginning. At most
        ``concurrency_limit`` prompts are searched at a time. ``lora_request`` is the adapter of all
        prompts, or a list with one or None for each.

        Raises:
            ConfigError: ``concurrency_limit`` is not positive.
            RequestError: a prompt could never be served, or an adapter was removed during the
                search.
            RequestFailedError: a beam failed.
        """
        prepared = self._prepared(prompts, SamplingParams(), priority, lora_request)
        searcher = BeamSearcher(self.loop, self.tokenizer, params)
        return searcher.run_all(prepared, use_tqdm, concurrency_limit)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> str:
        """Render the conversation with the model's chat template.

        Args:
            messages: a list of ``{"role": …, "content": …}``. A content is text, None or a list of
                text parts. A tool's content and the arguments of tool calls may be any JSON value.
            chat_template: the text of another template, or the name of one of the model's.
            chat_template_content_format: "string" joins text parts, "openai" makes parts of text,
                and "auto" gives the template contents in a form that it takes.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end with the last message's text instead, so that the model
                continues it. Requires ``add_generation_prompt=False``.
            tools: JSON schemas of functions. The template named ``tool_use`` is used if it exists.
            chat_template_kwargs: other variables of the template (``enable_thinking``, …).

        Raises:
            ConfigError: a parameter is unknown or wrong.
            RequestError: a message is malformed, or the template rejects it.
        """
        refuse_options(LLM.apply_chat_template, others)
        return self.get_tokenizer().chat_templates.render(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """Return the conversation as a prompt for `generate`, with the format of the answer.

        The options are the same as in `apply_chat_template`, and three more. ``tool_choice`` is
        "auto", "none", "required", or ``{"type": "function", "function": {"name": …}}``. With
        ``parallel_tool_calls=False`` the answer has at most one call, and with ``max_tool_calls``
        at most so many. docs/tools.md explains them.

        Raises:
            ConfigError: an option is unknown or wrong.
            RequestError: a message or a tool is malformed, or the template rejects it.
        """
        from mie.frontend.conversation import prompt_of  # few calls need it

        tokenizer, ignored = self.get_tokenizer(), self.engine_args.ignore_prompt_lines
        if ignored is not None:
            messages = tokenizer.chat_templates.without_lines(messages, ignored)
        return prompt_of(
            messages,
            tokenizer,
            self.apply_chat_template,
            partial(self.llm_engine.preparer.encode, add_special_tokens=False),
            self.engine_args.tool_call_parser,
            self.engine_args.reasoning_parser,
            self.model_config.architecture,
            **options,
        )

    def get_tokenizer(self) -> PretrainedTokenizer:
        """Return the model's tokenizer with the interface of transformers."""
        return self.llm_engine.get_tokenizer()

    def weights_digest(self) -> str:
        """Return a digest that differs for other weights, such as another training of the model.

        Raises:
            WeightsError: the files of the weights cannot be read any more.
        """
        return digest_of_weights(self.engine_args, self.directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a new copy of the parameters of calls without parameters.

        They come from the model's generation_config.json, unless ``generation_config`` or
        ``override_generation_config`` replaces them.
        """
        return self.llm_engine.get_default_sampling_params()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return 1, the number of devices, with ``include_dp`` or without."""
        return 1

    def __repr__(self) -> str:
        return f"LLM({str(self.directory)!r}, {self.engine!r})"

    # Step-by-step interface for programs with their own loop.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue one prompt for `step`, and return its request id.

        Without ``request_id`` the id is "auto-" and a number. Under the priority policy the lowest
        ``priority`` goes first.

        Raises:
            RequestError: the request could never be served; nothing was added.
        """
        labels: dict[str, Any] = {"request_id": request_id, "priority": priority}
        self.llm_engine.load_adapters([lora_request])
        prepared = self.prepare(prompt, sampling_params, lora_request=lora_request, **labels)
        return self.llm_engine.add(prepared)

    def step(self) -> list[RequestOutput]:
        """Run one step and return new outputs of `add_request`; see `LLMEngine.step`."""
        return self.llm_engine.step()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or `step` has outputs to return."""
        return self.llm_engine.has_unfinished_requests()

    def abort(self, request_id: str) -> None:
        """End a request before the next step and free its blocks; ignore an unknown id."""
        self.llm_engine.abort_request([request_id])

    def reset_prefix_cache(self, **others: Any) -> bool:
        """Drop all cached blocks, or return False if a request holds blocks."""
        return self.llm_engine.reset_prefix_cache(**others)

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms under vLLM's names."""
        return self.llm_engine.get_metrics()

    def _prepared(
        self,
        prompts: Any,
        params: Any,
        priority: int | Sequence[int] | None,
        lora_request: Loras = None,
    ) -> list[PreparedRequest]:
        """Prepare the requests of one call, each with its own parameters, priority and adapter."""
        each = each_prompt(prompts)
        every = one_for_each("sampling_params", params, len(each), None)
        priorities = one_for_each("priorities", priority, len(each), 0)
        loras = one_for_each("lora_requests", lora_request, len(each), None)
        self.llm_engine.load_adapters(loras)
        kind = RequestOutputKind.FINAL_ONLY
        return [
            self.prepare(prompt, own, output_kind=kind, priority=rank, lora_request=lora)
            for prompt, own, rank, lora in zip(each, every, priorities, loras, strict=True)
        ]

    def _finish(
        self, batches: Sequence[tuple[list[str], Collector]], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Return the outputs of requests in order. Ctrl-C ends all of them."""
        finished: dict[str, RequestOutput] = {}
        try:
            with progress_bar(sum(len(ids) for ids, _ in batches), use_tqdm) as count:
                for ids, collector in batches:
                    while not finished.keys() >= {*ids}:
                        for output in self.loop.wait(collector):
                            finished[output.request_id] = output
                            count(output)
        finally:
            for _, collector in batches:
                collector.close()
            self.loop.settle()
        outputs = [finished[request_id] for ids, _ in batches for request_id in ids]
        raise_failed(outputs)
        return outputs

    def _chat_prompts(self, messages: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        conversations: list[Any] = list(messages) if is_batch(messages) else [messages]
        return [self.chat_prompt(each, **options) for each in conversations]
