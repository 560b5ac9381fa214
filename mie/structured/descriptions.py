"""Write descriptions of outputs as grammars for llguidance."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mie.config.params.structured import COMPACT, StructuredOutputsParams
from mie.errors import RequestError, install_command
from mie.structured.schemas import rewritten
from mie.structured.unique_items import plan_of


class Salted(NamedTuple):
    """A description with the cache salt of its request.

    Only requests with equal salts can notice that one of them has sent the description before.
    """

    params: StructuredOutputsParams
    salt: str | None = None


def kind_of(params: StructuredOutputsParams) -> str:
    """Return the name of a description in messages."""
    names = {"regex": params.regex, "choice": params.choice, "grammar": params.grammar}
    return next((name for name, value in names.items() if value is not None), "json schema")


def grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar for llguidance. A hostile description can make this slow.

    Raises:
        RequestError: llguidance is not installed, or the description cannot be followed. Then the
            message continues the kind of the description.
    """
    matchers = library().LLMatcher
    is_closed = params.disable_additional_properties
    if params.regex is not None:
        return str(matchers.grammar_from_regex(params.regex))
    if params.choice is not None:
        # An upper-case name makes one lexeme of all. A lexeme has no limit of alternatives.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return str(matchers.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"))
    if params.grammar is not None:
        return str(matchers.grammar_from_lark(_lark(params.grammar, is_closed=is_closed)))
    schema = json.loads('{"type": "object"}' if params.json_object else str(params.json))
    schema = rewritten(schema, is_closed=is_closed, without_unique=True)
    return str(matchers.grammar_from_json_schema(schema, overrides=_json_options(params)))


def unique_items_of(params: StructuredOutputsParams) -> list[Mapping[str, Any]]:
    """Return the plan of the lists with different items, which is empty if there are none."""
    if params.json is None:
        return []
    return plan_of(json.loads(str(params.json)), is_closed=params.disable_additional_properties)


def _lark(grammar: str, *, is_closed: bool) -> str:
    """Return a grammar in llguidance's dialect of Lark, converted from GBNF if it is that."""
    from llguidance import gbnf_to_lark

    if "::=" not in grammar or gbnf_to_lark.is_lark_syntax(grammar):
        return _with_rewritten_schemas(grammar, is_closed)
    try:
        return str(gbnf_to_lark.gbnf_to_lark(grammar))
    except RecursionError:
        raise RequestError("is GBNF that nests too deep") from None
    except Exception as error:  # the library raises Exception itself
        raise RequestError(f"is no GBNF that can be read: {error}") from error


_SCHEMA_OR_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*')


def _with_rewritten_schemas(lark: str, is_closed: bool) -> str:
    """Return a grammar with its JSON schemas rewritten like the schemas of requests."""
    parts = []
    place = 0
    while found := _SCHEMA_OR_TEXT.search(lark, place):
        end = found.end()
        parts.append(lark[place:end])
        if found.group().startswith("%json"):
            try:
                schema, end = json.JSONDecoder().raw_decode(lark, end)
            except (ValueError, RecursionError):
                schema = None  # llguidance names the error
            if isinstance(schema, dict):
                options = schema.get("x-guidance", {})
                schema = rewritten(schema, is_closed=is_closed)
                if isinstance(options, dict):
                    schema["x-guidance"] = {**options, **_STRICT}
                parts.append(json.dumps(schema))
            else:
                parts.append(lark[found.end() : end])
        place = end
    return "".join([*parts, lark[place:]])


_STRICT: Mapping[str, Any] = {"lenient": False, "coerce_one_of": False}
"""Options of llguidance that let it ignore nothing."""


def _json_options(params: StructuredOutputsParams) -> Any:
    if params.whitespace_pattern is not None:
        return {**_STRICT, "whitespace_pattern": params.whitespace_pattern}
    return {
        **_STRICT,
        **(COMPACT if params.disable_any_whitespace else {"whitespace_flexible": True}),
    }


def library() -> Any:
    """Return llguidance, or raise `RequestError` if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs llguidance, which is not installed "
            f"({install_command('structured')})"
        ) from error
    return llguidance
