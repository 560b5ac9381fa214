"""Refuse descriptions on which llguidance would spend more than its own limits allow."""

from __future__ import annotations

import re
from math import prod

from mie.errors import RequestError

LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 20_000, "max_lexer_states": 50_000}
"""Limits of llguidance's work and memory, a tenth and a fifth of its own.

With its own, a mask of ``((a{1000}){1000}){1000}`` takes seconds, and an output of
``[a-z ]*[aeiou][a-z ]{30}`` takes 90 MB.
"""

MAX_RULES = 256
"""Maximum number of rules and of references in schemas.

llguidance follows them by recursion, and a chain of 3,000 exhausts the stack of a thread.
"""

MAX_INTERSECTIONS = 64
"""Maximum number of operators ``&`` in a grammar. Each can double the states of a lexeme."""

MAX_MULTIPLE = 10_000
"""Maximum product of the different values of ``multipleOf``.

llguidance makes as many states when it compiles them, and for 1,000,003 this takes 7 seconds.
"""

_RULE = re.compile(r"^[ \t]*[?!]?\w[^:\n]*:", re.MULTILINE)
"""The beginning of a rule. Each has a line of its own."""

_QUOTED = re.compile(r"""(["/])(?:\\[\s\S]|(?!\1)[^\\])*(?:\1|\Z)""")
"""A string or a regular expression of a grammar, which may lack its end."""

_REFERENCE = re.compile(r'"\$(?:dynamicRef|recursiveRef|ref)"\s*:')
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([0-9.]+)')
_ASCII_ESCAPE = re.compile(r"\\u00[2-7][0-9a-fA-F]")
"""In a schema inside a grammar, it could hide the name of a keyword."""


def check_schema(text: str) -> None:
    """Raise `RequestError` for the text of a JSON schema that would cost too much."""
    _check_count("json schema", "references", len(_REFERENCE.findall(text)), MAX_RULES)
    _check_multiples("json schema", text)


def check_grammar(text: str) -> None:
    """Raise `RequestError` for a grammar that would cost too much, also by schemas inside it."""
    rest = _QUOTED.sub("", text)
    num_rules = len(_RULE.findall(rest)) + len(_REFERENCE.findall(text))
    _check_count("grammar", "rules or references", num_rules, MAX_RULES)
    _check_count("grammar", "operators &", rest.count("&"), MAX_INTERSECTIONS)
    _check_multiples("grammar", text)
    if "::" in rest:
        raise RequestError(
            "structured_outputs has a grammar with rules that have parameters (::), which are not "
            "supported: their number may have no end (write the rules one by one)"
        )
    if "%json" in rest and (escape := _ASCII_ESCAPE.search(text)):
        raise RequestError(
            f"structured_outputs has a grammar with a %json schema and the escape {escape[0]}, "
            "which is not supported there (write the character itself)"
        )


def _check_multiples(kind: str, text: str) -> None:
    digits = {number.replace(".", "").strip("0")[:9] for number in _MULTIPLE.findall(text)}
    if prod(int(each or 1) for each in digits) > MAX_MULTIPLE:
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
