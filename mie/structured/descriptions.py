"""Write descriptions of outputs as grammars for llguidance."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from mie.config.params.structured import COMPACT, JSON_OPTIONS, StructuredOutputsParams
from mie.errors import ConfigError, RequestError, install_command
from mie.structured.ebnf import is_ebnf, lark_of_ebnf, place_in
from mie.structured.limits import PLACE_SECONDS
from mie.structured.references import References
from mie.structured.schemas import rewritten
from mie.structured.structural_tags import TagWriter
from mie.structured.unique_items import plan_of
from mie.text.tools.definitions import input_grammar_of


class Salted(NamedTuple):
    """A description with the cache salt of its request.

    Only requests with equal salts can notice that one of them has sent the description before.
    """

    params: StructuredOutputsParams
    salt: str | None = None


def kind_of(params: StructuredOutputsParams) -> str:
    """Return the name of a description in messages."""
    kinds = ("regex", "choice", "grammar", "structural_tag")
    return next((kind for kind in kinds if getattr(params, kind) is not None), "json schema")


def grammar_of(params: StructuredOutputsParams, eos_token_ids: Sequence[int] = ()) -> str:
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
    if params.structural_tag is not None:
        return _tag_writer(params, eos_token_ids).grammar(json.loads(str(params.structural_tag)))
    schema = json.loads('{"type": "object"}' if params.json_object else str(params.json))
    return _json_grammar(params, schema, schema)


def _json_grammar(params: StructuredOutputsParams, root: Any, part: Any) -> str:
    """Return the grammar of a part of a schema."""
    is_closed = params.disable_additional_properties
    schema = rewritten(root, is_closed=is_closed, without_unique=True, part=part)
    written = library().LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(params))
    return str(written)


def unique_items_of(params: StructuredOutputsParams) -> list[Mapping[str, Any]]:
    """Return the plan of lists with different items and objects with different names.

    It is empty if there are none.
    """
    if params.json is None:
        return []
    root = json.loads(str(params.json))
    places = plan_of(root, is_closed=params.disable_additional_properties)
    if places and params.whitespace_pattern is not None:
        raise RequestError(
            "uses 'uniqueItems' or 'minProperties' beside whitespace_pattern, which is not "
            "supported (leave one of them out)"
        )
    return places


def place_of(
    params: StructuredOutputsParams, error: str, error_of: Callable[[str], str]
) -> str | None:
    """Return the JSON pointer of the innermost part of a schema that has the whole's error.

    For a structural tag, it returns the function with the error in its schema.
    ``error_of`` compiles a grammar and returns the library's error, or an empty text. The search
    ends after `PLACE_SECONDS` of CPU time.
    """
    end = time.thread_time() + PLACE_SECONDS
    if params.structural_tag is not None:
        with suppress(RequestError, ValueError, TypeError, KeyError):  # of a caller's own tag
            return _place_in_calls(json.loads(str(params.structural_tag)), error, error_of, end)
        return None
    if params.json is None:
        return None
    root = json.loads(str(params.json))
    references = References(root)
    innermost, seen = root, {id(root)}
    with suppress(RequestError):  # something that is no part refers to nothing
        left = list(references.parts(root))
        while left and time.thread_time() < end:
            part = left.pop(0)
            if id(part) not in seen and _has_error(params, root, part, error, error_of):
                innermost, left = part, list(references.parts(part))
            seen.add(id(part))
    return references.pointer(innermost)


def _place_in_calls(tag: Any, error: str, error_of: Callable[[str], str], end: float) -> str | None:
    """Return the function or the custom tool that has an error, if the grammar has calls."""
    left = [tag]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict) and part.get("type") == "grammar" and part.get("places"):
            calls = _with_rewritten_schemas(str(part["grammar"]), True).split("\n")[1:]
            for place, call in zip(list(part["places"]), calls, strict=False):
                if time.thread_time() > end:
                    return None
                _, found, schema = call.partition(" %json ")
                if found:
                    schema, _ = json.JSONDecoder().raw_decode(schema)
                    alone = error_of(json.dumps({"grammars": [{"json_schema": schema}]}))
                    if alone and alone.partition("\n")[0] in error:
                        return str(place)
            for name, lark in dict(part.get("inputs") or {}).items():
                if time.thread_time() < end and error_of(
                    library().LLMatcher.grammar_from_lark(lark)
                ):
                    return input_grammar_of(name)
        elif isinstance(part, dict):
            left += [] if part.get("type") == "json_schema" else part.values()
    return None


def _has_error(
    params: StructuredOutputsParams,
    root: Any,
    part: Any,
    error: str,
    error_of: Callable[[str], str],
) -> bool:
    try:
        found = error_of(_json_grammar(params, root, part))
    except RequestError:
        return False
    return found.partition("\n")[0] == error.partition("\n")[0]


def _tag_writer(params: StructuredOutputsParams, eos_token_ids: Sequence[int]) -> TagWriter:
    def schema(given: Any, options: Mapping[str, Any], place: str) -> str:
        try:
            own = {name: options[name] for name in JSON_OPTIONS if name in options}
            asked = replace(params, structural_tag=None, json_object=True, **own)
            found = {} if given is True else {"not": {}} if given is False else given
            found = rewritten(found, is_closed=asked.disable_additional_properties)
        except (ConfigError, RequestError) as error:
            raise RequestError(f"cannot be followed: {place} {error}") from error
        return f"%json {json.dumps({**found, 'x-guidance': _json_options(asked)})}"

    def lark(grammar: str, options: Mapping[str, Any]) -> str:
        is_closed = params.disable_additional_properties
        is_closed = options.get("disable_additional_properties", is_closed) is True
        return _lark(grammar, is_closed=is_closed, places=options.get("places") or ())

    def regex(pattern: str) -> str:
        written = json.loads(library().LLMatcher.grammar_from_regex(pattern))
        return str(written["grammars"][0]["lark_grammar"])

    return TagWriter(schema=schema, lark=lark, regex=regex, eos_token_ids=eos_token_ids)


def _lark(grammar: str, *, is_closed: bool, places: Sequence[object] = ()) -> str:
    """Return a grammar in llguidance's dialect of Lark, if necessary converted from EBNF.

    ``places`` names the schemas in the lines after the first, for messages.
    """
    if is_ebnf(grammar):
        return lark_of_ebnf(grammar)
    return _with_rewritten_schemas(grammar, is_closed, places)


_SCHEMA_OR_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*')


def _with_rewritten_schemas(lark: str, is_closed: bool, places: Sequence[object] = ()) -> str:
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
                try:
                    schema = rewritten(schema, is_closed=is_closed)
                except RequestError as error:
                    line = lark.count("\n", 0, found.end())
                    at = f"the JSON schema at {place_in(lark, found.end())}"
                    if 0 < line <= len(places):
                        at = str(places[line - 1])
                    raise RequestError(f"{error} of {at}") from error
                if isinstance(options, dict):
                    schema["x-guidance"] = {**options, **_STRICT}
                num_lines = lark.count("\n", found.end(), end)  # errors below keep their lines
                parts.append("{" + "\n" * num_lines + json.dumps(schema)[1:])
            else:
                parts.append(lark[found.end() : end])
        place = end
    return "".join([*parts, lark[place:]])


_STRICT: Mapping[str, Any] = {"lenient": False, "coerce_one_of": False}
"""Options of llguidance with which it ignores nothing."""


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
