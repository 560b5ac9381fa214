"""Compile what an output must match with llguidance, and follow outputs token by token.

llguidance reports errors as states of a matcher and raises nothing. Every call here checks for
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mie.arithmetic import ceil_div
from mie.errors import RequestError
from mie.params.structured import StructuredOutputsParams
from mie.structured.limits import LIMITS, check_grammar, check_schema
from mie.structured.schemas import COMPACT, close
from mie.text.printable import printable
from mie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 32
"""Number of grammars that stay compiled. Others are compiled again, most of them in 1 to 10 ms.

A grammar of 65,536 characters takes up to 24 MB, and an untrusted caller may send many.
"""

MAX_REASON = 400
"""Maximum number of characters of the library's reason in a message. Some list all tokens."""


class Grammars:
    """The grammars of one model's requests. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size`` is the number of logits, which may exceed the tokenizer's vocabulary."""
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._tokens: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=MAX_COMPILED)(self._compile)

    def start(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the beginning of an output.

        Raises:
            RequestError: llguidance is not installed, or refuses the grammar or the tokenizer.
        """
        compiled: LLMatcher = self._compiled(params)
        return Matcher(compiled.deep_copy(), self.eos_token_ids, self.vocab_size)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        kind, grammar = _grammar(params)
        library = _library()
        matcher: LLMatcher = library.LLMatcher(
            self._llguidance_tokens(), grammar, log_level=0, limits=library.LLParserLimits(**LIMITS)
        )
        matcher.compute_bitmask()  # finds grammars that compile and allow nothing
        if matcher.is_error():
            raise RequestError(f"structured_outputs has a {kind} that {_reason(matcher)}")
        return matcher

    def _llguidance_tokens(self) -> LLTokenizer:
        """Return the vocabulary as llguidance needs it. For a large one this takes seconds."""
        if self._tokens is None:
            if not self.eos_token_ids:
                raise RequestError(
                    "structured_outputs needs an end-of-text token, and the model has none (set "
                    "eos_token_id in its generation_config.json)"
                )
            try:
                self._tokens = _library().LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=self.vocab_size,
                    eos_token=list(self.eos_token_ids),
                )
            except ValueError as error:
                raise RequestError(
                    f"structured_outputs cannot use this tokenizer: {error}"
                ) from error
        return self._tokens


class Matcher:
    """The state of one output: which tokens may come next."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_bytes = 4 * ceil_div(vocab_size, 32)
        # The tokens of the next characters, if those are determined. The library finds them anew
        # at each token and tokenizes all that are left, so they are kept until they are accepted.
        # They are found at the same tokens each time, so the same tokens give the same state.
        self._run: Sequence[int] | None = None
        self._earlier_runs: list[Sequence[int]] = []

    def determined(self) -> int | None:
        """Return the only token that may come next, or None if there are several.

        The next characters may determine it, or the end.

        Raises:
            RequestError: the grammar is too complex to continue.
        """
        run = self._next_run()
        if run:
            return run[0]
        if self._matcher.is_stopped() and len(self._eos_token_ids) == 1:
            self._check()
            return self._eos_token_ids[0]
        return None

    def mask(self) -> bytes:
        """Return a bit for each token that may come next: token i is bit i % 8 of byte i // 8.

        Raises:
            RequestError: the grammar is too complex to continue.
        """
        run = self._next_run()
        if run:
            return (1 << run[0]).to_bytes(self._num_bytes, "little")
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def allows(self, token_id: int) -> bool:
        """Return whether the mask has a token, which takes a fraction of a mask's time.

        Raises:
            RequestError: the grammar is too complex to continue.
        """
        run = self._next_run()
        if run:
            return token_id == run[0]
        if token_id in self._eos_token_ids:  # `validate_tokens` refuses some that masks have
            return bool(self.mask()[token_id // 8] >> token_id % 8 & 1)
        return self._matcher.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> None:
        """Advance by a token.

        Raises:
            RequestError: the token may not come next, or the grammar is too complex to continue.
        """
        run, self._run = self._next_run(), ()
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"structured_outputs {_reason(self._matcher)}")
        self._earlier_runs.append(run)
        self._run = (run[1:] or None) if run and run[0] == token_id else None

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs {_reason(self._matcher)}")

    def _next_run(self) -> Sequence[int]:
        run = self._run
        if run is None:
            run = self._run = self._matcher.compute_ff_tokens() or ()
        return run

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens may come next, one after another. Nothing changes."""
        count = self._matcher.validate_tokens(list(token_ids))
        if count < len(token_ids) and token_ids[count] in self._eos_token_ids:
            # The library refuses an end of text here that its masks allow.
            trial = self._matcher.deep_copy()
            trial.consume_tokens(list(token_ids[:count]))
            count += trial.is_accepting()
        return count

    def rollback(self, num_tokens: int) -> None:
        """Return to the state before the last accepted tokens."""
        assert self._matcher.rollback(num_tokens), "more tokens than were accepted"
        if num_tokens > 0:
            self._run = self._earlier_runs[-num_tokens]
            del self._earlier_runs[-num_tokens:]


def _grammar(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the kind of the grammar and the grammar for llguidance, or raise `RequestError`."""
    matchers = _library().LLMatcher
    if params.regex is not None:
        return "regex", matchers.grammar_from_regex(params.regex)
    if params.choice is not None:
        # An upper-case name makes one lexeme of all, which has no limit of alternatives.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return "choice", matchers.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if params.grammar is not None:
        check_grammar(params.grammar)
        return "grammar", matchers.grammar_from_lark(params.grammar)
    text = '{"type": "object"}' if params.json_object else str(params.json)
    check_schema(text)
    schema = json.loads(text)
    if params.disable_additional_properties:
        close(schema)
    try:
        grammar = matchers.grammar_from_json_schema(schema, overrides=_json_options(params))
    except ValueError as error:  # a number that the library cannot hold
        raise RequestError(
            "structured_outputs has a json schema that cannot be followed: "
            f"{printable(str(error))[:MAX_REASON]}"
        ) from error
    return "json schema", grammar


def _json_options(params: StructuredOutputsParams) -> Any:
    strict = {"lenient": False, "coerce_one_of": False}  # regardless of a schema's x-guidance
    if params.whitespace_pattern is not None:
        return {**strict, "whitespace_pattern": params.whitespace_pattern}
    return {
        **strict,
        **(COMPACT if params.disable_any_whitespace else {"whitespace_flexible": True}),
    }


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed (pip install "
            "'mie[structured]')"
        ) from error
    return llguidance


def _reason(matcher: LLMatcher) -> str:
    """Return why the matcher is in error, without the dump of its state."""
    reason = matcher.get_error().partition("<state>")[0]
    reason = printable(" ".join(reason.split()))
    return f"cannot be followed: {reason[:MAX_REASON]}"
