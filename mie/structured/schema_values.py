"""Check the numbers of a JSON schema."""

from collections.abc import Collection
from decimal import Decimal
from fractions import Fraction
from typing import Any

from mie.errors import RequestError, shown

_EXACT = 2**53
"""Integers up to this size are exact in the floats in which llguidance keeps numbers."""
_BOUNDS_END = 10**18
_LARGEST = 2**63 - 1
_SMALLEST = 1e-100
_COUNTS_END = 2**31
"""No answer is as long, so a maximum from here on has no effect."""
_MULTIPLES_END = 2**32

BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""Bounds of numbers, and the side on which they are."""
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def check_value(name: str, value: Any) -> None:
    """Check the numbers of a constant.

    Raises:
        RequestError: llguidance would write another number.
    """
    left = [value]
    for each in left:
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
        elif isinstance(each, (int, float)) and not _is_kept(each):
            raise _changed(name, each, "a string")


def checked_bound(name: str, value: Any, *, is_integer: bool) -> tuple[str, Any]:
    """Return a bound of numbers as llguidance can keep it, exactly.

    A float beyond 2**53 that all smaller numbers keep is written as 2**53.

    Raises:
        RequestError: it cannot be kept exactly.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"has {name} {shown(value)}; it must be a number")
    if is_integer and isinstance(value, int):
        if name.startswith("exclusive"):
            name = name.removeprefix("exclusive").lower()
            value -= BOUNDS[name]
        is_kept = abs(value) < _BOUNDS_END and _is_exact(value)
        if not is_kept and (name, value) != ("maximum", _LARGEST):
            raise _changed(name, value, f"a bound up to {_EXACT}")
    elif abs(value) > _EXACT:
        if isinstance(value, int) or (value > 0) != (BOUNDS[name] > 0):
            raise _changed(name, value, f"a bound up to {_EXACT}")
        value = BOUNDS[name] * _EXACT
    elif 0 < abs(value) < _SMALLEST:
        raise _changed(name, value, "0")
    return name, value


def checked_count(name: str, value: Any) -> int | None:
    """Return a number of characters, items or properties, or None if it has no effect.

    Raises:
        RequestError: it is no such number, or no answer reaches it.
    """
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 0:
        raise RequestError(f"has {name} {shown(value)}; it must be a whole number from 0 on")
    is_minimum = name.startswith("min")
    if value < _COUNTS_END:
        return None if is_minimum and value == 0 else int(value)
    if is_minimum:
        raise RequestError(f"has {name} {shown(value)}, which no answer reaches")
    return None


def check_multiples(multiples: Collection[Fraction]) -> None:
    """Refuse several multiples of one number if llguidance cannot compute a common one."""
    product = 1
    places = max((_places(each) for each in multiples), default=0)
    for each in multiples:
        product *= int(each * 10**places)
    if len(multiples) > 1 and product >= _MULTIPLES_END:
        raise RequestError(
            "has several multipleOf for one number, with too large a product (write their least "
            "common multiple)"
        )


def multiple_in(schema: dict[str, Any]) -> Fraction | None:
    """Return the number of ``multipleOf`` in a schema.

    Raises:
        RequestError: it is too large for llguidance.
    """
    value = schema.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None  # llguidance names the error
    if not 0 < abs(value) < _MULTIPLES_END:
        raise RequestError(
            f"has multipleOf {shown(value)}; it must be above 0 and below {_MULTIPLES_END}"
        )
    return abs(Fraction(repr(value)))


def _places(value: Fraction) -> int:
    exponent = Decimal(value.numerator) / Decimal(value.denominator)
    return max(0, -int(exponent.normalize().as_tuple().exponent))


def _is_kept(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= _LARGEST and _is_exact(value)
    return abs(value) <= _EXACT or Decimal(repr(value)) == Decimal(value)


def _is_exact(value: int) -> bool:
    return int(float(value)) == value


def _changed(name: str, value: Any, remedy: str) -> RequestError:
    return RequestError(
        f"has {name} {shown(value)}, which llguidance would change because it keeps numbers as "
        f"floats (write {remedy})"
    )
