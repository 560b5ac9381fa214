"""Plan where items of lists and names of objects must differ, for `unique_matcher`.

No context-free grammar describes lists of different texts, so llguidance does not have
``uniqueItems``. It also writes the name of a free property twice, and ``minProperties`` counts the
name once. A matcher bans the tokens that would repeat an item or a name. A place is planned only if
another item or name can always be written. Other schemas are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mie.errors import RequestError
from mie.structured.formats import is_enforced
from mie.structured.keywords import (
    TYPES_OF_KEYWORDS,
    Schema,
    has_no_effect,
    listed,
    mapping_of,
    texts_of,
)
from mie.structured.logic import ALL_TYPES, type_of, types_in
from mie.structured.references import References

NOWHERE = -1
_MAX_PLACES = 2000
_ASSERTIONS = frozenset({*TYPES_OF_KEYWORDS, "type", "const", "enum", "not", "if", "then", "else"})
_TEXT = frozenset({"type", "minLength", "format"})
_OBJECT = frozenset(
    {"type", "properties", "required", "minProperties", "additionalProperties", "format"}
)
_LIST = frozenset({"type", "items", "minItems", "maxItems", "uniqueItems"})


@dataclass(kw_only=True)
class Place:
    """A place in an output: the plan of the values below it. Places are numbered in a list."""

    names: dict[str, int] = field(default_factory=dict)
    """The places of the properties that schemas name."""
    others: int = NOWHERE
    """The place of other properties."""
    items: int = NOWHERE
    is_unique: bool = False
    """Whether the items of a list here differ. They are texts or open objects."""
    has_different_names: bool = False
    """Whether the names of an object here differ. Any name may come."""
    values: list[Any] | None = None
    """The values that the items of the list may be, if they are listed."""


def plan_of(root: Schema, *, is_closed: bool) -> list[Mapping[str, Any]]:
    """Return the places of a schema's values as JSON. It is empty if no items must differ.

    A list is planned if one of the schemas that it may follow demands it.

    Raises:
        RequestError: items may be too few, or may differ in a way that cannot be followed. The
            message continues "the schema".
    """
    if not _is_needed(root):
        return []
    places = _Plan(root, is_closed).places()
    has_any = any(each.is_unique or each.has_different_names for each in places)
    return [asdict(place) for place in places] if has_any else []


def _is_needed(root: Schema) -> bool:
    """Return whether a keyword is anywhere that may need a plan."""
    left: list[Any] = [root]
    for each in left:
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            count = each.get("minProperties")
            if each.get("uniqueItems") is True or (isinstance(count, (int, float)) and count > 1):
                return True
            left += each.values()
    return False


class _Plan:
    def __init__(self, root: Schema, is_closed: bool) -> None:
        self._root = root
        self._references = References(root)
        self._is_closed = is_closed

    def places(self) -> list[Place]:
        """Return a place for each set of schemas that a value may follow, from the root on."""
        numbers: dict[frozenset[int], int] = {}
        left: list[list[Any]] = []
        made: list[Place] = []

        def number(schemas: Iterable[Any]) -> int:
            together = self._in_place(schemas)
            key = frozenset(map(id, together))
            if not key:
                return NOWHERE
            if key not in numbers:
                if len(numbers) == _MAX_PLACES:
                    raise RequestError("uses 'uniqueItems' in too many places (leave it out)")
                numbers[key] = len(numbers)
                left.append(together)
            return numbers[key]

        number([self._root])
        for schemas in left:  # a place may add others to the end
            names = dict.fromkeys(
                name for each in schemas for name in mapping_of(each, "properties")
            )
            place = Place(
                names={name: number(_properties(schemas, name)) for name in names},
                others=number(_properties(schemas, None)),
                items=number(_items(schemas)),
            )
            place.has_different_names = self._has_different_names(schemas)
            unique = [each for each in schemas if _is_unique(each)]
            if unique:
                try:
                    place.is_unique, place.values = True, self._values(schemas)
                except RequestError as error:
                    raise self._references.placed(error, unique[0]) from error
            made.append(place)
        return made

    def _in_place(self, schemas: Iterable[Any]) -> list[Schema]:
        """Return schemas, and all schemas that a value of theirs may follow as well."""
        found: dict[int, Schema] = {}
        left = list(schemas)
        for each in left:
            if isinstance(each, dict) and id(each) not in found:
                found[id(each)] = each
                left += [inner for _, inner in self._references.in_place(each)]
                left += [each.get("if"), each.get("not")]  # parts may hold after two negations
        return [self._references.effective(each) for each in found.values()]

    def _has_different_names(self, schemas: list[Schema]) -> bool:
        """Return whether a repeated name could make an object with too few properties."""
        counted = [
            each
            for each in schemas
            if "object" in types_in(each) and each.get("minProperties", 0) > 1
        ]
        required = {name for each in schemas for name in texts_of(each, "required")}
        if all(each["minProperties"] <= len(required) for each in counted):
            return False
        if any(each.get("patternProperties") or "propertyNames" in each for each in schemas):
            error = RequestError(
                f"has minProperties {counted[0]['minProperties']} of names that follow a pattern, "
                "which is not supported (write required)"
            )
            raise self._references.placed(error, counted[0])
        return True

    def _values(self, schemas: list[Schema]) -> list[Any] | None:
        """Return the values of items that must differ, or None if there is always another."""
        items = _items(schemas)
        if (
            any(_assertions(each) - _LIST - _of_others("array") for each in schemas)
            or any(_is_unique(each) and "items" not in each for each in schemas)
            or any(not isinstance(each, dict) for each in items)
        ):
            raise _refusal()
        together = self._in_place(items)
        if any(map(self._may_be_negated, [*schemas, *together])):
            raise _refusal()
        parts = [each for each in together if _assertions(each)]
        if parts and all(map(self._has_always_another, parts)):
            return None
        lists = [each for each in schemas if _assertions(each) & (_LIST - {"type"})]
        values = _listed_values(parts[0]) if len(parts) == len(lists) == 1 else None
        if values is None:
            raise _refusal()
        least = lists[0].get("minItems", 0)
        if least > len(values):
            raise RequestError(
                f"has minItems {least} and 'uniqueItems' of {len(values)} values (lower minItems)"
            )
        return values

    def _may_be_negated(self, schema: Schema) -> bool:
        """Return whether alternatives of a ``oneOf`` may be negated to exclude each other."""
        types = []
        for each in listed(schema, "oneOf"):
            target = self._references.target(each) if isinstance(each, dict) else None
            parts = [part for part in (each, target) if isinstance(part, dict)]
            types.append(ALL_TYPES.intersection(*map(types_in, parts)))
        return any(one & other for one, other in itertools.combinations(types, 2))

    def _has_always_another(self, schema: Schema) -> bool:
        given = _assertions(schema)
        if schema.get("type") == "string":
            return not given - _TEXT and not is_enforced(str(schema.get("format")))
        is_open = schema.get("additionalProperties", True) in (True, {})
        if self._is_closed and "properties" in schema and "additionalProperties" not in schema:
            is_open = False
        return schema.get("type") == "object" and not given - _OBJECT and is_open


def _refusal() -> RequestError:
    return RequestError(
        "uses 'uniqueItems' of items that are neither listed values nor texts without pattern, "
        "format and maxLength nor open objects, which is not supported (leave it out)"
    )


def _assertions(schema: Schema) -> frozenset[str]:
    return _ASSERTIONS.intersection(schema)


def _of_others(type_name: str) -> frozenset[str]:
    return frozenset(name for name, of in TYPES_OF_KEYWORDS.items() if of != type_name)


def _is_unique(schema: Schema) -> bool:
    is_idle = "uniqueItems" not in schema or has_no_effect("uniqueItems", schema)
    return not is_idle and "array" in types_in(schema)


def _properties(schemas: Sequence[Schema], name: str | None) -> list[Any]:
    """Return the schemas of a property, or of the properties that no schema names."""
    found: list[Any] = []
    for each in schemas:
        found += mapping_of(each, "patternProperties").values()
        given = mapping_of(each, "properties")
        if name in given:
            found.append(given[name])
        else:
            found += [each.get(key) for key in ("additionalProperties", "unevaluatedProperties")]
    return found


def _items(schemas: Sequence[Schema]) -> list[Any]:
    found: list[Any] = []
    for each in schemas:
        for name in ("prefixItems", "items", "additionalItems", "unevaluatedItems"):
            if name in each:
                found += each[name] if isinstance(each[name], list) else [each[name]]
    return found


def _listed_values(schema: Schema) -> list[Any] | None:
    """Return the different values that a schema lists, if each has one spelling in JSON."""
    if schema.get("type") == "boolean" and not schema.keys() & {"const", "enum"}:
        return [False, True]
    if "enum" not in schema or _assertions(schema) - {"type", "enum"}:
        return None
    kept: dict[tuple[str, str], Any] = {}
    for value in listed(schema, "enum"):
        of = type_of(value)
        if of in types_in(schema):
            is_plain = of != "string" or (value.isprintable() and not {*value} & {'"', "\\"})
            if of in ("array", "object") or isinstance(value, float) or not is_plain:
                return None
            kept[of, str(value)] = value
    return list(kept.values())
