"""Write grammars in EBNF, as llama.cpp and XGrammar have it, in llguidance's dialect of Lark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mie.errors import RequestError, shown
from mie.structured.ebnf_runs import Choice, Letters, Node, Reference, Repeated, lark_with_runs

_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*(?:\n|\Z))+)
    |(?P<rule>[\w-]+)(?=(?:\s|\#[^\n]*(?:\n|\Z))*::=)
    |(?P<define>::=)
    |(?P<name>[\w-]+)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<letters>\[\^?(?:\\.|[^\]\\\n])*\])
    |(?P<any>\.)
    |(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<open>\()
    |(?P<close>\))
    |(?P<bar>\|)""",
    re.VERBOSE | re.DOTALL,
)
_IS_EBNF = re.compile(r"(?m)^[ \t]*[\w-]+\s*::=")
_IS_LARK = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|\??start\s*:(?!:=))")
_LETTER = re.compile(
    r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<c>[^xuU]))|.",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{each: each for each in "\"'\\[]-^/"}}
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ENDS_OF_ITEMS = ("name", "text", "letters", "any", "close")


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def is_ebnf(grammar: str) -> bool:
    """Return whether a grammar is in EBNF, and not in Lark."""
    return _IS_EBNF.search(grammar) is not None and _IS_LARK.search(grammar) is None


def lark_of_ebnf(grammar: str) -> str:
    """Return a grammar in EBNF as Lark. The rule ``root`` becomes ``start``.

    Each letter is a lexeme, except in a grammar of `ebnf_runs`. llguidance reads a lexeme as long
    as possible, so longer lexemes would not have all texts of other grammars.

    Raises:
        RequestError: the grammar has an error. The message continues "the grammar".
    """
    tokens = list(_tokens(grammar))
    names: dict[str, str] = {}
    for kind, text, place in tokens:
        if kind == "rule":
            if text in names:
                raise _error(grammar, place, f"the rule {text} is defined twice")
            names[text] = "start" if text == "root" else f"r{len(names)}"
    if "root" not in names:
        raise RequestError("has no rule named root (define root ::= …)")
    lark = "".join(_written(grammar, tokens, names))  # raises if there is an error
    with_runs = lark_with_runs(_rules(grammar, tokens), names)
    return "%llguidance {}\n" + (lark.lstrip() if with_runs is None else with_runs) + "\n"


def _rules(grammar: str, tokens: list[_Token]) -> dict[str, Choice]:
    """Return the rules of a grammar without errors as trees."""
    rules: dict[str, Choice] = {}
    opened: list[list[list[Node]]] = []
    for kind, text, place in tokens:
        if kind == "rule":
            opened = [[[]]]
            rules[text] = Choice(opened[0])
        elif kind == "open":
            opened.append([[]])
        elif kind == "bar":
            opened[-1].append([])
        elif kind == "close":
            choice = Choice(opened.pop())
            opened[-1][-1].append(choice)
        elif kind == "repeat":
            opened[-1][-1].append(Repeated(opened[-1][-1].pop(), *_counts(text)))
        elif kind != "define":
            opened[-1][-1].append(_node(grammar, place, kind, text))
    return rules


def _node(grammar: str, place: int, kind: str, text: str) -> Node:
    if kind == "name":
        return Reference(text)
    if kind == "text":
        codes = (code for code, _ in _spelled(grammar, place, text))
        return Choice([[_letters([(code, code)], False) for code in codes]])
    if kind == "any":
        return _letters([], True)
    is_negated = text.startswith("[^")
    return _letters(_ranges(grammar, place, text[is_negated:]), is_negated)


def _letters(ranges: list[tuple[int, int]], is_negated: bool) -> Letters:
    return Letters(ranges, is_negated, _class(ranges, is_negated)[1:-1])


def _counts(text: str) -> tuple[int, int | None]:
    """Return the least and the largest number of repetitions."""
    if text in _COUNTS:
        return _COUNTS[text]
    low, comma, high = text.strip("{}").partition(",")
    return int(low), int(high) if high.strip() else None if comma else int(low)


def _tokens(grammar: str) -> Iterator[_Token]:
    place = 0
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None:
            got = shown(grammar[place : place + 20].partition("\n")[0])
            raise _error(grammar, place, f"no rule, text, class or operator begins with {got}")
        if found.lastgroup != "blank":
            yield _Token(str(found.lastgroup), found.group(), place)
        place = found.end()


def _written(grammar: str, tokens: list[_Token], names: dict[str, str]) -> Iterator[str]:
    """Yield the parts of a grammar in Lark."""
    opened: list[int] = []
    before = ""
    for kind, text, place in tokens:
        if (before in ("", "rule")) != (kind == ("define" if before else "rule")):
            raise _error(grammar, place, f"expected a rule and ::=, got {shown(text)}")
        if kind == "rule":
            if opened:
                break
            yield f"\n{names[text]}"
        elif kind == "define":
            yield ': ""'
        elif kind == "name":
            if text not in names:
                raise _error(grammar, place, f"the rule {text} is not defined")
            yield f" {names[text]}"
        elif kind == "text":
            letters = [_class([(code, code)], False) for code, _ in _spelled(grammar, place, text)]
            yield f" ({' '.join(letters)})" if letters else ' ("")'
        elif kind == "letters":
            is_negated = text.startswith("[^")
            yield " " + _class(_ranges(grammar, place, text[is_negated:]), is_negated)
        elif kind == "any":
            yield r" /[\s\S]/"
        elif kind == "repeat":
            if before not in _ENDS_OF_ITEMS:
                raise _error(grammar, place, f"{text} follows nothing that can be repeated")
            yield "".join(text.split())
        elif kind == "open":
            opened.append(place)
            yield ' (""'
        elif kind == "close":
            if not opened:
                raise _error(grammar, place, "the parenthesis closes nothing")
            opened.pop()
            yield ")"
        else:
            yield ' | ""'
        before = kind
    if opened:
        raise _error(grammar, opened[-1], "the parenthesis is not closed")
    if before == "rule":
        raise _error(grammar, len(grammar), "expected ::=")


def _spelled(grammar: str, place: int, quoted: str) -> Iterator[tuple[int, bool]]:
    """Yield the code points between two delimiters, and whether a backslash is before each."""
    for found in _LETTER.finditer(quoted, 1, len(quoted) - 1):
        plain = found["c"]
        code = found["x"] or found["u"] or found["U"]
        if code is not None:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise _error(grammar, place + found.start(), f"{found.group()} is no character")
            yield number, True
        elif plain is not None or found.group() == "\\":
            if plain not in _ESCAPES:
                message = f"the escape {found.group()} is unknown"
                raise _error(grammar, place + found.start(), message)
            yield ord(_ESCAPES[plain]), True
        else:
            yield ord(found.group()), False


def _ranges(grammar: str, place: int, text: str) -> list[tuple[int, int]]:
    """Return the ranges of a class of letters."""
    found: list[tuple[int, int]] = []
    letters = list(_spelled(grammar, place, text))
    while letters:
        first, _ = letters.pop(0)
        last = first
        if len(letters) > 1 and letters[0] == (ord("-"), False):
            last, _ = letters[1]
            del letters[:2]
        if last < first:
            raise _error(grammar, place, f"the class {text} has a range that ends before it begins")
        found.append((first, last))
    return found


def _class(ranges: list[tuple[int, int]], is_negated: bool) -> str:
    if not ranges:
        return r"/[\s\S]/" if is_negated else r"/[^\s\S]/"
    parts = (rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
    return f"/[{'^' * is_negated}{''.join(parts)}]/"


def place_in(text: str, offset: int) -> str:
    """Return the line and the column of an offset."""
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


def _error(grammar: str, offset: int, message: str) -> RequestError:
    return RequestError(f"has an error at {place_in(grammar, offset)}: {message}")
