"""Check the fields of an event log, which may come from an untrusted file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mie.errors import TraceError, shown

MAX_INTEGER = 2**63 - 1
"""Largest id or count: a signed 64-bit integer."""

MAX_NUMBER = 1e15
"""Largest count or time in a summary: integers up to here are exact as floats."""

MAX_BLOCK_SIZE = 1 << 16
MAX_CHOICES = 1 << 10
MAX_WORD = 100
"""Maximum number of characters in a reason, a rule, a mode or a cause."""


def checked(fields: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields called ``names``, with tuples in place of JSON's lists.

    Raises:
        TraceError: a field is missing or has the wrong shape.
    """
    if not isinstance(fields, dict):
        raise TraceError(f"{shown(fields)} is not an object")
    return {name: _checked(fields, name) for name in names}


def check_numbers(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `TraceError` unless the fields called ``names`` are numbers in 0 … `MAX_NUMBER`."""
    for name in names:
        value = fields.get(name)
        if not isinstance(value, (int, float)) or not 0 <= value <= MAX_NUMBER:
            raise TraceError(f"{name} is {shown(value)}, not a number in 0 … {MAX_NUMBER:.0f}")


def _checked(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise TraceError(f"{name} is missing")
    value = fields[name]
    if isinstance(value, list):
        value = tuple(value)
    if not any(fits(value) for fits in _SHAPES.get(name, (_is_integer,))):
        raise TraceError(f"{name} cannot be {shown(value)}")
    return value


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _is_block_size(value: object) -> bool:
    return _is_integer(value) and 1 <= value <= MAX_BLOCK_SIZE  # type: ignore[operator]


def _is_number_of_choices(value: object) -> bool:
    return _is_integer(value) and 1 <= value <= MAX_CHOICES  # type: ignore[operator]


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= MAX_WORD


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_none(value: object) -> bool:
    return value is None


def _is_integers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_integer, value))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_integers(value)


_SHAPES: Mapping[str, tuple[Callable[[object], bool], ...]] = MappingProxyType(
    {
        **dict.fromkeys(("mode", "rule", "reason", "cause"), (_is_word,)),
        "request_id": (_is_text,),
        "block_size": (_is_block_size,),
        "n": (_is_number_of_choices,),
        **dict.fromkeys(("max_tokens", "source", "row"), (_is_integer, _is_none)),
        **dict.fromkeys(("choices", "rows", "blocks", "tokens"), (_is_integers,)),
        "host": (_is_integers, _is_none),
        "salt": (_is_text, _is_none),
        "seq": (_is_pair,),
        "by": (_is_pair, _is_none),
        "parent": (_is_integer, _is_pair, _is_none),  # of a block, or of a forked sequence
    }
)
"""The allowed shapes of a field, one of which must fit. Fields not listed are integers."""
