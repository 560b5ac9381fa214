"""Write structural tags as one grammar: free text, and regions of it that follow a description.

The names are XGrammar's (https://xgrammar.mlc.ai/docs), which vLLM and OpenAI-style servers take. A
tree of formats describes a whole output. Some formats run until a text that ends them, so each is
written together with its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mie.config.params.structured import JSON_OPTIONS
from mie.errors import RequestError, shown

Format = Mapping[str, Any]
Literal = str | int
"""A text, or the id of a token."""

_TEXT = "/(?s:.*)/"
_MAX_COUNT = 2**31 - 1


class Ends(NamedTuple):
    """The ends of a format. A format without a limit needs an end, and is written with it."""

    literals: tuple[Literal, ...] = ()
    """The texts or tokens that end the format; the end of the output if there are none."""


@dataclass(kw_only=True, eq=False)
class TagWriter:
    """Writes a tree of formats in llguidance's dialect of Lark."""

    schema: Callable[[Any, Format, str], str]
    """Returns a JSON schema as a Lark expression, from the schema, its format and its place."""
    lark: Callable[[str, Format], str]
    """Returns a grammar in llguidance's dialect of Lark, from a grammar and its format."""
    regex: Callable[[str], str]
    """Returns a regular expression as a grammar in Lark."""
    eos_token_ids: Sequence[int]
    _opening: str = ""
    """The place of a tag at the beginning. `mie.structured.budget` counts its tokens."""
    _rules: list[str] = field(default_factory=list)
    _grammars: list[dict[str, str]] = field(default_factory=list)

    def grammar(self, tag: Format) -> str:
        """Return the grammar of a structural tag, for llguidance.

        Raises:
            RequestError: a part is not supported. The message continues "a structural_tag that".
        """
        opening = opening_tag(tag)
        self._opening = "" if opening is None else opening.place
        start = self._write(*root_of(tag), Ends())
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def _write(self, given: Any, place: str, ends: Ends | None) -> str:
        """Return the expression of a format and its ends; ``ends`` is None if a limit must end it.

        ``place`` names the format in messages.
        """
        if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
            raise _refused(place, f"must be an object with a type; got {shown(given)}")
        kind = given["type"]
        known = _FORMATS.get(kind)
        if known is None:
            raise _refused(f"{place}.type", f"{shown(kind)} is not supported")
        fields, method = known
        for name in given:
            if name != "type" and name not in fields:
                raise _refused(f"{place}.{name}", f"is not supported in {kind}")
        return str(method(self, given, place, ends))

    # Formats with a limit

    def _const_string(self, given: Format, place: str, ends: Ends | None) -> str:
        return _joined(_quoted(_text(given, "value", place)), self._end(ends))

    def _json_schema(self, given: Format, place: str, ends: Ends | None) -> str:
        for name, only in (("style", "json"), ("any_order", False)):
            if given.get(name, only) != only:
                raise _refused(f"{place}.{name}", f"{shown(given[name])} is not supported")
        schema = given.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise _refused(f"{place}.json_schema", f"must be a JSON schema; got {shown(schema)}")
        return _joined(self.schema(schema, given, place), self._end(ends))

    def _regex(self, given: Format, place: str, ends: Ends | None) -> str:
        lark = self.regex(_text(given, "pattern", place))
        return _joined(self._named(lark), self._end(ends))

    def _grammar(self, given: Format, place: str, ends: Ends | None) -> str:
        _texts(given, "places", place)  # raises if they are malformed
        lark = self.lark(_text(given, "grammar", place), given)
        return _joined(self._named(lark), self._end(ends))

    def _token(self, given: Format, place: str, ends: Ends | None) -> str:
        return _joined(_token_set([_token_of(given.get("token"), place)]), self._end(ends))

    def _exclude_token(self, given: Format, place: str, ends: Ends | None) -> str:
        excluded = _tokens(given, "exclude_tokens", place)
        ended = [] if ends is None else [end for end in ends.literals if isinstance(end, int)]
        return _joined(
            _token_set([*excluded, *ended, *self.eos_token_ids], but=True), self._end(ends)
        )

    # Compositions

    def _sequence(self, given: Format, place: str, ends: Ends | None) -> str:
        elements: dict[int, Any] = {}
        last = -1
        for index, element in enumerate(_list(given, "elements", place)):
            before = elements.get(last)
            if _runs_on(before) and _is_constant(element) and element["value"]:
                elements[last] = {"type": "tag", "begin": "", "content": before}
                elements[last]["end"] = element["value"]
            else:
                elements[index], last = element, index
        written = [
            self._write(element, f"{place}.elements[{index}]", ends if index == last else None)
            for index, element in elements.items()
        ]
        return _joined(*written) if written else self._end(ends)

    def _or(self, given: Format, place: str, ends: Ends | None) -> str:
        elements = _list(given, "elements", place)
        if not elements:
            raise _refused(f"{place}.elements", "is empty")
        if all(_is_constant(element) for element in elements):
            # An upper-case name makes one lexeme of all. A lexeme has no limit of alternatives.
            texts = " | ".join(_quoted(element["value"]) for element in elements)
            return _joined(self._terminal(texts), self._end(ends))
        place = f"{place}.elements"
        written = [
            self._write(each, f"{place}[{index}]", ends) for index, each in enumerate(elements)
        ]
        return self._rule(" | ".join(written))

    def _optional(self, given: Format, place: str, ends: Ends | None) -> str:
        content = self._write(given.get("content"), f"{place}.content", None)
        return _joined(f"({content})?", self._end(ends))

    def _star(self, given: Format, place: str, ends: Ends | None) -> str:
        content = self._write(given.get("content"), f"{place}.content", None)
        return _joined(f"({content})*", self._end(ends))

    def _plus(self, given: Format, place: str, ends: Ends | None) -> str:
        content = self._write(given.get("content"), f"{place}.content", None)
        return _joined(f"({content})+", self._end(ends))

    def _repeat(self, given: Format, place: str, ends: Ends | None) -> str:
        least = _count(given, "min", place)
        most = None if given.get("max") == -1 else _count(given, "max", place)
        if least is None or (most is not None and most < least):
            raise _refused(place, "needs min, and max, which is -1 or at least min")
        content = self._write(given.get("content"), f"{place}.content", None)
        count = f"{{{least},{'' if most is None else most}}}"
        return _joined(f"({content}){count}", self._end(ends))

    # Free text

    def _any_text(self, given: Format, place: str, ends: Ends | None) -> str:
        if _count(given, "max_tokens", place) is not None and (
            place != f"{self._opening}.content" or ends is None or len(ends.literals) != 1
        ):
            why = "is supported in a tag at the beginning only, and with one end"
            raise _refused(f"{place}.max_tokens", why)
        body = self._body(given, place)
        most = _count(given, "max_chars", place)
        if most is not None:
            limited = self._terminal(f"/(?s:.{{0,{most}}})/")
            body = limited if body == _TEXT else self._terminal(f"{body} & {limited}")
            if ends is None:
                return body
        return self._until(body, _open_ended(ends, place))

    def _any_tokens(self, given: Format, place: str, ends: Ends | None) -> str:
        most = _count(given, "max_tokens", place)
        if most is None or ends is not None:
            ends = _open_ended(ends, place)
        return _joined(
            self._free_tokens(_tokens(given, "exclude_tokens", place), ends, place, most),
            self._end(ends),
        )

    def _free_tokens(
        self, excluded: Sequence[Literal], ends: Ends | None, place: str, most: int | None = None
    ) -> str:
        ended = () if ends is None else ends.literals
        if any(isinstance(end, str) for end in ended):
            raise _refused(place, "must end at a token; a text cannot end tokens (write any_text)")
        token = _token_set([*excluded, *ended, *self.eos_token_ids], but=True)
        return f"({self._rule(token)}){'*' if most is None else f'{{0,{most}}}'}"

    def _body(self, given: Format, place: str, *, is_first: bool = True) -> str:
        """Return the terminal of free text without the texts that ``excludes`` names.

        The first text of an output does not begin with the pattern ``begins_without`` either.
        """
        excluded = _texts(given, "excludes", place)
        banned = []
        if excluded:
            texts = self._terminal(" | ".join(map(_quoted, excluded)))
            banned.append(f"~({_TEXT} {texts} {_TEXT})")
        if is_first and given.get("begins_without") is not None:
            pattern = _text(given, "begins_without", place)
            banned.append(f"~/{pattern}(?s:.*)/")
        return self._terminal(" & ".join([_TEXT, *banned])) if banned else _TEXT

    def _until(self, body: str, ends: Ends) -> str:
        """Return free text and its end: the first of the texts that occurs, or a token."""
        if not ends.literals:
            return body
        texts = [end for end in ends.literals if isinstance(end, str)]
        written = [f"{body} {_token_set([end])}" for end in ends.literals if isinstance(end, int)]
        if texts:
            end = self._terminal(" | ".join(map(_quoted, texts)))
            written.append(self._rule(self._terminal(f"{body} {end}"), "[lazy]"))
        return written[0] if len(written) == 1 else self._rule(" | ".join(written))

    # Tags

    def _tag(self, given: Format, place: str, ends: Ends | None) -> str:
        begin = _expression(_literal(given.get("begin"), f"{place}.begin"))
        if place == self._opening and begin.startswith('"'):
            begin = self._rule(begin, "[lazy]")  # other text may follow instead of the tag
        return _joined(begin, self._inside(given, place, ends))

    def _inside(self, given: Any, place: str, ends: Ends | None) -> str:
        """Return the expression of a tag after its beginning, and of the ends behind it."""
        content, place_of_content = given.get("content"), f"{place}.content"
        values = given["end"] if isinstance(given.get("end"), list) else [given.get("end")]
        literals = [_literal(each, f"{place}.end") for each in values]
        end = Ends(tuple(each for each in literals if each != ""))
        if not end.literals:
            return self._write(content, place_of_content, ends)
        if "" in literals:
            written = _joined(self._write(content, place_of_content, None), f"({self._end(end)})?")
        else:
            written = self._write(content, place_of_content, end)
        return _joined(written, self._end(ends))

    def _triggered_tags(self, given: Format, place: str, ends: Ends | None) -> str:
        tags = _tags(given, place)
        triggers = _texts(given, "triggers", place)
        groups: dict[Literal, list[tuple[Literal, Any, str]]] = {}
        for index, tag in enumerate(tags):
            where = f"{place}.tags[{index}]"
            begin = _literal(tag.get("begin"), f"{where}.begin")
            if isinstance(begin, int):  # a token is its own trigger
                groups.setdefault(begin, []).append(("", tag, where))
                continue
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                raise _refused(
                    f"{where}.begin",
                    f"must begin with exactly one of the triggers; got {shown(begin)}",
                )
            rest = begin.removeprefix(found[0])
            groups.setdefault(found[0], []).append((rest, tag, where))
        body = self._body(given, place, is_first=False)
        first = body
        if given.get("begins_without") is not None:
            first = self._body(given, place)
        return self._dispatched(given, place, ends, groups, body, first)

    def _dispatch(self, given: Format, place: str, ends: Ends | None) -> str:
        groups = self._rules_of(given, place)
        if any(not isinstance(trigger, str) for trigger in groups):
            raise _refused(f"{place}.rules", "must have texts (token_dispatch has tokens)")
        given = {**given, "stop_after_first": not given.get("loop", True)}
        body = self._body(given, place)
        return self._dispatched(given, place, ends, groups, body, body)

    def _token_triggered_tags(self, given: Format, place: str, ends: Ends | None) -> str:
        triggers = _tokens(given, "trigger_tokens", place)
        groups: dict[Literal, list[tuple[Literal, Any, str]]] = {}
        for index, tag in enumerate(_tags(given, place)):
            where = f"{place}.tags[{index}]"
            begin = _literal(tag.get("begin"), f"{where}.begin")
            if begin not in triggers:
                raise _refused(
                    f"{where}.begin", f"must be one of trigger_tokens; got {shown(begin)}"
                )
            groups.setdefault(begin, []).append(("", tag, where))
        return self._dispatched(given, place, ends, groups, None)

    def _token_dispatch(self, given: Format, place: str, ends: Ends | None) -> str:
        groups: dict[Literal, list[tuple[Literal, Any, str]]] = {
            _token_of(trigger, f"{place}.rules"): rules
            for trigger, rules in self._rules_of(given, place).items()
        }
        given = {**given, "stop_after_first": not given.get("loop", True)}
        return self._dispatched(given, place, ends, groups, None)

    def _rules_of(self, given: Format, place: str) -> dict[Literal, list[tuple[Literal, Any, str]]]:
        rules: dict[Literal, list[tuple[Literal, Any, str]]] = {}
        for index, rule in enumerate(_list(given, "rules", place)):
            where = f"{place}.rules[{index}]"
            if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != 2:
                raise _refused(
                    where, f"must be a pair of a pattern and a format; got {shown(rule)}"
                )
            if not isinstance(rule[0], str | int) or rule[0] == "" or isinstance(rule[0], bool):
                raise _refused(f"{where}[0]", f"must be a text or a token; got {shown(rule[0])}")
            tag = {"content": rule[1], "end": ""}
            rules.setdefault(rule[0], []).append(("", tag, where))
        if not rules:
            raise _refused(f"{place}.rules", "is empty")
        return rules

    def _dispatched(
        self,
        given: Format,
        place: str,
        ends: Ends | None,
        groups: Mapping[Literal, Sequence[tuple[Literal, Any, str]]],
        body: str | None,
        first: str | None = None,
    ) -> str:
        """Return free text with tags in it. ``body`` is the free text, or None for free tokens.

        ``first`` is the free text before the first tag.
        ``groups`` has, for each trigger, the rest of each tag's beginning, the tag and its place.
        """
        is_once = _switch(given, "stop_after_first", place)
        is_needed = _switch(given, "at_least_one", place)
        inside = {
            trigger: self._rule(
                " | ".join(
                    _joined(_expression(rest), self._inside(tag, where, ends if is_once else None))
                    for rest, tag, where in tags
                )
            )
            for trigger, tags in groups.items()
        }
        if is_needed and is_once:  # then the tag may be anywhere that a limited format may
            return self._alternatives(inside)
        ends = _open_ended(ends, place)
        if body is None:
            excluded = [*groups, *_tokens(given, "exclude_tokens", place)]
            free = self._free_tokens(excluded, ends, place)
            tail = _joined(free, self._end(ends))
            led = {trigger: f"{free} {_token_set([trigger])}" for trigger in groups}
        else:
            tail = self._until(body, ends)
            led = {trigger: self._until(body, Ends((trigger,))) for trigger in groups}
        tags = self._rule(" | ".join(f"{led[trigger]} {inside[trigger]}" for trigger in groups))
        if is_needed:
            return _joined(self._alternatives(inside), f"({tags})*", tail)
        more = "" if is_once else f"({tags})* {tail}"
        if body is not None and first is not None and first != body:
            led = {trigger: self._until(first, Ends((trigger,))) for trigger in groups}
            tags = self._rule(" | ".join(f"{led[trigger]} {inside[trigger]}" for trigger in groups))
            tail = self._until(first, ends)
        elif more:
            return more
        return self._rule(f"{tags} {more} | {tail}")

    def _alternatives(self, inside: Mapping[Literal, str]) -> str:
        return self._rule(
            " | ".join(f"{_expression(trigger)} {inside[trigger]}" for trigger in inside)
        )

    def _tags_with_separator(self, given: Format, place: str, ends: Ends | None) -> str:
        separator = _text(given, "separator", place)
        tags = _tags(given, place)
        is_once = _switch(given, "stop_after_first", place)
        where = f"{place}.tags"
        tag = self._rule(
            " | ".join(self._tag(tag, f"{where}[{index}]", None) for index, tag in enumerate(tags))
        )
        written = tag if is_once else f"{tag} ({_joined(_quoted(separator), tag)})*"
        if not _switch(given, "at_least_one", place):
            written = f"({written})?"
        return _joined(written, self._end(ends))

    # Lark

    def _end(self, ends: Ends | None) -> str:
        """Return the expression of the literals that follow a limited format."""
        literals = () if ends is None else ends.literals
        written = " | ".join(map(_expression, literals))
        return f"({written})" if len(literals) > 1 else written

    def _rule(self, expression: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _named(self, lark: str) -> str:
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"


_FREE = ("excludes",)
_TEXTS = (*_FREE, "begins_without")
_REPEATS = ("at_least_one", "stop_after_first")
_Writes = Callable[[TagWriter, Format, str, Ends | None], str]
_FORMATS: Mapping[str, tuple[Sequence[str], _Writes]] = {
    "const_string": (("value",), TagWriter._const_string),
    "json_schema": (("json_schema", "style", "any_order", *JSON_OPTIONS), TagWriter._json_schema),
    "regex": (("pattern",), TagWriter._regex),
    "grammar": (
        ("grammar", "disable_additional_properties", "places", "inputs"),
        TagWriter._grammar,
    ),
    "token": (("token",), TagWriter._token),
    "exclude_token": (("exclude_tokens",), TagWriter._exclude_token),
    "sequence": (("elements",), TagWriter._sequence),
    "or": (("elements",), TagWriter._or),
    "optional": (("content",), TagWriter._optional),
    "star": (("content",), TagWriter._star),
    "plus": (("content",), TagWriter._plus),
    "repeat": (("content", "min", "max"), TagWriter._repeat),
    "any_text": ((*_TEXTS, "max_tokens", "max_chars"), TagWriter._any_text),
    "any_tokens": (("exclude_tokens", "max_tokens"), TagWriter._any_tokens),
    "tag": (("begin", "content", "end"), TagWriter._tag),
    "triggered_tags": (("triggers", "tags", *_TEXTS, *_REPEATS), TagWriter._triggered_tags),
    "dispatch": (("rules", "loop", *_FREE), TagWriter._dispatch),
    "tags_with_separator": (("tags", "separator", *_REPEATS), TagWriter._tags_with_separator),
    "token_triggered_tags": (
        ("trigger_tokens", "tags", "exclude_tokens", *_REPEATS),
        TagWriter._token_triggered_tags,
    ),
    "token_dispatch": (("rules", "loop", "exclude_tokens"), TagWriter._token_dispatch),
}
"""The fields of each format, and the method that writes it.

A json_schema and a grammar may have options of the request too. A grammar of calls has the places
of the schemas in its lines after the first, and the grammars of custom tools' inputs by the names
of the tools, for messages. ``begins_without`` is a regular expression of calls without
tags. All of these are mie's own.
"""


def root_of(tag: Format) -> tuple[Any, str]:
    """Return the format of a structural tag and its place. The older form is triggered tags."""
    if "format" in tag:
        return tag["format"], "format"
    tags = []
    for index, each in enumerate(_list(tag, "structures", "")):
        where = f"structures[{index}]"
        if not isinstance(each, Mapping) or not isinstance(each.get("schema"), Mapping | bool):
            raise _refused(where, f"must have begin, schema and end; got {shown(each)}")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}, "structures"


class Opening(NamedTuple):
    """The tag of free text that an output may begin with."""

    tag: Format
    place: str
    before: Sequence[Literal]
    """The texts and tokens before the tag."""


def opening_tag(tag: Format) -> Opening | None:
    """Return the tag of free text that an output may begin with, if any.

    Only there may the free text have ``max_tokens``.
    """
    given, place = root_of(tag)
    before: list[Literal] = []
    while True:
        elements = given.get("elements") if _kind(given) == "sequence" else None
        if isinstance(elements, list) and elements:
            num_fixed = 0
            while num_fixed < len(elements) - 1 and _is_fixed(elements[num_fixed]):
                fixed = elements[num_fixed]
                before.append(fixed["value"] if _is_constant(fixed) else fixed["token"])
                num_fixed += 1
            given, place = elements[num_fixed], f"{place}.elements[{num_fixed}]"
        elif _kind(given) == "optional":
            given, place = given.get("content"), f"{place}.content"
        elif _kind(given) == "tag" and _kind(given.get("content")) == "any_text":
            return Opening(given, place, before)
        else:
            return None


def _is_fixed(given: Any) -> bool:
    is_token = _kind(given) == "token" and isinstance(given.get("token"), int)
    return is_token or _is_constant(given)


def _kind(given: Any) -> Any:
    return given.get("type") if isinstance(given, Mapping) else None


def _is_constant(given: Any) -> bool:
    return _kind(given) == "const_string" and isinstance(given.get("value"), str)


def _runs_on(given: Any) -> bool:
    """Return whether a format needs an end."""
    kind = _kind(given)
    if kind in ("triggered_tags", "token_triggered_tags"):
        return not (given.get("at_least_one") and given.get("stop_after_first"))
    return kind in ("any_text", "any_tokens", "dispatch", "token_dispatch")


def _open_ended(ends: Ends | None, place: str) -> Ends:
    if ends is None:
        raise _refused(place, "has no end (put it into a tag, or before a const_string)")
    return ends


def _refused(place: str, problem: str) -> RequestError:
    return RequestError(f"cannot be followed: {place.removeprefix('.')} {problem}")


def _joined(*expressions: str) -> str:
    return " ".join(each for each in expressions if each)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _expression(literal: Literal) -> str:
    if isinstance(literal, int):
        return _token_set([literal])
    return _quoted(literal) if literal else ""


def _token_set(tokens: Sequence[Literal], *, but: bool = False) -> str:
    """Return the expression of one of the tokens, or of any but the tokens."""
    return f"<[{'^' if but else ''}{','.join(map(str, tokens))}]>"


def _text(given: Format, name: str, place: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _refused(f"{place}.{name}", f"must be a string; got {shown(value)}")
    return value


def _list(given: Format, name: str, place: str) -> Sequence[Any]:
    value = given.get(name)
    if not isinstance(value, list):
        raise _refused(f"{place}.{name}", f"must be a list; got {shown(value)}")
    return value


def _texts(given: Format, name: str, place: str) -> list[str]:
    values = _list(given, name, place) if given.get(name) is not None else []
    for index, value in enumerate(values):
        if not isinstance(value, str) or not value:
            raise _refused(f"{place}.{name}[{index}]", f"must be a text; got {shown(value)}")
    return list(values)


def _tokens(given: Format, name: str, place: str) -> list[int]:
    values = _list(given, name, place) if given.get(name) is not None else []
    return [_token_of(value, f"{place}.{name}[{index}]") for index, value in enumerate(values)]


def _token_of(value: Any, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise _refused(place, f"must be the id of a token; got {shown(value)}")
    return value


def _tags(given: Format, place: str) -> Sequence[Format]:
    tags = _list(given, "tags", place)
    if not tags:
        raise _refused(f"{place}.tags", "is empty")
    for index, tag in enumerate(tags):
        if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
            raise _refused(f"{place}.tags[{index}]", f"must be a tag; got {shown(tag)}")
        for name in tag:
            if name not in ("type", "begin", "content", "end"):
                raise _refused(f"{place}.tags[{index}].{name}", "is not supported in tag")
    return tags


def _literal(value: Any, place: str) -> Literal:
    """Return the text or the token that begins or ends a tag."""
    if _kind(value) == "token":
        return _token_of(value.get("token"), f"{place}.token")
    if not isinstance(value, str):
        raise _refused(place, f"must be a string or a token; got {shown(value)}")
    return value


def _count(given: Format, name: str, place: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise _refused(f"{place}.{name}", f"must be a count; got {shown(value)}")
    return value


def _switch(given: Format, name: str, place: str) -> bool:
    value = given.get(name)
    if value not in (None, True, False):
        raise _refused(f"{place}.{name}", f"must be true or false; got {shown(value)}")
    return bool(value)
