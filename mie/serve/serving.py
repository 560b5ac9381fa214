"""The common state of all routes: the engine, its model's facts, and the running requests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.types import Scope

from mie.async_llm import AsyncLLM, ModelFacts
from mie.config.engine import EngineConfig
from mie.config.params.sampling import RequestOutputKind, SamplingParams
from mie.errors import MieError, shown
from mie.frontend.outputs import RequestOutput
from mie.frontend.request_state import PreparedRequest
from mie.frontend.stream import OutputStream
from mie.serve.access_log import work_of
from mie.serve.asgi import Pace, facts_of
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, api_error, invalid, naming_structure, too_long
from mie.serve.limits import QueueLimit
from mie.system.threads import call_in_thread
from mie.text.messages import Message
from mie.text.pretrained import PretrainedTokenizer
from mie.version import __version__

logger = logging.getLogger(__name__)

LATEST = ":latest"
"""The tag that Ollama's clients add to the name of a model without one."""
MAX_REPORTS = 1000
"""Maximum number of different lines that the log gets about unknown fields."""


A = TypeVar("A", covariant=True)
_NO_PARAMS = SamplingParams()


@dataclass(kw_only=True)
class Asked(Generic[A]):
    """An HTTP request whose body was read, and the engine's part of it, which a dialect adds."""

    body: A
    model: str
    """The name of the model for the answer."""
    headers: dict[str, str]
    """Headers for the answer."""
    serving: Serving
    scope: Scope
    response_id: str = ""
    prompts: Sequence[Any] = ()
    """Texts, lists of token ids, or prompts of `AsyncLLM.chat_prompt`."""
    params: SamplingParams = field(default_factory=lambda: _NO_PARAMS)
    is_max_tokens_given: bool = False
    """Whether ``params.max_tokens`` is the client's own, which must fit the context."""
    adds_special_tokens: bool = True
    """Whether texts are encoded with the special tokens that the tokenizer adds."""
    structure_name: str = "structured_outputs"
    """The client's field that describes the structure of the answer."""
    logprobs_name: str = "logprobs"
    """The client's parameter that says how many log-probabilities each token gets."""


class Generation:
    """The prompts of one HTTP request while they run. Close it, however the request ends."""

    def __init__(
        self, asked: Asked[Any], prepared: Sequence[PreparedRequest], stream: OutputStream
    ) -> None:
        self.asked = asked
        self.client: str | None = asked.scope.get("mie.client")
        """The name of the client's key; only the same client may cancel the request."""
        self.prepared = prepared
        self.finished: list[RequestOutput] = []
        """The final outputs that were taken so far."""
        self._stream = stream
        self._places = {each.request_id: place for place, each in enumerate(prepared)}
        self._timer: asyncio.TimerHandle | None = None
        self._is_quiet = self._is_overdue = False
        self._is_paced = asked.params.output_kind is not RequestOutputKind.DELTA

    @property
    def is_finished(self) -> bool:
        """Whether every final output was taken."""
        return not self._stream.num_unfinished

    def place(self, output: RequestOutput) -> int:
        """Return which of the job's prompts an output belongs to."""
        return self._places[output.request_id]

    async def next(self) -> list[RequestOutput]:
        """Wait for outputs, and return those that arrived, merged for each prompt.

        The list is empty if nothing came for the time that `keep_alive` was given.

        Raises:
            EngineDeadError: the engine cannot go on.
        """
        while True:
            await self._stream.arrival
            outputs = self._stream.take()
            if outputs or self._is_overdue:
                break
        if outputs and not self._is_paced:  # later tokens may be merged
            self._stream.delay(self.asked.serving.pace.hold)
            self._is_paced = True
        for output in outputs:
            if output.finished:
                self.finished.append(output)
        return outputs

    async def all(self) -> list[RequestOutput]:
        """Wait for the end, and return the final outputs in the order of the prompts."""
        while not self.is_finished:
            await self.next()
        return sorted(self.finished, key=self.place)

    def keep_alive(self, interval: float) -> None:
        """Let `next` return, maybe nothing, ``interval`` seconds after `sent`; 0: never."""
        if interval:
            self._is_quiet = True
            self._timer = asyncio.get_running_loop().call_later(interval, self._tick, interval)

    @property
    def is_overdue(self) -> bool:
        """Whether nothing was sent for the time that `keep_alive` was given."""
        return self._is_overdue

    def sent(self) -> None:
        """Note that a stream has sent something."""
        self._is_quiet = self._is_overdue = False

    def failed(self, error: Exception) -> ApiError:
        """Return the error that a stream which has begun ends with. The log has its status."""
        if not isinstance(error, (ApiError, MieError)):
            logger.error("a stream met a bug: %r", error, exc_info=error)
        failed = api_error(error)
        facts_of(self.asked.scope)["status"] = failed.status
        return failed

    def progress(self) -> tuple[int, int]:
        """Return how many tokens of unfinished prompts are computed, and of how many."""
        return self._stream.progress()

    def close(self) -> None:
        """End unfinished prompts before the next step, and forget the request. It never waits."""
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close()
        num_prompt = sum(len(each.token_ids) for each in self.prepared)
        work = work_of(num_prompt, self._stream.num_generated, self._stream.metrics)
        facts_of(self.asked.scope).update(work)
        self.asked.serving.running.pop(self.asked.response_id, None)

    def _tick(self, interval: float) -> None:
        if self._is_quiet:
            self._is_overdue = True
            self._stream.nudge()
        self.keep_alive(interval)


class Serving:
    """The engine behind the routes."""

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServeConfig,
        facts: ModelFacts,
        tokenizer: PretrainedTokenizer | None,
        default_params: SamplingParams,
        queue_limit: QueueLimit,
        digest: str,
    ) -> None:
        self.engine = engine
        self.queue_limit = queue_limit
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.default_params = default_params
        self.created = int(time.time())
        self.chat_template = _chat_template(config.chat_template)
        self.names = tuple(config.served_model_name or _names(facts.model))
        self.digest = digest
        """Names the weights and settings under which equal seeds give equal text."""
        self.system_fingerprint = f"fp_{digest[:12]}"
        self.defaults: Mapping[str, Any] = dict(engine.generation_config.sampling)
        """Sampling parameters that the model's files, or the command line, recommend."""
        self._reports: set[str] = set()
        self.pace = Pace(config.max_chunks_per_second)
        self.running: dict[str, Generation] = {}
        """The generations that run, by the ids of their responses."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations have a template, so that the chat routes can answer."""
        if self.tokenizer is None:
            return False
        return self.chat_template is not None or self.tokenizer.chat_template is not None

    @classmethod
    async def of(cls, engine: AsyncLLM, config: ServeConfig, queue_limit: QueueLimit) -> Serving:
        """Return the routes' common state for an engine."""
        tokenizer = await engine.get_tokenizer() if engine.has_tokenizer else None
        defaults = await engine.get_default_sampling_params()
        facts = await engine.get_model_config()
        await engine.index_vocabulary()
        digest = _digest(facts, engine.engine_config, await engine.weights_digest())
        return cls(engine, config, facts, tokenizer, defaults, queue_limit, digest)

    def check_model(self, name: object) -> str:
        """Return the model's name for the answer, or raise the 404 of a model that is not here."""
        if name is None and not self.config.strict_openai:
            return self.names[0]
        if name is None:
            raise invalid("model is missing (--strict-openai demands it)", "model")
        if not {name, str(name).removesuffix(LATEST)} & {*self.names}:
            raise ApiError(
                404,
                f"the model {shown(name)} does not exist; this server has {', '.join(self.names)}",
                code="model_not_found",
                param="model",
            )
        return str(name)

    def is_first_report(self, text: str) -> bool:
        """Return whether a text is logged for the first time, as long as not too many are."""
        if text in self._reports or len(self._reports) >= MAX_REPORTS:
            return False
        self._reports.add(text)
        return True

    def without_paths(self, message: str) -> str:
        """Return a message without the directories of the model, which are no client's business."""
        return without_paths(message, self.facts.directories)

    def required_tokenizer(self) -> PretrainedTokenizer:
        """Return the tokenizer, or raise the 400 of a server that has none."""
        if self.tokenizer is None:
            raise invalid("this server has no tokenizer (--skip-tokenizer-init); send token ids")
        return self.tokenizer

    @property
    def template_text(self) -> str:
        """The text of the chat template, or of all of them; nothing if there is none."""
        found = self.chat_template or (self.tokenizer and self.tokenizer.chat_template) or ""
        return found if isinstance(found, str) else "\n".join(found.values())

    async def chat_prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """Return a conversation as a prompt, by the server's template if none is given.

        Raises:
            ApiError: there is no tokenizer.
            MieError: a message is malformed, or there is no template that takes it.
        """
        self.required_tokenizer()
        if options.get("chat_template") is None:
            options["chat_template"] = self.chat_template
        return await self.engine.chat_prompt(messages, **options)

    def params(
        self, structure_name: str, stream: bool | None, base: Mapping[str, Any], **given: Any
    ) -> SamplingParams:
        """Return sampling parameters: those given over ``base``. None is not given.

        Refusals of a structured output begin with ``structure_name``.

        Raises:
            ApiError: the answer cannot be made to match.
            ConfigError: a value is out of range, or values contradict each other.
        """
        values = {**base, **{name: value for name, value in given.items() if value is not None}}
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        with naming_structure(structure_name):
            return SamplingParams(**values, output_kind=kind)

    async def start(self, asked: Asked[Any]) -> Generation:
        """Prepare a request and queue it, all of its prompts or none.

        Raises:
            ApiError: the prompt does not fit the context.
            MieError: it can never be served.
        """
        if self.config.max_logprobs >= 0:
            check_logprobs(asked, self.config.max_logprobs)
        client = self.queue_limit.client_of(asked.scope)
        with self.queue_limit.entering(client, len(asked.prompts)):
            prepared = [
                await self._prepare(asked, place, prompt)
                for place, prompt in enumerate(asked.prompts)
            ]
            stream = await self.engine.add(prepared, self.queue_limit.check(prepared))
        try:
            if self.config.log_prompts:
                texts = [each.prompt or each.token_ids for each in prepared]
                facts_of(asked.scope)["prompts"] = json.dumps(texts, ensure_ascii=True)
            generation = Generation(asked, prepared, stream)
        except BaseException:
            stream.close()
            raise
        self.running[asked.response_id] = generation
        return generation

    async def _prepare(self, asked: Asked[Any], place: int, prompt: Any) -> PreparedRequest:
        max_model_len, is_text = self.facts.max_model_len, isinstance(prompt, str)
        if is_text and len(prompt) > self.engine.limits.prompt_chars(max_model_len):
            raise too_long(None, None, max_model_len)
        if is_text and not asked.adds_special_tokens:
            encode = self.required_tokenizer().encode
            ids = await call_in_thread(encode, prompt, False)
            prompt = {"prompt": prompt, "prompt_token_ids": ids}
        elif not isinstance(prompt, Mapping):
            prompt = {"prompt" if is_text else "prompt_token_ids": prompt}
        token_ids = prompt.get("prompt_token_ids")
        is_cut = asked.params.truncate_prompt_tokens is not None
        if token_ids is not None and len(token_ids) >= max_model_len and not is_cut:
            raise too_long(len(token_ids), None, max_model_len)
        with naming_structure(asked.structure_name):
            prepared = await self.engine.prepare(
                {**prompt, "cache_salt": salt_of(asked.scope, asked.body.cache_salt)},
                asked.params,
                asked.response_id if len(asked.prompts) == 1 else f"{asked.response_id}-{place}",
                client=self.queue_limit.client_of(asked.scope),
                caller=asked.scope.get("mie.client"),
                priority=self._clamped(asked.body.priority or 0),
            )
        num_prompt, num_new = len(prepared.token_ids), prepared.params.max_tokens or 0
        if num_prompt >= max_model_len:
            raise too_long(num_prompt, None, max_model_len)
        if asked.is_max_tokens_given and num_prompt + num_new > max_model_len:
            raise too_long(num_prompt, num_new, max_model_len)
        return prepared

    def _clamped(self, priority: int) -> int:
        """Return a client's priority. The engine refuses one that its policy does not read."""
        if self.engine.engine_config.scheduling_policy != "priority":
            return priority
        return max(priority, self.config.highest_priority)


def check_logprobs(asked: Asked[Any], limit: int) -> None:
    """Raise the 400 for more log-probabilities than the server gives."""
    for name, count in (
        (asked.logprobs_name, asked.params.logprobs),
        ("prompt_logprobs", asked.params.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= limit:
            wanted = "all" if count == -1 else count
            raise invalid(f"{name} asks for {wanted}; the limit is {limit} (--max-logprobs)", name)


def without_paths(message: str, directories: Iterable[Path]) -> str:
    """Return a message without the directories of a model."""
    for directory in directories:
        message = message.replace(f"{directory}{os.sep}", "")
        message = message.replace(str(directory), "the model's directory")
    return message


def salt_of(scope: Scope, cache_salt: str | None) -> str | None:
    """Return the salt of the client's key and of its request together."""
    of_key: str | None = scope.get("mie.cache_salt")
    if of_key is None or cache_salt is None:
        return of_key or cache_salt
    return hashlib.sha256(f"{of_key}\0{cache_salt}".encode()).hexdigest()


def new_id(prefix: str) -> str:
    """Return an id for a response, which cannot be guessed."""
    return f"{prefix}-{uuid.uuid4().hex}"


def _names(model: str) -> list[str]:
    """The names of a model that was loaded from a directory, or under a name."""
    last = Path(model).name
    return [model] if last == model else [model, last]


def _digest(facts: ModelFacts, config: EngineConfig, weights: str) -> str:
    """Return the SHA-256 of the weights and settings under which equal seeds give equal text."""
    settings = (config.batch_invariant, config.kv_cache_dtype, config.weight_dtype)
    what = (weights, facts.backend, facts.dtype, *settings, config.linear_plan, __version__)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _chat_template(given: str | None) -> str | None:
    """Return the text of a template file, or the name of one of the model's."""
    if given is None or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")
