"""`LLM`: prompts in, text out, spelled as in vLLM."""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TextIO, TypeAlias

from mie.config import EngineConfig, refuse_unknown
from mie.engine import Engine
from mie.errors import ConfigError, RequestError
from mie.interrupts import interrupts_deferred
from mie.load import load_engine
from mie.model.config import ModelConfig
from mie.model.locate import locate_model
from mie.outputs import RequestOutput
from mie.processor import OutputProcessor
from mie.sched.params import SamplingParams
from mie.text.chat import refuse_unknown_options
from mie.text.messages import Message, is_batch
from mie.text.pretrained import PretrainedTokenizer
from mie.text.template_files import TemplateFiles
from mie.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; a mapping may have a
``"cache_salt"`` too: only prompts with the same one share cached blocks."""


class LLM:
    """A model, its tokenizer and an engine.

        llm = LLM("bundled")
        [output] = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
        print(output.outputs[0].text)

    Prompts of one call, and of `add_request`, run together through one paged cache. Not
    thread-safe: one thread calls it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "bundled",
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        backend: str = "numpy",
        dtype: str = "auto",
        trace: TextIO | None = None,
        **settings: Any,
    ) -> None:
        """Load ``model``: "bundled", a directory in Hugging Face format, or a hub id.

        Args:
            tokenizer: where the tokenizer is, if not beside the model.
            skip_tokenizer_init: load none; prompts are token ids, and outputs have no text.
            backend: "numpy"; "numpy-plain", by the operators that define what is right; "cupy", an
                NVIDIA GPU; or "cupy-emulated", its kernels on a CPU.
            dtype: of the NumPy ones "float32" ("auto") or "float64"; of the others "float32"
                ("auto" when emulated), "float16" ("auto" on a GPU) or "bfloat16".
            trace: a text file that gets the event log as JSON lines, for ``mie trace``. It stays
                the caller's to close.
            settings: those of `EngineConfig`, such as max_num_seqs, num_blocks, scheduling_policy.

        Raises:
            ConfigError: a setting is unknown or out of range.
            ModelError: the model cannot be used.
        """
        own = list(inspect.signature(LLM).parameters)[:-1]
        refuse_unknown("LLM", settings, [*own, *EngineConfig.__dataclass_fields__])
        config = EngineConfig(**settings)
        self.directory = locate_model(model)
        self._text_directory = self.directory if tokenizer is None else locate_model(tokenizer)
        self.tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:  # before the weights: it is quick, and may be wrong
            vocab_size = ModelConfig.load(self.directory).vocab_size
            self.tokenizer = Tokenizer.load(self._text_directory, vocab_size)
        self._pretrained: PretrainedTokenizer | None = None
        self.engine: Engine = load_engine(
            self.directory, config, backend=backend, dtype=dtype, trace=trace
        )
        self._processor = OutputProcessor(self.engine, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The completions of all prompts, in their order.

        ``sampling_params`` is for all prompts, or a list with one for each; ``priority`` has one
        for each, the lowest first, under the policy of that name. A bad prompt raises
        `RequestError` before anything runs; Ctrl-C ends all of them and gives every block back.
        """
        each: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        params = _one_for_each(sampling_params, len(each))
        priorities = [0] * len(each) if priority is None else list(priority)
        if len(priorities) != len(each):
            raise ConfigError(f"{len(each)} prompts need as many priorities; got {len(priorities)}")
        return self._run(list(zip(each, params, priorities, strict=True)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The assistant's answers to one conversation, or to each of several.

        See `apply_chat_template` for what follows ``use_tqdm``.
        """
        refuse_unknown_options(LLM.chat, others)
        conversations: list[Any] = list(messages) if is_batch(messages) else [messages]
        prompts = [
            self.chat_prompt(
                each,
                chat_template=chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """The growing output of one prompt, after every token; `CompletionOutput.new_text` is the
        new piece. Closing the iterator early ends the request."""
        request_id, finished = "", False
        try:
            with interrupts_deferred():
                request_id = self.add_request(prompt, sampling_params or SamplingParams())
            while not finished:
                for output in self.step():
                    if output.request_id == request_id:
                        finished = output.finished
                        yield output
        finally:
            self.abort(request_id)

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
        """The conversation as the model's chat template writes it.

        Args:
            messages: ``{"role": …, "content": …}`` each. A content is text, None or a list of text
                parts; that of a tool may be any JSON value. Arguments of tool calls may be JSON.
            chat_template: the text of another template, or the name of one of the model's.
            chat_template_content_format: "string" joins text parts, "openai" makes parts of text,
                and "auto" does what the template is written for.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end with the last message's text instead, for the model to
                continue. Needs ``add_generation_prompt=False``.
            tools: JSON schemas of functions. The template named ``tool_use`` is used if there is
                one.
            chat_template_kwargs: whatever else the template reads (``enable_thinking``, …).

        Raises:
            ConfigError: a parameter is unknown or wrong.
            RequestError: a message is malformed, or the template does not take it.
        """
        refuse_unknown_options(LLM.apply_chat_template, others)
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
        """The conversation as a prompt for `generate`; options are `apply_chat_template`'s.

        The template writes BOS itself.
        """
        text = self.apply_chat_template(messages, **options)
        token_ids = self._require_tokenizer().encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def get_tokenizer(self) -> PretrainedTokenizer:
        """The model's tokenizer, with the names and meanings of transformers."""
        if self._pretrained is None:
            files = TemplateFiles(self._text_directory)
            name = str(self._text_directory)
            self._pretrained = PretrainedTokenizer(self._require_tokenizer(), files, name)
        return self._pretrained

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        return SamplingParams()

    # Request by request, for programs that bring their own loop.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue one prompt; `step` runs it. Its request id (by default its number).

        A lower ``priority`` goes first, under the policy of that name.

        Raises:
            RequestError: it could never be served; nothing was added.
        """
        text, token_ids = self._tokenize(prompt)
        return self._processor.add_request(
            text,
            token_ids,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=_cache_salt(prompt),
        )

    def step(self) -> list[RequestOutput]:
        """One step of the engine: the requests that got a token, with all they have so far."""
        return self._processor.process(self.engine.step())

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.engine.has_work

    def abort(self, request_id: str) -> None:
        """End a request and give its blocks back; unknown and finished ones are ignored."""
        self._processor.abort(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while a request holds blocks."""
        return self.engine.reset_prefix_cache()

    def _run(
        self, requests: Sequence[tuple[Prompt, SamplingParams, int]], use_tqdm: bool
    ) -> list[RequestOutput]:
        tokenized = [
            (*self._tokenize(prompt), params, {"priority": priority, "cache_salt": salt})
            for prompt, params, priority in requests
            for salt in [_cache_salt(prompt)]
        ]
        running: dict[str, RequestOutput | None] = {}
        with _progress_bar(len(requests), use_tqdm) as bar:
            try:
                for text, token_ids, params, labels in tokenized:
                    with interrupts_deferred():
                        added = self._processor.add_request(text, token_ids, params, **labels)
                        running[added] = None
                while None in running.values():
                    for output in self.step():
                        if output.finished and output.request_id in running:
                            running[output.request_id] = output
                            bar.update()
            finally:
                with interrupts_deferred():
                    for request_id in [key for key, done in running.items() if done is None]:
                        self.abort(request_id)
        return [done for done in running.values() if done is not None]

    def _tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._require_tokenizer().encode(prompt)
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if token_ids is not None:
                return text, list(token_ids)
            if isinstance(text, str):
                return self._tokenize(text)
            got = ", ".join(map(repr, prompt)) or "neither"
            raise RequestError(f"a prompt needs 'prompt' or 'prompt_token_ids'; got {got}")
        if isinstance(prompt, Sequence):
            return None, list(prompt)
        raise RequestError(f"a prompt is a text or a list of token ids; got {prompt!r}")

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this LLM has no tokenizer (skip_tokenizer_init=True); pass token ids"
            )
        return self.tokenizer


def _is_single(prompts: object) -> bool:
    """Whether it is one prompt: a text, a mapping, or a list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def _cache_salt(prompt: Any) -> Any:
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts need as many sampling_params; got {len(params)}")
    return list(params)


def _progress_bar(total: int, is_shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="generating", unit="request", disable=not is_shown)
