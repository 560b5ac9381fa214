"""The common state of all routes: the engine, its model's facts, and the running requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.types import Scope

from mie.base.version import __version__
from mie.config.engine import EngineConfig
from mie.config.params.sampling import RequestOutputKind, SamplingParams
from mie.errors import ConfigError
from mie.frontend.async_llm import AsyncLLM, ModelFacts
from mie.load.adapters import Adapter
from mie.serve.asgi import Pace, route_of
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, invalid, naming_structure, no_model
from mie.serve.limits import QueueLimit
from mie.text.messages import Message
from mie.text.pretrained import PretrainedTokenizer
from mie.text.template_files import template_given

if TYPE_CHECKING:
    from mie.serve.writer import Writer

logger = logging.getLogger(__name__)

LATEST = ":latest"
"""The tag that Ollama's clients add to the name of a model without one."""
MAX_REPORTS = 1000
"""Maximum number of different lines that the log gets about fields without an effect."""
MAX_NAMED = 20
"""Maximum number of fields of a body that the header names."""
IGNORED = "x-mie-ignored"
"""The header that names fields without an effect."""
SWITCHES = ("enable_thinking", "thinking")
"""The variables with which chat templates turn reasoning on and off."""

A = TypeVar("A", covariant=True)


@dataclass(kw_only=True, eq=False)
class Asked(Generic[A]):
    """An HTTP request with its body, and the parameters that its dialect takes from it."""

    body: A
    model: str
    """The name of the model for the answer."""
    headers: dict[str, str]
    """Headers for the answer."""
    serving: Serving
    scope: Scope
    params: SamplingParams = field(init=False)
    limit: tuple[str, int] | None = field(init=False)
    """The client's field that limits the length of the answer, and the number of tokens."""
    structure_name: str = field(init=False)
    """The client's field that describes the structure of the answer."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the client need not give."""
        return self.serving.defaults

    def set_params(
        self,
        structure_name: str,
        stream: bool | None,
        *,
        fills_context: bool = True,
        limit_name: str = "max_tokens",
        **given: Any,
    ) -> None:
        """Set the sampling parameters: those given over the model's own. None is not given.

        If the answer ``fills_context``, the rest of the context is its default length.
        ``limit_name`` is the client's name of ``max_tokens``. A negative limit is the rest of the
        context.
        Refusals of a structured output begin with ``structure_name``.

        Raises:
            ApiError: the answer cannot be made to match.
            ConfigError: a value is out of range, or values contradict each other.
        """
        limit = given.get("max_tokens")
        self.limit = None
        if limit is not None and limit < 0:
            given["max_tokens"] = self.serving.facts.max_model_len
        elif limit is not None:
            self.limit = limit_name, limit
        values: dict[str, Any] = {"max_tokens": None} if fills_context else {}
        values |= self.defaults
        values |= {name: value for name, value in given.items() if value is not None}
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        with naming_structure(structure_name):
            self.params = SamplingParams(**values, output_kind=kind)
        self.structure_name = structure_name

    def ignore(self, *names: str) -> None:
        """Name fields of the request that have no effect, in the header and once in the log.

        Raises:
            ApiError: there is one, and the server runs with ``--strict``.
        """
        if not names:
            return
        text, path = ",".join(names), route_of(self.scope)
        if self.serving.config.strict:
            message = f"fields without an effect: {text} (the server runs with --strict)"
            raise ApiError(400, message, code="unknown_parameter", param=names[0])
        if self.serving.is_first_report(text):
            logger.warning("POST %s: ignored fields: %s", path, text)
        before = self.headers.get(IGNORED)
        self.headers[IGNORED] = text if before is None else f"{before},{text}"


@dataclass(kw_only=True, eq=False)
class Serving:
    """The engine behind the routes."""

    engine: AsyncLLM
    config: ServeConfig
    facts: ModelFacts
    tokenizer: PretrainedTokenizer | None
    default_params: SamplingParams
    queue_limit: QueueLimit
    digest: str
    """Names the weights and settings under which equal seeds give equal text."""

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.chat_template = template_given(self.config.chat_template)
        names = self.config.served_model_name or names_of(self.facts.model)
        self.names = tuple(map(in_utf8, names))
        for name in {*self.names} & self.engine.adapters.keys():
            raise ConfigError(f"lora_modules has {name!r}, a name of the model (choose another)")
        self.defaults: Mapping[str, Any] = dict(self.engine.generation_config.sampling)
        """Sampling parameters that the model's files, or the command line, recommend."""
        self.conversation_defaults = dict(self.engine.generation_config.conversation)
        """The same for conversations on the page and in Ollama's dialect."""
        self._reports: set[str] = set()
        self.pace = Pace(self.config.max_chunks_per_second)
        self.writing = asyncio.Lock()
        """Held while a large answer is written. One large answer is written at a time."""
        self.adapting = asyncio.Lock()
        """Held while an adapter is loaded or unloaded."""
        self.running: dict[str, Writer[Any]] = {}
        """The answers that are being generated, by their ids."""

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
        default_params = await engine.get_default_sampling_params()
        facts = await engine.get_model_config()
        await engine.index_vocabulary()
        return cls(
            engine=engine,
            config=config,
            facts=facts,
            tokenizer=tokenizer,
            default_params=default_params,
            queue_limit=queue_limit,
            digest=_digest(facts, engine.engine_config, await engine.weights_digest()),
        )

    def check_model(self, name: object) -> str:
        """Return the model's name for the answer, or raise the 404 of a model that is not here."""
        if name is None and not self.config.strict_openai:
            return self.names[0]
        if name is None:
            raise invalid("model is missing (--strict-openai demands it)", "model")
        self.adapter_of(name)
        return str(name)

    def adapter_of(self, name: object) -> Adapter | None:
        """Return the adapter that a model's name means, or None for the model itself.

        Raises:
            ApiError: neither has the name.
        """
        adapters, names = self.engine.adapters, (str(name), str(name).removesuffix(LATEST))
        if {*names} & {*self.names}:
            return None
        for each in names:
            if each in adapters:
                return adapters[each]
        raise no_model(name, [*self.names, *adapters])

    def digest_of(self, adapter: Adapter | None) -> str:
        """Return the digest of the model, or of the model with an adapter."""
        if adapter is None:
            return self.digest
        return hashlib.sha256(f"{self.digest}\0{adapter.digest}".encode()).hexdigest()

    def is_first_report(self, text: str) -> bool:
        """Return whether a text is logged for the first time, as long as not too many are."""
        if text in self._reports or len(self._reports) >= MAX_REPORTS:
            return False
        self._reports.add(text)
        return True

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

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            ApiError: there is no tokenizer.
            MieError: the text is longer than a prompt may be.
        """
        self.required_tokenizer()
        return await self.engine.tokenize(text, add_special_tokens=add_special_tokens)

    def priority_of(self, priority: int | None) -> int:
        """Return a client's priority. Only the priority policy accepts one, within a limit."""
        if self.engine.engine_config.scheduling_policy != "priority":
            return priority or 0
        return max(priority or 0, self.config.highest_priority)


def reasoning_variables(
    template: str, *, is_on: bool | None = None, effort: str | None = None
) -> dict[str, Any]:
    """Return the variables that turn reasoning on or off, and set how much a model reasons.

    Only variables that the chat template reads are among them. An effort of "none" turns
    reasoning off.
    """
    wanted: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        wanted, is_on = {}, False
    wanted |= dict.fromkeys(SWITCHES, is_on)
    return {
        name: value
        for name, value in wanted.items()
        if value is not None and re.search(rf"(?<![\w.'\"]){name}\b", template)
    }


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


def in_utf8(name: str) -> str:
    """Return a name as clients get it: bytes of a path that are not UTF-8 become U+FFFD."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def names_of(model: str) -> list[str]:
    """The names of a model that was loaded from a path, or under a name.

    The first is for people: a path on this machine gives way to the name of the file.
    """
    is_path = os.path.exists(model)
    last = os.path.basename(os.path.abspath(model)) if is_path else Path(model).name
    return list(dict.fromkeys([last, model] if is_path else [model, last]))


def _digest(facts: ModelFacts, config: EngineConfig, weights: str) -> str:
    """Return the SHA-256 of the weights and settings under which equal seeds give equal text."""
    names = "batch_invariant", "kv_cache_dtype", "weight_dtype", "activations"
    settings = [getattr(config, name) for name in names]
    what = (weights, facts.backend, facts.dtype, *settings, __version__)
    return hashlib.sha256(repr(what).encode()).hexdigest()
