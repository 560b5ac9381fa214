"""Compile descriptions of outputs with llguidance, and keep the grammars."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mie.base.threads import after_fork
from mie.config.params.structured import StructuredOutputsParams
from mie.errors import RequestError, printable
from mie.structured.budget import Budget, BudgetedMatcher, budget_of
from mie.structured.descriptions import Salted, kind_of, library
from mie.structured.limits import (
    EXCEEDED,
    LIBRARY_LIMITS,
    MAX_KEPT,
    MAX_KEPT_BYTES,
    MAX_REFUSALS,
    why,
)
from mie.structured.matcher import Matcher
from mie.structured.unique_matcher import Tokens, UniqueItems, UniqueMatcher
from mie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from llguidance import LLMatcher, LLTokenizer

    from mie.structured.compiler import Compiler, Reply


_PLACE = re.compile(r"^(at )?\d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
"""The place of an error in a grammar, and the lines around the place."""


class Grammars:
    """The grammars of one model's requests. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size`` is the number of logits. It may exceed the tokenizer's vocabulary."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._kept = Kept()

    @cached_property
    def _compiler(self) -> Compiler:  # of two that threads make at once, one is forgotten
        from mie.structured.compiler import Compiler  # imports subprocess for few models

        # The compiler does not refer to this object, so it ends with the last reference to it.
        work = partial(_compiled, self._vocabulary, self._kept)
        return Compiler(self._vocabulary.arguments, work)

    def start(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the beginning of an output.

        This waits while the description is compiled. It does not if the request has submitted an
        equal description before, and holds it.

        Raises:
            RequestError: llguidance is not installed, refuses the description or the tokenizer, or
                the description exceeds a limit.
            WorkerError: the worker process failed, for which the description is not to blame.
        """
        grammar = self._kept.grammar(Salted(params)) or self._kept.held(params)
        if grammar is None:
            future = self.submit(params)
            try:
                grammar = future.result()
            finally:
                future.cancel()  # an interrupt ends the wait
        if grammar.unique_items is not None:
            return UniqueMatcher(grammar, self.eos_token_ids, self.vocab_size, grammar.unique_items)
        if grammar.budget is not None:
            return BudgetedMatcher(grammar, self.eos_token_ids, self.vocab_size, grammar.budget)
        return Matcher(grammar, self.eos_token_ids, self.vocab_size)

    def submit(
        self, params: StructuredOutputsParams, caller: Hashable = None, salt: str | None = None
    ) -> Future[Grammar]:
        """Begin to compile a description, and return the future of its grammar, without waiting.

        While it is held, `start` returns at once. Callers take turns. The future may be cancelled.
        The time of the call reveals nothing about descriptions of other salts.

        Raises:
            RequestError: the same description was refused before.
            WorkerError: the system refuses a thread.
        """
        description = Salted(params, salt)
        refusal = self._kept.refusal(description)
        if refusal is not None:
            raise RequestError(refusal)
        grammar = self._kept.grammar(description)
        if grammar is not None:
            from concurrent.futures import Future  # loaded for few models, as above

            done: Future[Grammar] = Future()
            done.set_result(grammar)
            return done
        return self._compiler.submit(description, caller)

    def index(self) -> None:
        """Index the vocabulary now, so that the first structured output need not wait for it."""
        with suppress(RequestError):  # the first request gets it
            self._vocabulary.indexed()


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled description. It stays compiled while a request holds it."""

    matcher: LLMatcher
    """A matcher at the beginning of an output, to be copied."""
    num_bytes: int
    """The memory that compiling it took."""
    unique_items: UniqueItems | None = None
    budget: Budget | None = None
    """The tokens that the text in the first tag may have."""


class Kept:
    """The grammars that requests hold, the ones used last, and the last refusals.

    A forked child begins without any, because another thread of its parent may have locked one.
    """

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[Salted | StructuredOutputsParams, Grammar] = (
            weakref.WeakValueDictionary()
        )
        self._last: OrderedDict[Salted, Grammar] = OrderedDict()
        self._refusals: OrderedDict[Salted, str] = OrderedDict()

    def grammar(self, description: Salted) -> Grammar | None:
        """Return a grammar that is compiled, and note its use."""
        with self._lock:
            grammar = self._held.get(description)
            if grammar is not None:
                self._use(description, grammar)
            return grammar

    def held(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return a grammar that is compiled for any salt."""
        with self._lock:
            return self._held.get(params)

    def keep(self, description: Salted, grammar: Grammar) -> Grammar:
        """Keep and return a grammar, or return an equal grammar that is already kept."""
        with self._lock:
            grammar = self._held.setdefault(description.params, grammar)
            self._held[description] = grammar
            self._use(description, grammar)
            return grammar

    def refusal(self, description: Salted) -> str | None:
        """Return why a description was refused, if it was."""
        with self._lock:
            return self._refusals.get(description)

    def refuse(self, description: Salted, why: str) -> None:
        """Keep a refusal."""
        with self._lock:
            self._refusals[description] = why
            if len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)

    def _use(self, description: Salted, grammar: Grammar) -> None:
        self._last[description] = grammar
        self._last.move_to_end(description)

        def num_bytes() -> int:
            return sum(grammar.num_bytes for grammar in set(self._last.values()))

        while len(self._last) > MAX_KEPT or num_bytes() > MAX_KEPT_BYTES:
            self._last.popitem(last=False)


class Vocabulary:
    """The tokens of a model as llguidance needs them. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._indexed: LLTokenizer | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of llguidance's LLTokenizer, as JSON values."""
        return {
            "tokenizer": self._tokenizer.to_json(),
            "n_vocab": self._vocab_size,
            "eos_token": self._eos_token_ids,
        }

    def indexed(self) -> LLTokenizer:
        """Return the tokens. The first call indexes them.

        That may take seconds, and holds Python's global lock meanwhile.

        Raises:
            RequestError: llguidance is not installed, or cannot use the tokenizer.
        """
        if self._indexed is None:
            if not self._eos_token_ids:
                raise RequestError(
                    "structured_outputs needs an end-of-text token, and the model has none (set "
                    "eos_token_id in its generation_config.json)"
                )
            try:
                self._indexed = library().LLTokenizer(**self.arguments())
            except ValueError as error:
                message = f"structured_outputs cannot use this tokenizer: {error}"
                raise RequestError(message) from error
        return self._indexed

    @cached_property
    def texts(self) -> Tokens:
        """Return the bytes of the tokens."""
        tokens = self.indexed()
        return Tokens([tokens.decode_bytes([each]) for each in range(self._vocab_size)])


def _compiled(
    vocabulary: Vocabulary, kept: Kept, description: Salted, check: Callable[[str], Reply]
) -> Grammar:
    """Return the grammar of a description.

    It is remembered before anyone gets it, so an equal description that comes next finds it.
    """
    try:
        return kept.keep(description, _new_grammar(vocabulary, description, check))
    except RequestError as refusal:
        kept.refuse(description, str(refusal))
        raise


def _new_grammar(
    vocabulary: Vocabulary, description: Salted, check: Callable[[str], Reply]
) -> Grammar:
    """Compile a description in this process, after a worker has compiled it under limits."""
    params = description.params
    tokens = vocabulary.indexed()
    reply = check(json.dumps(asdict(params)))
    if "refusal" in reply:
        raise _refusal(params, printable(reply["refusal"]))
    if "error" in reply:
        error, place = reply["error"], reply.get("place")
        if params.regex is not None:
            error = error.removeprefix("at 1(8): ")  # the place in a grammar with the expression
        if params.structural_tag is not None and place:
            error = error.rpartition("failed to compile JSON schema: ")[2]  # of a function
            error = _PLACE.sub("", error)  # the caller has not seen this grammar
        at = f"; see {place}" if place else ""
        raise _refusal(params, f"cannot be followed: {why(error)}{at}")
    if "grammar" not in reply:
        raise _refusal(params, EXCEEDED[reply["returncode"]])
    limits = library().LLParserLimits(**LIBRARY_LIMITS)
    matcher = library().LLMatcher(tokens, reply["grammar"], log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(params, f"cannot be followed: {why(matcher.get_error())}")
    places = reply["unique_items"]
    unique_items = UniqueItems(places, vocabulary.texts) if places else None
    return Grammar(matcher, reply["num_bytes"], unique_items, budget_of(params, tokens))


def _refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs has a {kind_of(params)} that {reason}")
