"""Find where a value in a text ends, and read values: JSON, literals, and text of a known type."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

_OPENING, _CLOSING = "{[(", "}])"
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


class JsonEnd:
    """Finds the end of an object, a list or another value. Each character is read once.

    It counts brackets outside of quotes, and checks nothing else.
    """

    def __init__(
        self, start: int = 0, *, quotes: tuple[str, ...] = ('"',), is_value: bool = False
    ) -> None:
        """``start`` is the place of the first bracket, or of the value if it ``is_value``.

        A value ends before a comma, or before a bracket that closes another value.
        """
        self.place = start
        """How far the text was read; after the end, the place behind the value."""
        self._is_value = is_value
        self._depth = 0
        self._quote = ""
        """The quote that is open."""
        # The tags that are looked for, and the pattern that finds a mark, for each open quote.
        self._looks = {"": (quotes, _marks(quotes, is_inside=False))}
        self._looks |= {quote: ((quote,), _marks((quote,), is_inside=True)) for quote in quotes}

    def read(self, text: str) -> bool:
        """Read on in a text that has grown, and return whether the end was found."""
        while True:
            tags, marks = self._looks[self._quote]
            end = len(text) - length_that_begins(text, tags)
            mark = marks.search(text, self.place, end)
            if mark is None:
                self.place = max(self.place, end)
                return False
            found = mark.group()
            if found == "\\":
                if mark.end() == len(text):  # the escaped character is still to come
                    self.place = mark.start()
                    return False
                self.place = mark.end() + 1
                continue
            if self._is_value and self._depth == 0 and found in (",", *_CLOSING):
                self.place = mark.start()
                return True
            self.place = mark.end()
            if found in tags:
                self._quote = "" if self._quote else found
            elif found != ",":
                self._depth += 1 if found in _OPENING else -1
                if self._depth <= 0 and not self._is_value:
                    return True


def _marks(tags: tuple[str, ...], *, is_inside: bool) -> re.Pattern[str]:
    """Return the pattern of characters that change how the text behind them is read."""
    has_escapes = all(len(tag) == 1 for tag in tags)
    more = (r"\\" if has_escapes else "") if is_inside else r"[(){}\[\],]"
    return re.compile("|".join([*map(re.escape, tags), *([more] if more else [])]))


def length_that_begins(text: str, tags: tuple[str, ...]) -> int:
    """Return the length of the end of a text that may begin one of the tags."""
    kept = 0
    for tag in tags:
        most = min(len(tag) - 1, len(text))
        lengths = (n for n in range(most, kept, -1) if text.endswith(tag[:n]))
        kept = next(lengths, kept)
    return kept


def json_value(text: str) -> Any:
    """Return the value of a JSON text, or None if it is none."""
    try:
        return _loaded(text)
    except (ValueError, RecursionError):
        return None


def _loaded(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def json_text(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. An escape of half a character stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isprintable() or _is_unicode(text) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def literal_value(text: str, quotes: tuple[str, ...]) -> tuple[Any] | None:
    """Return the value of a literal in a tuple, or None if it is none.

    A literal is JSON in which text may have other ``quotes``, keys may have none, and Python's
    words and tuples may stand.
    """
    try:
        return (_loaded("".join(_as_json(text, quotes))),)
    except (ValueError, RecursionError):
        return None


def _as_json(text: str, quotes: tuple[str, ...]) -> Iterator[str]:
    """Yield the tokens of a literal as JSON has them.

    Raises:
        ValueError: a quote does not end.
    """
    for found in _tokens(quotes).finditer(text):
        token = found.group()
        quote = next((quote for quote in quotes if token.startswith(quote)), "")
        if quote and len(token) == len(quote):  # looking for its end again and again takes long
            raise ValueError(f"{quote} does not end")
        if quote:
            inside = token[len(quote) : -len(quote)]
            yield json.dumps(_unescaped(inside) if len(quote) == 1 else inside)
        elif found["key"]:
            yield json.dumps(token)
        elif found["word"]:
            yield _WORDS.get(token, token)
        else:
            yield {"(": "[", ")": "]"}.get(token, token)


def _tokens(quotes: tuple[str, ...]) -> re.Pattern[str]:
    texts = [
        rf"{quote}(?:[^{quote}\\]|\\.)*{quote}"
        if len(quote) == 1
        else f"{re.escape(quote)}.*?{re.escape(quote)}"
        for quote in quotes
    ]
    rest = r"(?P<key>[^\W\d][\w.$-]*(?=\s*:))|(?P<word>[^\W\d]\w*)|."
    return re.compile("|".join([*texts, rest]), re.DOTALL)


def _unescaped(text: str) -> str:
    def character(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) > 1:
            code = int(escape[1:], 16)
            return chr(code) if code <= 0x10FFFF else found[0]
        return _ESCAPED.get(escape, escape if escape in "\\/'\"" else found[0])

    return _ESCAPE.sub(character, text)


def typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return the value that a text means as an argument of a tool with this ``schema``.

    It is text if the schema allows only text or names no type, or if the text is no other value.
    """
    types = types_of(schema.get("properties", {}).get(key), schema)
    others = types - {"string"}
    value = literal_value(text.strip(), ('"', "'")) if others else None
    if value is None:
        return text
    kinds = _TYPES.get(type(value[0]), ())
    if isinstance(value[0], float) and value[0].is_integer():
        kinds = ("integer", "number")
    return value[0] if others.intersection(kinds) else text


_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
    str: ("string",),
}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows, or none if it names no type.

    ``root`` has the definitions that the schema refers to.
    """
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    found = schema.get("type")
    if found is not None:
        return frozenset([found] if isinstance(found, str) else found)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return frozenset(name for value in values for name in _TYPES.get(type(value), ()))
    inner = [resolved(schema, root)] if "$ref" in schema else []
    for key in ("anyOf", "oneOf", "allOf"):
        inner += schema.get(key, [])
    return frozenset().union(*(types_of(each, root, depth + 1) for each in inner))


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the definition that ``$ref`` names in the same document, or None."""
    place: Any = root
    for name in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place
