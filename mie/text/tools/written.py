"""Write calls of tools: as text, and as rules of a grammar that leaves no other text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mie.config.params.structured import COMPACT
from mie.errors import RequestError, shown
from mie.text.tools.definitions import Tool, parameters_of
from mie.text.tools.formats import CallFormat, Parameters
from mie.text.tools.values import resolved, types_of

_KNOWN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NOTES = {"title", "description", "examples", "default", "deprecated", "$schema", "$id", "strict"}
_LENGTHS = {"minLength", "maxLength"}
_KEY = re.compile(r"[\w.$-]+")


@dataclass(frozen=True, kw_only=True)
class Literals:
    """The texts that a grammar writes around names and arguments."""

    begin: str
    """Before the name of the first call."""
    again: str
    """Before the name of any other call."""
    middle: str
    """Between a name and its arguments."""
    after: str
    """After the arguments."""
    end: str
    """After all calls."""


def literals_of(form: CallFormat, *, is_forced: bool = True) -> Literals:
    """Return the texts around the calls of a format.

    Where a text may come instead of calls, no tag is left out.
    """
    name, middle, after = "", form.name_close, form.close
    if form.has_index:
        name, middle = "functions.", f":0{form.name_close}"
    elif form.holds_name and form.name:
        name, middle, after = f'{{"{form.name}": "', f'", "{form.arguments}": ', "}"
    elif form.holds_name:
        name, middle, after = '{"', '": ', "}"
    begin, end = ("", "") if form.is_open_optional and is_forced else (form.begin, form.end)
    if form.is_list:
        list_close = form.close if form.holds_name else ""
        return Literals(
            begin=f"{begin}{form.open}[{name}",
            again=form.separator + name,
            middle=middle,
            after=after,
            end=f"]{list_close}{end}",
        )
    return Literals(
        begin=begin + form.open + name,
        again=form.separator + form.open + name,
        middle=middle,
        after=after + form.close if form.holds_name else after,
        end=end,
    )


def written(calls: Sequence[tuple[str, str]], form: CallFormat) -> str:
    """Return calls as a model should write them. Their arguments are JSON."""
    literals = literals_of(form)
    texts = [
        name + literals.middle + _arguments(arguments, form.parameters) + literals.after
        for name, arguments in calls
    ]
    return literals.begin + literals.again.join(texts) + literals.end


def _arguments(text: str, form: Parameters | None) -> str:
    try:
        value = None if form is None else json.loads(text)
    except ValueError:  # the call was cut
        value = None
    if form is None or not isinstance(value, dict):
        return text
    return form.separator.join(_argument(form, key, each) for key, each in value.items())


def _argument(form: Parameters, key: str, value: Any) -> str:
    is_text = isinstance(value, str) and form.has_text
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    return form.open + key + form.before(is_text=is_text) + text + form.after(is_text=is_text)


# Grammars, in llguidance's dialect of Lark


class ArgumentRules:
    """Writes the rules of arguments that are no JSON object, one rule an argument."""

    def __init__(self, form: Parameters, terms: Callable[[str], str]) -> None:
        """``terms`` returns a text as terms of a rule."""
        self.rules: list[str] = []
        self.places: list[str] = []
        """The places of the rules in the tools, for messages."""
        self._form = form
        self._terms = terms

    def of_text(self, name: str, text: str) -> str:
        """Return one argument with a text that the rule ``text`` writes, as a part of a rule."""
        form, is_text = self._form, self._form.has_text
        quote = "" if is_text else json.dumps('"')
        opening = self._terms(form.open + name + form.before(is_text=is_text))
        return f"{opening} {quote} {text} {quote} {self._terms(form.after(is_text=is_text))}"

    def of(self, tool: Tool) -> str:
        """Return the arguments of a tool as a part of a rule, and add the rules that it needs.

        Required arguments come first. Properties that the schema does not name are left out.

        Raises:
            RequestError: the schema has something that this form cannot hold to.
        """
        schema, where = tool.parameters, f"the parameters of {tool.name}"
        for keyword in schema:
            if keyword not in _KNOWN | _NOTES:
                raise _unsupported(f"{keyword} in {where}")
        properties, required = schema.get("properties", {}), list(schema.get("required", ()))
        for key in required:
            if key not in properties:
                raise _unsupported(f"{key}, which is required and has no schema, in {where}")
        others = [key for key in properties if key not in required]
        names = {}
        for key in properties:
            names[key] = self._rule(key, properties[key], schema, where)
            place = f"the argument {shown(key)} in {parameters_of(tool.name)}"
            self.places += [place] * (len(self.rules) - len(self.places))
        comma = self._terms(self._form.separator)
        if required or not comma:
            more = [f"({comma} {names[key]})?" for key in others]
            return " ".join([f" {comma} ".join(names[key] for key in required), *more])
        # The first argument that is there has no comma before it.
        starts = [
            " ".join([names[key], *(f"({comma} {names[each]})?" for each in others[place + 1 :])])
            for place, key in enumerate(others)
        ]
        return f"({' | '.join(starts)})?" if starts else ""

    def free(self, after: str) -> str:
        """Return arguments that nothing restricts, and the text ``after`` them."""
        written = self._terms(after)
        if written != json.dumps(after, ensure_ascii=False):
            return f"/(?s:.*)/ {written}"  # a special token ends the text
        name = f"argument_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: /(?s:.*){pattern_of(after)}/")
        self.places.append("free arguments")
        return name

    def _rule(self, key: str, schema: Any, root: Mapping[str, Any], where: str) -> str:
        form = self._form
        where = f"{key} in {where}"
        if form.middle.split()[0] in key or (form.quotes and not _KEY.fullmatch(key)):
            raise _unsupported(f"the name {where}")
        is_text = form.has_text and "string" in types_of(schema, root)
        name = f"argument_{len(self.rules)}"
        value = self._text(schema, root, where) if is_text else self._json(schema, root)
        opening = self._terms(form.open + key + form.before(is_text=is_text))
        self.rules.append(f"{name}: {opening} {value}")
        return name

    def _json(self, schema: Any, root: Mapping[str, Any]) -> str:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        options = {"x-guidance": COMPACT}
        given = {**shared, **schema, **options} if isinstance(schema, Mapping) else options
        return f"%json {json.dumps(given)} {self._terms(self._form.after(is_text=False))}"

    def _text(self, schema: Any, root: Mapping[str, Any], where: str) -> str:
        """Return a text up to the closing tag, and the tag."""
        after = self._form.after(is_text=True)
        values = _texts(schema, root)
        if values is not None:
            return f"({' | '.join(map(json.dumps, values))}) {self._terms(after)}"
        low, high = _lengths(schema, root, where)
        tag = after.rstrip()
        if self._terms(tag) == json.dumps(tag, ensure_ascii=False):
            # The tag is a part of the pattern, because a pattern takes as much text as it can.
            name = f"TEXT_{len(self.rules)}"
            text, more = f"(?s:.){{{low},{high}}}{pattern_of(tag)}", pattern_of(tag.strip())
            self.rules.append(f"{name}: /{text}/ & ~/(?s:.*){more}(?s:.+)/")
            return f"{name} {self._terms(after[len(tag) :])}"
        return f"/[^<｜]{{{low},{high}}}/ {self._terms(after)}"


def pattern_of(text: str) -> str:
    """Return the pattern of a text, in a regular expression of Lark."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _texts(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Return the only texts that a schema allows, or None if it allows more."""
    if "$ref" in schema:
        return _texts(resolved(schema, root), root)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if values is None else [each for each in values if isinstance(each, str)]


def _lengths(schema: Any, root: Mapping[str, Any], where: str) -> tuple[int, int | str]:
    """Return the limits of a text's length.

    Raises:
        RequestError: the schema has other rules for a text.
    """
    if "$ref" in schema:
        return _lengths(resolved(schema, root), root, where)
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key, ()):
            if "string" in types_of(each, root):
                return _lengths(each, root, where)
    for keyword in schema:
        if keyword not in {"type"} | _LENGTHS | _NOTES:
            raise _unsupported(f"{keyword} of {where}")
    return schema.get("minLength", 0), schema.get("maxLength", "")


def _unsupported(what: str) -> RequestError:
    return RequestError(
        f"tool_choice cannot force a call with {what}, because this model writes arguments "
        "between tags (use tool_choice 'auto' without strict functions and structured outputs)"
    )
