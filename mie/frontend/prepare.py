"""Check and tokenize requests in the caller's thread.

The cost of a refusal does not grow with the input: a prompt that is too long is refused by its
length, before it is encoded or copied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

from mie.base.refusals import REFUSED
from mie.config.adapters import LoRARequest
from mie.config.engine import RequestLimits
from mie.config.params.checks import check_length
from mie.config.params.sampling import RequestOutputKind, SamplingParams, truncated
from mie.engine.constraints.constraint import new_constraint
from mie.engine.engine import Engine
from mie.errors import ConfigError, PromptTooLongError, RequestError, shown, shown_text
from mie.frontend.outputs import Prompt
from mie.load.adapters import Adapter, Adapters
from mie.structured.grammars import Grammars
from mie.text.tokenizer import Tokenizer, encode_bad_words

if TYPE_CHECKING:
    from concurrent.futures import Future

    from mie.text.tools.formats import AnswerFormat

T = TypeVar("T")

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "prediction", "answer")


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRequest:
    """A request that was checked and tokenized, to be added to an engine."""

    token_ids: list[int]
    """The prompt."""
    params: SamplingParams
    request_id: str | None = None
    """Id that the caller chose, or None for an id of the engine."""
    priority: int = 0
    cache_salt: str | None = None
    client: str | None = None
    prediction: list[int] = field(default_factory=list)
    """Tokens that the answer may contain, for drafts."""
    constraint: object = None
    """Constraint of the output. `Preparer.constrained` adds it."""
    adapter: Adapter | None = None
    """The adapter. ``cache_salt`` depends on it."""
    prompt: str | None
    """Text of the prompt, if the caller gave it."""
    output_kind: RequestOutputKind
    form: AnswerFormat | None = None
    """Format of the answer, to separate reasoning and calls from the text."""
    has_rows: bool = True
    """Whether outputs have rows of log-probabilities.

    Otherwise the caller reads them from the request, where they take less memory.
    """

    def check_adapter(self) -> None:
        """Raise `RequestError` if the adapter was removed since the request was prepared."""
        if self.adapter is not None and not self.adapter.is_loaded:
            name = shown_text(self.adapter.request.lora_name)
            raise RequestError(f"adapter {name} was removed (load it again)")


@dataclass(frozen=True, kw_only=True)
class Preparer:
    """Checks and tokenizes requests before an engine gets them. Each request is checked once."""

    engine: Engine
    tokenizer: Tokenizer | None
    limits: RequestLimits
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of a request that gives none."""
    constraints: Grammars | None = None

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        output_kind: RequestOutputKind | None = None,
        request_id: str | None = None,
        priority: int = 0,
        client: str | None = None,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """Return the prepared request, for `constrained`.

        If ``output_kind`` is None, the kind of ``params`` is used. A salt in the prompt wins over
        ``cache_salt``. A text is encoded with the special tokens that the model expects, unless
        ``add_special_tokens`` is False. The adapter of ``lora_request`` must be loaded.

        Raises:
            ConfigError: a parameter is not allowed.
            RequestError: the prompt or a label is malformed, or exceeds a limit.
        """
        if params is None:
            params = SamplingParams(**self.defaults)
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"sampling_params must be SamplingParams; got {shown(params)}")
        given = _as_mapping(prompt)
        params, form = _answering(params, given.get("answer"), self.limits)
        with naming_tools(form):
            params = without_text(params, self.tokenizer, self.limits)
        text, token_ids = self._tokenize(given, params, add_special_tokens)
        answer: AnswerFormat | None = given.get("answer")
        if answer is not None and answer.before_structure and params.structured_outputs is not None:
            text = None if text is None else text + answer.before_structure
            token_ids += self.encode(answer.before_structure, add_special_tokens=False)
        cache_salt = given.get("cache_salt", cache_salt)
        self.engine.check(token_ids, params, request_id, priority, cache_salt, client, self.limits)
        adapter = None if lora_request is None else self.adapter(lora_request)
        if adapter is not None:
            cache_salt = adapter.salt(cache_salt)
        return PreparedRequest(
            token_ids=token_ids,
            params=params,
            adapter=adapter,
            request_id=request_id,
            priority=int(priority),
            cache_salt=cache_salt,
            client=client,
            prediction=self._prediction(given.get("prediction")),
            prompt=text,
            output_kind=params.output_kind if output_kind is None else output_kind,
            form=form,
        )

    def adapter(self, lora_request: LoRARequest) -> Adapter:
        """Return the loaded adapter of a request.

        Raises:
            RequestError: it is not loaded.
        """
        adapters: Adapters | None = self.engine.adapters
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest; got {shown(lora_request)}")
        if adapters is None:
            raise RequestError("lora_request needs an engine with adapters (set enable_lora=True)")
        adapter = adapters.find(lora_request)
        if adapter is None:
            raise RequestError(
                f"adapter {shown_text(lora_request.lora_name)} is not loaded (load it first)"
            )
        return adapter

    def _prediction(self, text: object) -> list[int]:
        """Return the tokens of a predicted answer, if the engine makes drafts.

        Raises:
            RequestError: it is no text, or too long for a prompt.
        """
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prediction must be a string; got {shown(text)}")
        if not text or self.engine.scheduler.speculation is None:
            return []
        return self.encode(text, add_special_tokens=False)

    def submit(self, prepared: PreparedRequest, caller: Hashable) -> Future[Any] | None:
        """Begin to compile the constraint of a request's output, if it has one.

        Wait for the future, and hold it, so that `constrained` need not wait. Callers take turns.
        Requests with equal cache salts share compiled descriptions.

        Raises:
            RequestError: nothing can be generated.
            WorkerError: the compiler cannot run.
        """
        structure: Any = prepared.params.structured_outputs  # `verified` converts mappings
        if structure is None or self.constraints is None:
            return None
        return self.constraints.submit(structure, caller, prepared.cache_salt)

    def constrained(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return the request with its constraint. This may wait for the constraint.

        Raises:
            RequestError: nothing can be generated.
            WorkerError: the compiler failed.
        """
        with naming_tools(prepared.form):
            constraint = new_constraint(prepared.params, self.engine.constraints)
        return replace(prepared, constraint=constraint)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, or refuse it by its length before it is encoded."""
        tokenizer = self.required_tokenizer()
        limit = self.limits.prompt_chars(self.engine.max_model_len)
        if isinstance(text, str) and len(text) > limit:
            raise PromptTooLongError(
                f"prompt has {len(text)} characters; the limit is {limit} (shorten it, or raise "
                "max_prompt_chars in request_limits)",
                None,
                self.engine.max_model_len,
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def required_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, or raise `RequestError` if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                "this LLM has no tokenizer (skip_tokenizer_init=True); pass token ids"
            )
        return self.tokenizer

    def _tokenize(
        self, given: Mapping[str, Any], params: SamplingParams, add_special_tokens: bool
    ) -> tuple[str | None, list[int]]:
        text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt's text must be a string; got {shown(text)}")
        if token_ids is None:
            token_ids = self.encode(str(text), add_special_tokens=add_special_tokens)
        elif not is_token_list(token_ids):
            raise RequestError(f"prompt_token_ids must be a list; got {shown(token_ids)}")
        kept = truncated(token_ids, params, self.engine.max_model_len)
        check_length(len(kept), self.engine.scheduler.max_model_len)
        return text, kept.tolist() if hasattr(kept, "tolist") else list(kept)


@contextmanager
def naming_tools(answer: AnswerFormat | None) -> Iterator[None]:
    """Name the tools in refusals of a grammar that they made, also beside a structure."""
    try:
        yield
    except (ConfigError, RequestError) as error:
        if answer is None or not str(error).startswith("structured_outputs"):
            raise
        from mie.frontend.whole_answer import as_asked  # few requests need mie.text.tools

        refusal = as_asked(str(error), answer)
        if refusal == str(error):
            raise
        raise RequestError(refusal) from error


def without_text(
    params: SamplingParams, tokenizer: Tokenizer | None, limits: RequestLimits
) -> SamplingParams:
    """Return a checked copy of parameters with bad words as tokens, for an engine without text.

    Raises:
        ConfigError: a field was assigned a value that is not allowed.
        RequestError: stop strings or bad words are given, and there is no tokenizer.
    """
    params = params.verified(limits)
    for name, what in (("stop", "stop strings"), ("bad_words", "bad words")):
        if getattr(params, name) and tokenizer is None:
            raise RequestError(f"{what} need a tokenizer; load the model with its tokenizer")
    if params.bad_words and tokenizer is not None:
        encoded = encode_bad_words(tokenizer, params.bad_words)
        params.bad_words_token_ids = (*(params.bad_words_token_ids or ()), *encoded)
        params.bad_words = None
    return params


def each_prompt(prompts: Any) -> list[Any]:
    """Return the prompts of a call, also of a single prompt.

    Raises:
        RequestError: they are neither a prompt nor a list.
    """
    if _is_prompt(prompts):
        return [prompts]
    if not is_token_list(prompts) and getattr(prompts, "ndim", None) != 2:
        raise RequestError(f"prompts must be a prompt or a list of prompts; got {shown(prompts)}")
    return list(prompts)


def is_token_list(value: Any) -> bool:
    """Return whether a value may be token ids: a sequence or an array of one dimension."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", None) == 1


def _answering(
    params: SamplingParams, answer: object, limits: RequestLimits
) -> tuple[SamplingParams, AnswerFormat | None]:
    if answer is None and params.thinking_token_budget is None:
        return params, None
    from mie.frontend.whole_answer import answering  # few requests need mie.text.tools

    return answering(params, answer, limits)


def _is_prompt(value: Any) -> bool:
    """Return whether the value is one prompt: a text, a mapping, or token ids."""
    if isinstance(value, str | Mapping) or getattr(value, "ndim", None) == 1:
        return True
    return is_token_list(value) and len(value) > 0 and isinstance(value[0], Integral)


def _as_mapping(prompt: Any) -> Mapping[str, Any]:
    """Return a prompt of any kind as a mapping with known keys."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if is_token_list(prompt):
        return {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise RequestError(f"a prompt is a text or a list of token ids; got {shown(prompt)}")
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        got = ", ".join(map(shown, islice(prompt, 8))) or "neither"
        raise RequestError(f"a prompt needs 'prompt' or 'prompt_token_ids'; got {got}")
    for key, value in prompt.items():
        if key not in _KEYS and value is not None:
            remedy = REFUSED["prompts"].get(key)
            if remedy is not None:
                raise RequestError(f"{key} is not supported: {remedy} (leave it out)")
            raise RequestError(
                f"a prompt has no key {shown(key)}; it may have {', '.join(map(repr, _KEYS))}"
            )
    return prompt


def one_for_each(name: str, given: Any, count: int, default: T) -> list[T]:
    """Return one value for each prompt, from a list or by repeating one value."""
    if given is None:
        return [default] * count
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list:
        return [given] * count
    if len(given) != count:
        raise ConfigError(f"{count} prompts need {count} {name}; got {len(given)}")
    return list(given)
