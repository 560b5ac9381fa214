"""Compile what outputs must match, with llguidance, and remember it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING

from mie.errors import RequestError
from mie.params.structured import StructuredOutputsParams
from mie.structured.descriptions import grammar_of, kind_of, library
from mie.structured.kept import Grammar, Kept
from mie.structured.limits import LIBRARY_LIMITS
from mie.structured.matcher import Matcher
from mie.structured.reasons import exceeded, why
from mie.structured.vocabulary import Vocabulary
from mie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from mie.structured.compiler import Compiler, Reply


class Grammars:
    """The grammars of one model's requests. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size`` is the number of logits, which may exceed the tokenizer's vocabulary."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._vocabulary = Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._kept = Kept()

    @cached_property
    def _compiler(self) -> Compiler:  # of two that threads make at once, one is forgotten
        from mie.structured.compiler import Compiler  # imports subprocess, which few models need

        return Compiler(self._vocabulary.arguments, partial(_compiled, self._vocabulary))

    def start(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the beginning of an output.

        This waits while the description is compiled. It does not if a matcher of an equal
        description exists.

        Raises:
            RequestError: llguidance is not installed, refuses the description or the tokenizer, or
                the description exceeds a limit.
            WorkerError: the worker process failed, for which the description is not to blame.
        """
        grammar = self._kept.grammar(params)
        if grammar is None:
            future = self.submit(params)
            try:
                grammar = future.result()
            finally:
                future.cancel()  # an interrupt ends the wait
        return Matcher(grammar, self.eos_token_ids, self.vocab_size)

    def submit(self, params: StructuredOutputsParams, caller: Hashable = None) -> Future[Grammar]:
        """Begin to compile a description, and return what will have the grammar; it never waits.

        While it is held, `start` returns at once. Callers take turns. The future may be cancelled.

        Raises:
            RequestError: the same description was refused before.
            WorkerError: the system refuses a thread.
        """
        refusal = self._kept.refusal(params)
        if refusal is not None:
            raise RequestError(refusal)
        grammar = self._kept.grammar(params)
        if grammar is not None:
            from concurrent.futures import Future  # as above

            done: Future[Grammar] = Future()
            done.set_result(grammar)
            return done
        future: Future[Grammar] = self._compiler.submit(params, caller)
        future.add_done_callback(partial(self._remember, params))
        return future

    def index(self) -> None:
        """Index the vocabulary now, so that the first structured output need not wait for it."""
        with suppress(RequestError):  # the first request gets it
            self._vocabulary.indexed()

    def _remember(self, params: StructuredOutputsParams, future: Future[Grammar]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._kept.keep(params, future.result())
        elif isinstance(error, RequestError):
            self._kept.refuse(params, str(error))


def _compiled(
    vocabulary: Vocabulary, params: StructuredOutputsParams, check: Callable[[str], Reply]
) -> Grammar:
    """Compile a description in this process, after a worker has compiled it under limits."""
    text = grammar_of(params)
    tokens = vocabulary.indexed()
    reply = check(text)
    if "error" in reply:
        raise _refusal(params, f"cannot be followed: {why(reply['error'])}")
    if "num_bytes" not in reply:
        raise _refusal(params, str(exceeded(reply["returncode"])))
    limits = library().LLParserLimits(**LIBRARY_LIMITS)
    matcher = library().LLMatcher(tokens, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(params, f"cannot be followed: {why(matcher.get_error())}")
    return Grammar(matcher, reply["num_bytes"])


def _refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"structured_outputs has a {kind_of(params)} that {reason}")
