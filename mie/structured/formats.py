"""Write formats and patterns of a JSON schema with patterns that llguidance has."""

import re
from collections.abc import Iterator
from typing import Any

from mie.errors import RequestError, shown

_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)
_SET_OPERATOR = re.compile(r"\\.|[\[&~]", re.DOTALL)
_FROM_NUL = re.compile(r"\\(?:x00|u0000|0)-")


def with_rust_classes(pattern: str) -> str:
    """Return a pattern with classes of characters as llguidance must have them.

    Brackets, ``&&`` and ``~~`` in a class are characters, as in ECMA-262, and not Rust's sets. A
    class with all control characters loses U+0000. With it, llguidance 1.9 would also allow quotes
    and backslashes, even if the class excludes them.
    """
    return _CLASS_OR_ESCAPE.sub(_rust_class, pattern)


def _rust_class(found: re.Match[str]) -> str:
    text = found.group()
    if text[0] != "[":
        return text
    is_negated = text.startswith("[^")
    body = text[1 + is_negated : -1]
    if body[:1] in ("]", "-"):
        body = "\\" + body
    body = _SET_OPERATOR.sub(lambda each: "\\" * (len(each.group()) == 1) + each.group(), body)
    return rf"[^\x00{body}]" if is_negated else "[" + _FROM_NUL.sub(r"\\x01-", body) + "]"


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
    return {"pattern": with_rust_classes(f"^(?:{expression})$")}


def _addresses(letters: str) -> tuple[str, str]:
    """Return the expressions of absolute and of relative addresses (RFC 3986, appendix A).

    ``letters`` are the characters beside ASCII. Addresses of IPv6 are left out.
    """
    plain, escaped = rf"A-Za-z0-9._~\-!$&'()*+,;={letters}", f"%{_HEX}{{2}}"
    character = f"(?:[{plain}:@]|{escaped})"
    name = f"(?:[{plain}]|{escaped})*"
    host = f"(?:(?:[{plain}:]|{escaped})*@)?{name}(?::[0-9]{{0,4}}|:[1-5][0-9]{{4}})?"
    segments = f"(?:/{character}*)*"
    rooted = f"//{host}{segments}|/(?:{character}+{segments})?"
    first = f"(?:[{plain}@]|{escaped})+"  # a relative address has no colon before a slash
    rest = rf"(?:\?(?:{character}|[/?])*)?(?:#(?:{character}|[/?])*)?"
    scheme = r"[A-Za-z][A-Za-z0-9+.\-]*"
    return (
        f"{scheme}:(?:{rooted}|{character}+{segments}|){rest}",
        f"(?:{rooted}|{first}{segments}|){rest}",
    )


_UNICODE = "".join(
    f"{chr(first)}-{chr(last)}"
    for first, last in [(0xA0, 0xD7FF), (0xF900, 0xFDCF), (0xFDF0, 0xFFEF)]
    + [(plane, plane + 0xFFFD) for plane in range(0x10000, 0xE0000, 0x10000)]
)  # ucschar of RFC 3987
_IRI, _IRI_RELATIVE = _addresses(_UNICODE)
_, _URI_RELATIVE = _addresses("")
_POINTER = "(?:/(?:[^/~]|~[01])*)*"  # RFC 6901
_VARIABLE = rf"(?:[A-Za-z0-9_]|%{_HEX}{{2}})+"
_VARIABLES = rf"{_VARIABLE}(?:[.]{_VARIABLE})*(?:[*]|:[1-9][0-9]{{0,3}})?"
_TEMPLATE = (  # RFC 6570
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_UNICODE}]|%{_HEX}{{2}}"
    rf"|\{{[+#./;?&]?{_VARIABLES}(?:,{_VARIABLES})*\}})*"
)


def _expressions(depth: int) -> str:
    """Return an expression of regular expressions with groups that nest to a depth.

    ECMA-262, section 22.2.1, without look-around, back references and ranges but those below.
    """
    escape = r"\\[dDwWsSnrtfv^$.*+?()\[\]{}|/\\]"
    inner = rf"(?:[^\\\[\]^\-]|a-z|A-Z|0-9|a-f|A-F|{escape})"
    atom = rf"[^\\^$.*+?()\[\]{{}}|]|\.|{escape}|\[\^?{inner}+-?\]"
    if depth:
        atom += rf"|\((?:\?:)?{_expressions(depth - 1)}\)"
    pairs = "|".join(f"{low},[{low}-9]" for low in range(10))
    count = rf"\{{(?:[0-9]{{1,3}},?|{pairs}|[0-9],[1-9][0-9]{{1,2}})\}}"
    term = rf"(?:[\^$]|\\[bB]|(?:{atom})(?:(?:[*+?]|{count})\??)?)"
    return rf"{term}*(?:\|{term}*)*"


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
    "uri-reference": {"anyOf": [{"format": "uri"}, _matching(_URI_RELATIVE)]},
    "iri": _matching(_IRI),
    "iri-reference": _matching(f"{_IRI}|{_IRI_RELATIVE}"),
    "uri-template": _matching(_TEMPLATE),
    "json-pointer": _matching(_POINTER),
    "relative-json-pointer": _matching(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "regex": _matching(_expressions(2)),
    "idn-hostname": {"format": "hostname"},
    "idn-email": {"format": "email"},
    "uuid": _matching(f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"),
    **{
        f"uuid{version}": _matching(
            f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"
        )
        for version in (1, 3, 4, 5, 6, 7, 8)
    },
}
"""Schemas in place of formats.

Some are formats of llguidance that have texts that clients' libraries refuse: days that do not
exist, the year 0, second 60, amounts without limit. Others are the standard's formats that
llguidance does not have, with most of their texts, and pydantic's own.
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


def is_enforced(form: str) -> bool:
    """Return whether a format is more than an annotation."""
    return form in _KNOWN_FORMATS or form in _FORMATS


def text_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return schemas that together are a schema's ``format`` and ``pattern``.

    An unknown format is an annotation, by JSON Schema.
    """
    pattern, form = schema.get("pattern"), schema.get("format")
    if "pattern" in schema:
        if not isinstance(pattern, str):
            raise RequestError(f"has a pattern that is not a string: {shown(pattern)}")
        for each in _without_look_ahead(_EQUAL_PATTERNS.get(pattern, pattern)):
            yield {"pattern": with_rust_classes(each)}
    if not isinstance(form, str):
        if "format" in schema:
            raise RequestError(f"has a format that is not a string: {shown(form)}")
    elif form in _KNOWN_FORMATS:
        yield {"format": form}
    elif form in _FORMATS:
        yield dict(_FORMATS[form])


_AHEAD = "^(?="


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
