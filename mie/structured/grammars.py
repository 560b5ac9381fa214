"""Compile what an output must match with llguidance, and follow outputs token by token.

llguidance reports errors as states of a matcher and raises nothing. Every call here checks for
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from mie.errors import RequestError
from mie.params.structured import StructuredOutputsParams
from mie.text.printable import printable
from mie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 256
"""Number of grammars that stay compiled. Others are compiled again."""

MAX_RULES = 256
"""Maximum number of rules, or of references in a schema.

llguidance follows them by recursion, and a chain of 3,000 exhausts the stack of a thread.
"""
MAX_MULTIPLE = 10_000
"""Maximum product of the different values of ``multipleOf``.

llguidance makes as many states when it compiles them, and for 1,000,003 this takes 7 seconds.
"""

MAX_INTERSECTIONS = 64
"""Maximum number of operators ``&`` in a grammar. Each can double the states of a lexeme."""

LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 20_000, "max_lexer_states": 50_000}
"""Limits of llguidance's work and memory, a tenth and a fifth of its own.

With its own, a mask of ``((a{1000}){1000}){1000}`` takes seconds, and an output of
``[a-z ]*[aeiou][a-z ]{30}`` takes 90 MB.
"""

MAX_REASON = 400
"""Maximum number of characters of the library's reason in a message. Some list all tokens."""

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([0-9.]+)')
_REFERENCE = re.compile(r'"\$(?:dynamicRef|recursiveRef|ref)"\s*:')
_ASCII_ESCAPE = re.compile(r"\\u00[2-7][0-9a-fA-F]")
"""In a schema inside a grammar, it could hide the name of a keyword."""

_RULE = re.compile(r"^[ \t]*[?!]?\w[^:\n]*:", re.MULTILINE)
_QUOTED = re.compile(r"""(["/])(?:\\[\s\S]|(?!\1)[^\\])*(?:\1|\Z)""")
"""A string or a regular expression of a grammar, which may lack its end."""

_SCHEMAS = {"$defs", "definitions", "properties", "patternProperties"} | {
    *("allOf", "anyOf", "oneOf", "prefixItems"),
}
"""Keywords whose value is a mapping or a list of schemas."""


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
        return Matcher(compiled.deep_copy(), self.eos_token_ids)

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

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    @property
    def may_be_forced(self) -> bool:
        """Whether the next token may be determined, by the next characters or by the end."""
        return bool(self._matcher.compute_ff_tokens()) or self._matcher.is_stopped()

    def mask(self) -> bytes:
        """Return a bit for each token that may come next: token i is bit i % 8 of byte i // 8.

        Raises:
            RequestError: the grammar is too complex to continue.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs {_reason(self._matcher)}")
        return mask

    def accept(self, token_id: int) -> None:
        """Advance by a token.

        Raises:
            RequestError: the token may not come next, or the grammar is too complex to continue.
        """
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"structured_outputs {_reason(self._matcher)}")

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
        _check_grammar(params.grammar)
        return "grammar", matchers.grammar_from_lark(params.grammar)
    text = '{"type": "object"}' if params.json_object else str(params.json)
    _check_count("json schema", "references", len(_REFERENCE.findall(text)), MAX_RULES)
    _check_multiples("json schema", text)
    schema = json.loads(text)
    if params.disable_additional_properties:
        _close(schema)
    try:
        grammar = matchers.grammar_from_json_schema(schema, overrides=_json_options(params))
    except ValueError as error:  # a number that the library cannot hold
        raise RequestError(
            "structured_outputs has a json schema that cannot be read: "
            f"{printable(str(error))[:MAX_REASON]}"
        ) from error
    return "json schema", grammar


def _check_grammar(grammar: str) -> None:
    """Raise `RequestError` for a grammar on which llguidance spends more than its limits."""
    rest = _QUOTED.sub("", grammar)
    num_references = len(_REFERENCE.findall(grammar))
    num_rules = len(_RULE.findall(rest)) + num_references
    _check_count("grammar", "rules and references", num_rules, MAX_RULES)
    _check_count("grammar", "operators &", rest.count("&"), MAX_INTERSECTIONS)
    _check_multiples("grammar", grammar)
    if "::" in rest:
        raise RequestError(
            "structured_outputs has a grammar with rules that have parameters (::), which are not "
            "supported: their number may have no end (write the rules one by one)"
        )
    if "%json" in rest and (escape := _ASCII_ESCAPE.search(grammar)):
        raise RequestError(
            f"structured_outputs has a grammar with a %json schema and the escape {escape[0]}, "
            "which is not supported there (write the character itself)"
        )


def _check_multiples(kind: str, text: str) -> None:
    digits = {number.replace(".", "").strip("0")[:9] for number in _MULTIPLE.findall(text)}
    product = prod(int(each or 1) for each in digits)
    if product > MAX_MULTIPLE:
        raise RequestError(
            f"structured_outputs has a {kind} whose values of multipleOf are too large together "
            f"(let the product of their digits be at most {MAX_MULTIPLE})"
        )


def _check_count(kind: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(
            f"structured_outputs has a {kind} with {count} {what}; at most {most} are supported "
            "(write it with fewer)"
        )


def _json_options(params: StructuredOutputsParams) -> Any:
    strict = {"lenient": False, "coerce_one_of": False}  # whatever the schema's x-guidance says
    if params.whitespace_pattern is not None:
        return {**strict, "whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace:
        compact = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        return {**strict, **compact}
    return {**strict, "whitespace_flexible": True}


def _close(schema: Any) -> None:
    """Forbid further properties if a schema names some and does not mention others."""
    if not isinstance(schema, dict):
        return
    for name in _SCHEMAS & schema.keys():
        inner = schema[name]
        for each in inner.values() if isinstance(inner, dict) else inner:
            _close(each)
    for name in ("items", "additionalProperties"):
        _close(schema.get(name))
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)


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
