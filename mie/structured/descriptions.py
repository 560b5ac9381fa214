"""Write descriptions of outputs as grammars for llguidance."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from mie.config.params.structured import StructuredOutputsParams
from mie.errors import RequestError, shown


class Salted(NamedTuple):
    """A description with the cache salt of its request.

    Only requests with equal salts can notice that one of them has sent the description before.
    """

    params: StructuredOutputsParams
    salt: str | None = None


COMPACT: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}
"""Options of llguidance for JSON without whitespace."""

_SCHEMAS = {"$defs", "definitions", "properties", "patternProperties"} | {
    *("allOf", "anyOf", "oneOf", "prefixItems")
}
"""Keywords whose value is a mapping or a list of schemas."""


def kind_of(params: StructuredOutputsParams) -> str:
    """Return the name of a description in messages."""
    names = {"regex": params.regex, "choice": params.choice, "grammar": params.grammar}
    return next((name for name, value in names.items() if value is not None), "json schema")


def grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar for llguidance.

    Raises:
        RequestError: llguidance is not installed, or a number is too large for it.
    """
    matchers = library().LLMatcher
    if params.regex is not None:
        return str(matchers.grammar_from_regex(params.regex))
    if params.choice is not None:
        # An upper-case name makes one lexeme of all, which has no limit of alternatives.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return str(matchers.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if params.grammar is not None:
        return str(matchers.grammar_from_lark(params.grammar))
    schema = json.loads('{"type": "object"}' if params.json_object else str(params.json))
    if params.disable_additional_properties:
        close(schema)
    _check_numbers(schema)
    return str(matchers.grammar_from_json_schema(schema, overrides=_json_options(params)))


def _check_numbers(schema: Any) -> None:
    """Refuse integers that the library cannot hold, by name and wherever they are."""
    values = [("", schema)]
    for name, value in values:
        if isinstance(value, dict):
            values += value.items()
        elif isinstance(value, list):
            values += [(name, each) for each in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise RequestError(
                f"structured_outputs has a json schema that cannot be followed: {shown(name)} is "
                f"{shown(value)}; integers may be in -2**63 … 2**64 - 1"
            )


def _json_options(params: StructuredOutputsParams) -> Any:
    strict = {"lenient": False, "coerce_one_of": False}  # regardless of a schema's x-guidance
    if params.whitespace_pattern is not None:
        return {**strict, "whitespace_pattern": params.whitespace_pattern}
    return {
        **strict,
        **(COMPACT if params.disable_any_whitespace else {"whitespace_flexible": True}),
    }


def library() -> Any:
    """Return llguidance, or raise `RequestError` if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed (pip install "
            "'mie[structured]')"
        ) from error
    return llguidance


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
