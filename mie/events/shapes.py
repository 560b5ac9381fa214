"""What a field of the event log may hold, for reading a file that anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mie.errors import TraceError


def checked(fields: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields called ``names``, with tuples for JSON's lists.

    Raises:
        TraceError: one is missing, or of another shape.
    """
    if not isinstance(fields, dict):
        raise TraceError(f"{fields!r} is not an object")
    return {name: _checked(fields, name) for name in names}


def check_numbers(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `TraceError` unless the fields called ``names`` are finite numbers."""
    for name in names:
        value = fields.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TraceError(f"{name} is {value!r}, not a number")


def _checked(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise TraceError(f"{name} is missing")
    value = fields[name]
    if isinstance(value, list):
        value = tuple(value)
    if not any(fits(value) for fits in _SHAPES.get(name, (_is_integer,))):
        raise TraceError(f"{name} cannot be {value!r}")
    return value


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_none(value: object) -> bool:
    return value is None


def _is_integers(value: object) -> bool:
    return isinstance(value, tuple) and all(type(item) is int for item in value)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_integers(value)


_SHAPES: Mapping[str, tuple[Callable[[object], bool], ...]] = MappingProxyType(
    {
        **dict.fromkeys(("request_id", "mode", "rule", "reason", "cause"), (_is_text,)),
        **dict.fromkeys(("max_tokens", "source", "row"), (_is_integer, _is_none)),
        **dict.fromkeys(("choices", "rows", "blocks", "tokens"), (_is_integers,)),
        "host": (_is_integers, _is_none),
        "salt": (_is_text, _is_none),
        "seq": (_is_pair,),
        "by": (_is_pair, _is_none),
        "parent": (_is_integer, _is_pair, _is_none),  # of a block, or of a forked sequence
    }
)
"""One of these must fit; what is not listed is an integer."""
