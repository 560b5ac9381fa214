"""JSON schemas as grammars need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPACT: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}
"""Options of llguidance for JSON without whitespace."""

_SCHEMAS = {"$defs", "definitions", "properties", "patternProperties"} | {
    *("allOf", "anyOf", "oneOf", "prefixItems"),
}
"""Keywords whose value is a mapping or a list of schemas."""


def close(schema: Any) -> None:
    """Forbid further properties if a schema names some and does not mention others."""
    if not isinstance(schema, dict):
        return
    for name in _SCHEMAS & schema.keys():
        inner = schema[name]
        for each in inner.values() if isinstance(inner, dict) else _listed(inner):
            close(each)
    for name in ("items", "additionalProperties"):
        close(schema.get(name))
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)


def _listed(value: Any) -> list[Any]:
    """Return a list, or nothing for a value that is no list, which the library refuses."""
    return value if isinstance(value, list) else []
