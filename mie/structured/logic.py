"""Negate JSON schemas, and prove that no value is accepted by two of them.

Both are exact: a schema that cannot be negated with the keywords of llguidance is refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mie.errors import RequestError, shown
from mie.structured.formats import is_enforced
from mie.structured.keywords import (
    TYPES_OF_KEYWORDS,
    Schema,
    has_no_effect,
    listed,
    mapping_of,
    texts_of,
)
from mie.structured.references import References
from mie.structured.schema_values import BOUNDS, checked_count

Types = frozenset[str]
"""Types of values. Here "number" is the numbers that are no integers."""

ALL_TYPES: Types = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_NUMBERS = frozenset({"integer", "number"})
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTS = {"Length": "string", "Items": "array", "Properties": "object"}
_OF_PARTS = (
    *("items", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
)
_PLAIN = re.compile(r"(?:[A-Za-z0-9 /:_#@,-]|\\[./\-:+*?()|])*")
_ESCAPED = re.compile(r"\\(.)")
_COMMON = re.compile(
    r"(?:[A-Za-z0-9 /:_#@,^$.*+?|)-]|\((?:\?:|(?!\?))|\{\d+(?:,\d*)?\}|\\[dws./\-:+*?()|\[\]{}$^]"
    r"|\[\^?(?:[A-Za-z0-9 /:_#@,.*+?|()$-]|\\[dws./\-:+*?()|\[\]{}$^])+\])*"
)
_MAX_NAMES = 40
_MAX_DEPTH = 8
_MAX_COMPARED = 100
_MAX_EXCLUDED = 8


def types_in(schema: Schema) -> Types:
    """Return the types of the values that the ``type`` of a schema allows."""
    given = schema.get("type")
    if given is None:
        return ALL_TYPES
    names = given if isinstance(given, list) else [given]
    return frozenset().union(*(_NUMBERS if each == "number" else {str(each)} for each in names))


def type_of(value: Any) -> str:
    """Return the type of a value. Whole floats are integers, by JSON Schema."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


class Logic:
    """Negates and compares the schemas of one description."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._kept: list[Any] = []  # schemas that were made, because others know them by identity

    # Negation

    def negation(self, schema: Any, types: Types = ALL_TYPES) -> Any:
        """Return a schema of the values of these types that a schema refuses.

        Raises:
            RequestError: it has a keyword that cannot be negated. The message continues "the
                schema".
        """
        made = _any_of(list(self._refused(schema, types, ())))
        self._kept.append(made)
        return made

    def _refused(self, schema: Any, types: Types, within: tuple[int, ...]) -> Iterator[Any]:
        """Yield schemas that together accept the values that ``schema`` refuses."""
        if isinstance(schema, bool):
            yield from [] if schema else [True]
            return
        if not isinstance(schema, dict):
            raise RequestError(f"has {shown(schema)} where a schema must be an object or a boolean")
        if id(schema) in within or len(within) > _MAX_DEPTH:
            raise RequestError("uses 'not' of a schema that refers to itself, or nests too deep")
        within = (*within, id(schema))
        schema = self._references.effective(schema)
        target = self._references.target(schema)
        if target is not None:
            yield from self._refused(target, types, within)
        for name in schema:
            yield from self._against(name, schema, types, within)

    def _against(
        self, name: str, schema: Schema, types: Types, within: tuple[int, ...]
    ) -> Iterator[Any]:
        """Yield schemas of the values that one keyword refuses."""
        value = schema[name]

        def negated(inner: Any, of: Types = ALL_TYPES) -> Any:
            return _any_of(list(self._refused(inner, of, within)))

        if name == "type":
            others = types - types_in(schema)
            if "number" in others and "integer" not in others and "integer" in types:
                raise RequestError("uses 'not' of type integer, which cannot be followed")
            if others:
                yield {"type": _spelt(others)}
        elif name in ("const", "enum"):
            yield from _other_values([value] if name == "const" else value, types)
        elif name in BOUNDS:
            if types & _NUMBERS and not isinstance(value, bool):
                exclusive = f"exclusive{name.capitalize()}"
                name = exclusive if schema.get(exclusive) is True else name
                yield {"type": _spelt(types & _NUMBERS), _OPPOSITES[name]: value}
        elif name[3:] in _COUNTS and name[:3] in ("min", "max"):
            of, count = _COUNTS[name[3:]], checked_count(name, value)
            if of in types and count is not None:
                end, other = ("min", count + 1) if name.startswith("max") else ("max", count - 1)
                yield {"type": of, f"{end}{name[3:]}": other}
        elif name == "required":
            if "object" in types:
                for each in texts_of(schema, name):
                    yield {"type": "object", "properties": {each: False}}
        elif name == "properties":
            for each, inner in mapping_of(schema, name).items():
                other = negated(inner) if "object" in types else False
                if other is not False:
                    yield {"type": "object", "properties": {each: other}, "required": [each]}
        elif name in ("dependentRequired", "dependentSchemas", "dependencies"):
            for trigger, needed in mapping_of(schema, name).items() if "object" in types else ():
                inner = {"required": needed} if isinstance(needed, list) else needed
                for other in self._refused(inner, frozenset({"object"}), within):
                    has = {"type": "object", "required": [trigger]}
                    yield {"allOf": [has, other]}
        elif name == "allOf":
            for each in listed(schema, name):
                yield from self._refused(each, types, within)
        elif name in ("anyOf", "oneOf"):
            choice = listed(schema, name)
            yield {"allOf": [negated(each, types) for each in choice]}
            if name == "oneOf" and len(choice) > _MAX_EXCLUDED:
                raise RequestError("uses 'not' of a oneOf with many alternatives")
            for pair in itertools.combinations(choice, 2) if name == "oneOf" else ():
                if not self.are_disjoint(pair, types):
                    yield {"allOf": [*pair]}
        elif name == "not":
            yield value
        elif name == "if":
            yield from (
                {"allOf": [value, negated(schema.get("then", True), types)]},
                {"allOf": [negated(value, types), negated(schema.get("else", True), types)]},
            )
        elif not _is_idle(name, schema, types):
            raise RequestError(f"uses 'not' of {name!r}, which is not supported (leave it out)")

    def conditional(self, schema: Schema) -> Schema:
        """Return the schema of ``if``, ``then`` and ``else`` without them.

        Raises:
            RequestError: ``if`` cannot be negated.
        """
        condition, types = schema["if"], types_in(schema)
        made = {
            "anyOf": [
                {"allOf": [condition, schema.get("then", True)]},
                {"allOf": [self.negation(condition, types), schema.get("else", True)]},
            ]
        }
        self._kept.append(made)
        return made

    def exactly_one(self, schema: Schema) -> Schema | None:
        """Return the ``oneOf`` of a schema as an equal ``anyOf``, or None if there is none."""
        alternatives, types = listed(schema, "oneOf"), types_in(schema)
        if self.are_disjoint(alternatives, types):
            return {"anyOf": alternatives}
        made = self._excluding(alternatives, types) or self._differing(alternatives, types)
        if made is None:
            return None
        self._kept.append(made)
        return {"anyOf": made}

    def _excluding(self, alternatives: list[Any], types: Types) -> list[Any] | None:
        """Return alternatives that each exclude the others, or None if there is no negation."""
        if len(alternatives) > _MAX_EXCLUDED:
            return None
        made: list[Any] = []
        try:
            for index, each in enumerate(alternatives):
                others = alternatives[:index] + alternatives[index + 1 :]
                near = [other for other in others if not self.are_disjoint([each, other], types)]
                own = types & types_in(each) if isinstance(each, dict) else types
                made.append({"allOf": [each, *(self.negation(other, own) for other in near)]})
        except RequestError:
            return None
        return made

    def _differing(self, alternatives: list[Any], types: Types) -> list[Any] | None:
        """Return disjoint parts of alternatives, or None if none are found.

        An object has a property by which the alternatives differ, and a list has an item. Values
        without them are left out, even if only one alternative accepts them.
        """
        if len(alternatives) > _MAX_COMPARED:
            return None
        owns = [self._types_of(each, types) for each in alternatives]
        parts = [
            each for one in alternatives if isinstance(one, dict) for each in self._conjuncts(one)
        ]
        names = dict.fromkeys(name for each in parts for name in mapping_of(each, "properties"))
        has_lists = sum("array" in own for own in owns) > 1
        for name in [None, *names][:_MAX_NAMES]:
            made = []
            for each, own in zip(alternatives, owns, strict=True):
                if own == {"array"} and has_lists:
                    made.append({"allOf": [each, {"type": "array", "minItems": 1}]})
                elif "object" in own and name is not None:
                    made.append({"allOf": [each, {"type": "object", "required": [name]}]})
                else:
                    made.append(each)
            if all(
                self._clash(part, other, types, 0)
                for index, part in enumerate(made)
                for place, other in enumerate(alternatives)
                if place != index
            ):
                return made
        return None

    def _types_of(self, schema: Any, types: Types) -> Types:
        parts = self._conjuncts(schema) if isinstance(schema, dict) else ()
        return types.intersection(*map(types_in, parts))

    # Disjoint schemas

    def are_disjoint(self, schemas: Sequence[Any], types: Types = ALL_TYPES) -> bool:
        """Return whether it is proved that no value of these types is accepted by two schemas."""
        if len(schemas) > _MAX_COMPARED:
            return False
        return all(
            self._clash(first, second, types, 0)
            for index, first in enumerate(schemas)
            for second in schemas[:index]
        )

    def _clash(self, first: Any, second: Any, types: Types, depth: int) -> bool:
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict) or depth > _MAX_DEPTH:
            return False
        a, b = list(self._conjuncts(first)), list(self._conjuncts(second))
        for each in (*a, *b):
            types &= types_in(each)
            for values in _values_in(each):
                types &= frozenset(map(type_of, values))
        if not types or any(_values_clash(x, y) or _values_clash(y, x) for x in a for y in b):
            return True
        for mine, others in ((a, second), (b, first)):
            for each in mine:
                for name in ("anyOf", "oneOf"):
                    alternatives = listed(each, name)
                    if alternatives and all(
                        self._clash(inner, others, types, depth + 1) for inner in alternatives
                    ):
                        return True
        if types <= {"object"}:
            return self._objects_clash(a, b, depth) or self._objects_clash(b, a, depth)
        if types <= _NUMBERS:
            return _are_apart([*a, *b])
        if types <= {"string"} or types <= {"array"}:
            name = "Length" if types <= {"string"} else "Items"
            if any(_beginnings_clash(x, y) for x in a for y in b):
                return True
            least = max(_number(each, f"min{name}", 0) for each in (*a, *b))
            items = [
                [each["items"] for each in some if "items" in each and name == "Items"]
                for some in (a, b)
            ]
            has_plain_item = least > 0 and not any("prefixItems" in each for each in (*a, *b))
            if has_plain_item and any(
                self._clash(x, y, ALL_TYPES, depth + 1) for x in items[0] for y in items[1]
            ):
                return True
            return least > min(_number(each, f"max{name}", math.inf) for each in (*a, *b))
        return False

    def _objects_clash(self, a: list[Schema], b: list[Schema], depth: int) -> bool:
        """Return whether a property that ``a`` requires cannot follow both."""
        required = {name for each in a for name in texts_of(each, "required")}
        for name in sorted(required):
            if any(
                each.get("additionalProperties") is False
                and name not in mapping_of(each, "properties")
                and not mapping_of(each, "patternProperties")
                for each in b
            ):
                return True
            mine, others = (
                [
                    each["properties"][name]
                    for each in some
                    if name in mapping_of(each, "properties")
                ]
                for some in (a, b)
            )
            if any(False in some for some in (mine, others)):
                return True
            if any(self._clash(x, y, ALL_TYPES, depth + 1) for x in mine for y in others):
                return True
        return False

    def _conjuncts(self, schema: Schema) -> Iterator[Schema]:
        """Yield a schema, and the schemas that hold with it."""
        left: list[Any] = [schema]
        seen = set()
        for each in left:
            if isinstance(each, dict) and id(each) not in seen:
                seen.add(id(each))
                each = self._references.effective(each)
                yield each
                left += [self._references.target(each), *listed(each, "allOf")]


def _any_of(alternatives: list[Any]) -> Any:
    if True in alternatives:
        return True
    return {"anyOf": alternatives} if alternatives else False


def _spelt(types: Types) -> list[str]:
    """Return types as a schema names them."""
    return sorted(types - {"integer"} if "number" in types else types)


def _other_values(values: Any, types: Types) -> Iterator[Schema]:
    """Yield schemas of the values of these types that are not in a list."""
    if not isinstance(values, list):
        raise RequestError(f"has an enum that is not a list: {shown(values)}")
    given: dict[str, list[Any]] = {}
    for value in values:
        given.setdefault("number" if type_of(value) in _NUMBERS else type_of(value), []).append(
            value
        )
    free = types - given.keys() - (_NUMBERS if "number" in given else frozenset())
    if free:
        yield {"type": _spelt(free)}
    if "boolean" in types and 0 < len(given.get("boolean", ())) < 2:
        yield {"const": not given["boolean"][0]}
    numbers = types & _NUMBERS
    if numbers and "number" in given:
        ends = sorted(set(given["number"]))
        for low, high in zip([None, *ends], [*ends, None], strict=True):
            between: Schema = {"type": _spelt(numbers)}
            if low is not None:
                between["exclusiveMinimum"] = low
            if high is not None:
                between["exclusiveMaximum"] = high
            is_empty = low is not None and high is not None and math.floor(low) + 1 >= high
            if "number" in numbers or not is_empty:
                yield between
    if "string" in types and "string" in given:
        yield {"type": "string", "pattern": f"^(?:{_other_texts(sorted(set(given['string'])))})$"}
    for name, count in (("array", "minItems"), ("object", "minProperties")):
        if name in types and given.get(name):
            if any(given[name]):
                raise RequestError("uses 'not' of a list or an object, which is not supported")
            yield {"type": name, count: 1}


def _other_texts(texts: list[str]) -> str:
    """Return an expression of all texts but these."""
    following: dict[str, str] = {"": ""}  # the characters after each beginning of a text
    for text in texts:
        for end, letter in enumerate(text):
            letters = following.setdefault(text[:end], "")
            following[text[:end]] = letters if letter in letters else letters + letter
        following.setdefault(text, "")
    alternatives = []
    for beginning, letters in following.items():
        begun = _escaped(beginning)
        rest = rf"[^{_escaped(letters)}][\s\S]*" if letters else r"[\s\S]+"
        alternatives.append(begun + rest)
        if beginning not in texts:
            alternatives.append(begun)
    return "|".join(alternatives)


def _escaped(text: str) -> str:
    """Return an expression of a text that is also right in a class."""
    return "".join(
        each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text
    )


def _is_idle(name: str, schema: Schema, types: Types) -> bool:
    """Return whether a keyword refuses no value of these types."""
    value = schema[name]
    of = TYPES_OF_KEYWORDS.get(name)
    of_numbers = _NUMBERS if of == "number" else frozenset({of})
    if of is None or not types & of_numbers:
        return True
    if name in _OF_PARTS:
        return value is True or value == {}
    if name in ("patternProperties", "prefixItems", "dependentSchemas", "dependencies"):
        return not value
    if name == "format":
        return isinstance(value, str) and not is_enforced(value)
    return name not in ("pattern", "multipleOf") and has_no_effect(name, schema)


def _values_in(schema: Schema) -> Iterator[list[Any]]:
    """Yield the lists of values, one of which a value must be."""
    if "const" in schema:
        yield [schema["const"]]
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]
    if types_in(schema) == {"string"} and schema.get("maxLength") == 0:
        yield [""]


def _values_clash(schema: Schema, other: Schema) -> bool:
    """Return whether ``other`` refuses all values that a schema lists."""
    return any(all(_is_refused(each, other) for each in values) for values in _values_in(schema))


def _is_refused(value: Any, schema: Schema) -> bool:
    """Return whether it is certain that a schema refuses a value."""
    of = type_of(value)
    if of not in types_in(schema):
        return True
    if any(
        all(type_of(each) != of or each != value for each in values)
        for values in _values_in(schema)
    ):
        return True
    if of == "string":
        count = len(value)
        least, most = _number(schema, "minLength", 0), _number(schema, "maxLength", math.inf)
        return not least <= count <= most or not _may_match(value, schema.get("pattern", ""))
    return of in _NUMBERS and _are_apart([schema, {"minimum": value, "maximum": value}])


def _may_match(text: str, pattern: Any) -> bool:
    """Return whether a text may match a pattern.

    Only patterns that mean the same in ECMA-262, in Rust and in Python are tried.
    """
    if not (isinstance(pattern, str) and _COMMON.fullmatch(pattern)):
        return True
    if "--" in pattern or "||" in pattern or not (text.isascii() and text.isprintable()):
        return True
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return True


def _beginnings_clash(schema: Schema, other: Schema) -> bool:
    """Return whether two patterns begin with different characters."""
    one, another = (_beginning(str(each.get("pattern", ""))) for each in (schema, other))
    return not one.startswith(another) and not another.startswith(one)


def _beginning(pattern: str) -> str:
    """Return characters that all matching texts begin with."""
    if not pattern.startswith("^") or "|" in pattern:
        return ""
    found = _PLAIN.match(pattern, 1)
    assert found is not None  # it may be empty
    rest = pattern[found.end() : found.end() + 1]
    text = _ESCAPED.sub(r"\1", found.group())
    return text[:-1] if rest in tuple("*?{") else text


def _are_apart(schemas: list[Schema]) -> bool:
    """Return whether no number is within the bounds of all schemas."""
    low, high = (-math.inf, False), (math.inf, False)
    for each in schemas:
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            value = _number(each, name, math.nan)
            is_open = name.startswith("ex") or each.get(f"exclusive{name.capitalize()}") is True
            if name.lower().endswith("minimum") and value >= low[0]:
                low = (value, is_open or (value == low[0] and low[1]))
            elif name.lower().endswith("maximum") and value <= high[0]:
                high = (value, is_open or (value == high[0] and high[1]))
    return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))


def _number(schema: Schema, name: str, default: float) -> float:
    value = schema.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default
