"""Convert the values of parameters to plain numbers, strings, tuples and dicts.

Each function raises `ConfigError` with the name, the value and the range. Lists are read only up to
their limit, so an endless iterator is refused as quickly as a long list.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import Any

from mie.errors import ConfigError, shown

MAX_INTEGER = 2**63 - 1
"""Highest value of an integer that has no lower limit of its own.

Array libraries, clients and metrics have no larger integers, and a float can hold this one.
"""


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an ``int`` in low … high. Bools and floats are refused.

    Without a ``high``, the limit is `MAX_INTEGER`.
    """
    number: int | None = _converted(int, Integral, value)
    most = MAX_INTEGER if high is None else high
    if number is None or not low <= number <= most:
        is_too_large = number is not None and number > most
        is_open = high is None and not is_too_large
        allowed = f"at least {low}" if is_open else f"in {low} … {most}"
        raise ConfigError(f"{name} must be an integer {allowed}; got {shown(value)}")
    return number


def real(
    name: str, value: Any, low: float, high: float = math.inf, *, above_low: bool = False
) -> float:
    """Return ``value`` as a finite ``float`` in low … high, or above low. Bools are refused."""
    number: float | None = _converted(float, Real, value)
    if (
        number is None
        or not low <= number <= high
        or math.isinf(number)
        or (above_low and number == low)
    ):
        bracket = "(" if above_low else "["
        allowed = f"in {bracket}{low:g}, {high:g}]".replace("inf]", "inf)")
        raise ConfigError(f"{name} must be a number {allowed}; got {shown(value)}")
    return number


def _converted(kind: Any, abstract: type, value: Any) -> Any:
    """Return kind(value), or None if ``value`` is not such a number."""
    if not isinstance(value, abstract) or isinstance(value, bool):
        return None
    try:
        return kind(value)
    except (ArithmeticError, TypeError, ValueError):  # Too large for a float, or NaT.
        return None


def items(name: str, value: Any, kind: str, limit: int) -> tuple[Any, ...]:
    """Return the items of ``value``, at most ``limit``. ``kind`` names the allowed values."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    try:
        iterator = iter(value) if is_list else None
    except TypeError:  # an array without dimensions
        iterator = None
    if iterator is None:
        raise ConfigError(f"{name} must be {kind}; got {shown(value)}")
    found = tuple(islice(iterator, limit + 1))
    if len(found) > limit:
        raise ConfigError(f"{name} may have at most {limit} entries; got more")
    return found


def token_ids(name: str, value: Any, limit: int, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """Return a list of token ids as a tuple of ``int``."""
    ids = items(name, value, "a list of token ids", limit)
    if not ids and not may_be_empty:
        raise ConfigError(f"{name} must name at least one token, or be None; got an empty list")
    if set(map(type, ids)) <= {int} and _are_ids(ids):
        return ids  # a fast path, because there may be a million
    each = f"each of {name}"
    return tuple([integer(each, token_id, 0) for token_id in ids])


def _are_ids(numbers: Sequence[int]) -> bool:
    """Return whether integers may be ids of tokens in some vocabulary."""
    return min(numbers, default=0) >= 0 and max(numbers, default=0) <= MAX_INTEGER


def strings(
    name: str, value: Any, limit: int, max_chars: int, *, kind: str = "a list of strings"
) -> tuple[str, ...]:
    """Return a list of strings of 1 … ``max_chars`` characters as a tuple."""
    found = items(name, value, kind, limit)
    for string in found:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"each of {name} must be a non-empty string; got {shown(string)}")
        if len(string) > max_chars:
            raise ConfigError(
                f"each of {name} may have at most {max_chars} characters; got {len(string)}"
            )
    return tuple(map(str, found))


def biases(name: str, value: Any, limit: int, most: float) -> dict[int, float]:
    """Return a mapping from token ids to numbers in -most … most as a ``dict``.

    Ids may be strings of digits, because JSON has no other keys and clients of OpenAI's API send
    them.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map token ids to numbers; got {shown(value)}")
    bias: dict[int, float] = {}
    keys = items(name, iter(value), "a mapping", limit)
    numbers = list(map(value.__getitem__, keys))
    is_plain = set(map(type, keys)) <= {int} and set(map(type, numbers)) <= {float}
    if is_plain and _are_ids(keys) and all(-most <= x <= most for x in numbers):
        return dict(zip(keys, numbers, strict=True))  # a fast path, because there may be a million
    for key, number in zip(keys, numbers, strict=True):
        is_number = isinstance(key, str) and key.isdecimal() and len(key) < 20
        token_id = _converted(int, Integral, int(key) if is_number else key)
        if token_id is None or not _are_ids((token_id,)):
            raise ConfigError(f"{name} must have token ids as keys; got {shown(key)}")
        bias[token_id] = real(f"{name} of token {token_id}", number, -most, most)
    return bias
