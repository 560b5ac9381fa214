"""Check the numbers of a JSON schema, and write its texts with patterns that llguidance has."""

import re
from collections.abc import Collection, Iterator
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


# Texts

_KNOWN_FORMATS = {"hostname", "ipv4", "ipv6", "uri", "email"}
"""Formats that llguidance enforces, and that need no other pattern."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_N = "[0-9]{1,5}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HEX = "[0-9a-fA-F]"
_IP = {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}


def _matching(expression: str) -> dict[str, Any]:
    return {"pattern": f"^(?:{expression})$"}


_FORMATS: dict[str, dict[str, Any]] = {
    "date": _matching(_DATE),
    "time": _matching(_TIME),
    "date-time": _matching(f"{_DATE}T{_TIME}"),
    "duration": _matching(f"P(?:{_N}W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})"),
    **{f"ipvany{kind}": _IP for kind in ("address", "interface", "network")},
    **{
        f"{ip}{kind}": {"format": ip}
        for ip in ("ipv4", "ipv6")
        for kind in ("interface", "network")
    },
    "uuid": _matching(f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"),
    **{
        f"uuid{version}": _matching(
            f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"
        )
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
}
"""Schemas in place of formats: formats of llguidance with texts that clients' libraries
refuse (days that do not exist, the year 0, second 60, amounts without limit), and pydantic's own.
"""

_SECONDS = r"\d+([.,]\d+)?S"
_ZOD_CLOCK = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_EQUAL_PATTERNS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$": r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$":
    rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_ZOD_CLOCK})?"
    rf"|{_ZOD_CLOCK})$",
}  # fmt: skip
"""Patterns that zod writes, and equal ones without look-ahead."""


def text_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return schemas that together are a schema's ``format`` and ``pattern``.

    A format that is not known is an annotation, as JSON Schema says.
    """
    pattern, form = schema.get("pattern"), schema.get("format")
    if "pattern" in schema:
        if not isinstance(pattern, str):
            raise RequestError(f"has a pattern that is not a string: {shown(pattern)}")
        for each in _without_look_ahead(_EQUAL_PATTERNS.get(pattern, pattern)):
            yield {"pattern": each}
    if not isinstance(form, str):
        if "format" in schema:
            raise RequestError(f"has a format that is not a string: {shown(form)}")
    elif form in _KNOWN_FORMATS:
        yield {"format": form}
    elif form in _FORMATS:
        yield dict(_FORMATS[form])


_AHEAD = "^(?="
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)


def _without_look_ahead(pattern: str) -> Iterator[str]:
    """Return patterns that a text must match, without look-ahead at their beginning."""
    while pattern.startswith(_AHEAD):
        depth, end = 1, 0
        for found in _CLASS_OR_ESCAPE.finditer(pattern, len(_AHEAD)):
            depth += {"(": 1, ")": -1}.get(found.group(), 0)
            if depth == 0:
                end = found.end()
                break
        if not end:
            break
        rest = pattern[end:]
        if rest[:1] and rest[0] in "*+?{":
            break
        if _has_alternatives(rest):
            break
        yield f"^(?:{pattern[len(_AHEAD) : end - 1]})"
        pattern = "^" + rest
    yield pattern


def _has_alternatives(expression: str) -> bool:
    """Return whether a bar divides the whole expression."""
    depth = 0
    for found in re.finditer(_CLASS_OR_ESCAPE.pattern + r"|\|", expression, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if found.group() == "|" and depth == 0:
            return True
    return False
