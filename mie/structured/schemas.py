"""Rewrite JSON schemas for llguidance. It has fewer keywords and does not close objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mie.errors import RequestError, shown
from mie.structured.formats import text_schemas, with_rust_classes
from mie.structured.keywords import (
    TYPES_OF_KEYWORDS,
    drop_counts,
    has_no_effect,
    has_references_to_tell_apart,
    is_nothing,
    listed,
    mapping_of,
    name_pattern,
    narrow_bounds,
    require_discriminator,
    texts_of,
    types_of,
    write_bound,
)
from mie.structured.logic import Logic, types_in
from mie.structured.references import DEPENDENT, DYNAMIC, References
from mie.structured.schema_values import (
    BOUNDS,
    COUNTS,
    check_multiples,
    check_value,
    checked_count,
    multiple_in,
)

Schema = dict[str, Any]
Names = frozenset[str]

_MAX_CONTAINED = 8
_OLD_DRAFT = "http://json-schema.org/draft"
_OLD_DRAFTS = tuple(f"{draft}/schema" for draft in ("2019-09", "draft-07", "draft-06", "draft-04"))
_AS_THEY_ARE = ("type", "required", "multipleOf")
_MAPPINGS = ("properties", "patternProperties")
_INNER = ("additionalProperties", "items", "prefixItems", "additionalItems")
_CHOICES = ("anyOf", "oneOf")


def rewritten(
    schema: Schema, *, is_closed: bool, without_unique: bool = False, part: Schema | None = None
) -> Schema:
    """Return a schema for llguidance. The given schema accepts each of its values.

    Keywords without effect and annotations are left out. If ``is_closed`` and an object's schema
    names properties, the object has no others, except with ``additionalProperties``. Each schema of
    an object may name some: its own, ``allOf``, ``$ref``, and the chosen ``anyOf`` or ``oneOf``.
    With ``without_unique``, ``uniqueItems`` is left out: a matcher enforces it.
    With ``part``, only that part of the schema is returned.

    Raises:
        RequestError: a keyword, a number or a reference cannot be followed. The message continues
            "the schema".
    """
    return _Rewriting(schema, is_closed, without_unique).result(schema if part is None else part)


@dataclass(kw_only=True, eq=False)
class _Facts:
    """The conditions of several schemas on one value."""

    names: dict[str, None] = field(default_factory=dict)
    """The names of properties, in their order."""
    is_open: bool = False
    """Whether they limit properties that they do not name."""
    multiples: set[Fraction] = field(default_factory=set)

    def add(self, other: _Facts) -> None:
        self.names |= other.names
        self.is_open |= other.is_open
        self.multiples |= other.multiples


class _Rewriting:
    """One schema that is being rewritten.

    ``allowed`` are the names that other schemas of the same object name, or None if the object
    stays open.
    """

    def __init__(self, root: Schema, is_closed: bool, without_unique: bool) -> None:
        self._root = root
        self._draft = str(root.get("$schema")).rstrip("#")
        self._without_unique = without_unique
        self._allowed_at_first: Names | None = frozenset() if is_closed else None
        self._references = References(root)
        self._logic = Logic(self._references)
        self._own_facts: dict[int, _Facts] = {}  # by the identity of a schema
        # The names that definitions have in the grammar.
        self._names: dict[tuple[int, Names | None], str] = {}
        self._definitions: list[tuple[str, Any, Names | None]] = []
        self._inlined: list[int] = []
        self._made: list[Schema] = []  # schemas that are known by their identity

    def result(self, start: Schema) -> Schema:
        schema = self._fresh(start)
        definitions = {}
        for name, target, allowed in self._definitions:  # a definition may add others to the end
            definitions[name] = self._of(target, allowed)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if self._draft.endswith((*_OLD_DRAFTS, "2020-12/schema")):
            # llguidance knows the old drafts by their first addresses only.
            draft = self._draft.replace("https://json-schema.org/draft-0", f"{_OLD_DRAFT}-0")
            schema = {"$schema": draft, **schema}
        return {**schema, "$defs": definitions} if definitions else schema

    def _fresh(self, schema: Any) -> Any:
        """Rewrite the only schema of a value."""
        allowed = self._allowed_at_first
        if has_references_to_tell_apart(schema):
            return self._reference(schema, allowed)  # an alternative may contain it
        return self._of(schema, allowed)

    def _reference(self, target: Any, allowed: Names | None) -> Schema:
        key = id(target), allowed
        if key not in self._names:
            self._names[key] = f"d{len(self._names)}"
            self._definitions.append((self._names[key], target, allowed))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _of(self, schema: Any, allowed: Names | None) -> Any:
        """Rewrite a schema. It may be one of several schemas of the same value."""
        try:
            return self._of_keywords(schema, allowed)
        except RequestError as error:
            raise self._references.placed(error, schema) from error

    def _of_keywords(self, schema: Any, allowed: Names | None) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise RequestError(f"has {shown(schema)} where a schema must be an object or a boolean")
        schema = self._references.effective(schema)
        if is_nothing(schema):
            return False
        if self._references.has_multiples:
            check_multiples(self._facts(schema).multiples)
        types = types_of(schema)
        allowed = self._also_unevaluated(schema, allowed)
        written: Schema = {}
        more: list[Any] = []
        for name, value in schema.items():
            if types is None or TYPES_OF_KEYWORDS.get(name, "") in ("", *types):
                self._write(name, value, schema, allowed, written, more)
        if more:
            written["allOf"] = [*written.get("allOf", ()), *more]
        self._write_names(schema, written)
        if allowed is not None and "properties" in written:
            self._close(schema, allowed, written)
        drop_counts(written)
        narrow_bounds(written)
        return written

    def _write(
        self,
        name: str,
        value: Any,
        schema: Schema,
        allowed: Names | None,
        written: Schema,
        more: list[Any],
    ) -> None:
        """Write a keyword, and schemas that are to hold as well."""
        if name in _AS_THEY_ARE:
            written[name] = value
        elif name in ("const", "enum"):
            check_value(name, value)
            written[name] = value
        elif name in BOUNDS:
            write_bound(name, value, schema, written)
        elif name in COUNTS:
            count = checked_count(name, value)
            if count is not None:
                written[name] = count
        elif name in ("pattern", "format"):
            # Both are written when the pattern comes.
            if "pattern" not in schema or name == "pattern":
                for each in text_schemas(schema):
                    is_free = not {*each} & {*written, "anyOf"}
                    written.update(each) if is_free else more.append(each)
        elif name in _MAPPINGS:
            spelt = with_rust_classes if name == "patternProperties" else str
            written[name] = {
                spelt(each): self._fresh(inner) for each, inner in mapping_of(schema, name).items()
            }
        elif name in _INNER:
            if name != "additionalItems" or isinstance(schema.get("items"), list):
                is_list = isinstance(value, list)
                written[name] = (
                    [self._fresh(each) for each in value] if is_list else self._fresh(value)
                )
        elif name == "allOf":
            written[name] = [
                self._of(each, self._allowed_in(schema, name, each, allowed))
                for each in listed(schema, name)
            ]
        elif name in _CHOICES:
            self._write_choice(name, schema, allowed, written, more)
        elif name == "not" and value is not False:
            negation = self._logic.negation(value, types_in(schema))
            more.append(self._of(negation, self._allowed_in(schema, name, None, allowed)))
        elif name == "if" and not has_no_effect(name, schema):
            made = self._logic.conditional(schema)
            more.append(self._of(made, self._allowed_in(schema, name, None, allowed)))
        elif name in ("$ref", *DYNAMIC):
            target = self._references.target(schema)
            inherited = self._allowed_in(schema, "$ref", target, allowed)
            written.update(self._reference(target, inherited))
        elif name == "contains" and not has_no_effect(name, schema):
            more.append(self._of(self._containing(schema), None))
        elif name in DEPENDENT:
            self._write_dependent(name, schema, allowed, written, more)
        elif name == "uniqueItems" and self._without_unique:
            return
        elif not has_no_effect(name, schema):
            raise RequestError(f"uses {name!r}, which is not supported (leave it out)")

    def _write_choice(
        self, name: str, schema: Schema, allowed: Names | None, written: Schema, more: list[Any]
    ) -> None:
        """Write ``anyOf``, or ``oneOf`` as an ``anyOf`` of disjoint schemas."""
        inherited = self._allowed_in(schema, name, None, allowed)
        made = None
        if name == "oneOf" and "discriminator" not in schema:
            made = self._logic.exactly_one(schema)
        rewrite = self._alternative if name == "oneOf" else self._of
        alternatives = schema[name] if made is None else made["anyOf"]
        choice = [rewrite(each, inherited) for each in listed({name: alternatives}, name)]
        require_discriminator(schema, choice)
        name = name if made is None else "anyOf"
        if name in written:
            more.append({name: choice})
        else:
            written[name] = choice

    # Schemas of one value

    def _facts(self, schema: Any) -> _Facts:
        """Return the facts of a schema and of the other schemas in place."""
        found = _Facts()
        seen = set()
        left = [schema]
        for each in left:
            if isinstance(each, dict) and id(each) not in seen:
                seen.add(id(each))
                found.add(self._facts_alone(each))
                left += [inner for _, inner in self._references.in_place(each)]
        return found

    def _facts_alone(self, schema: Schema) -> _Facts:
        schema = self._references.effective(schema)
        if id(schema) not in self._own_facts:
            others = ("additionalProperties", "patternProperties", "unevaluatedProperties")
            multiple = multiple_in(schema)
            self._own_facts[id(schema)] = _Facts(
                names=dict.fromkeys(
                    [*mapping_of(schema, "properties"), *texts_of(schema, "required")]
                ),
                is_open=any(schema.get(name, False) is not False for name in others),
                multiples=set() if multiple is None else {multiple},
            )
        return self._own_facts[id(schema)]

    def _allowed_in(
        self, schema: Schema, keyword: str, member: Any, allowed: Names | None
    ) -> Names | None:
        """Return the names that other schemas may name, for a member or an alternative."""
        if allowed is None:
            return None
        others = _Facts()
        others.add(self._facts_alone(schema))
        for name, each in self._references.in_place(schema):
            if name != keyword or (name not in _CHOICES and each is not member):
                others.add(self._facts(each))
        return None if others.is_open else frozenset({*allowed, *others.names})

    def _close(self, schema: Schema, allowed: Names, written: Schema) -> None:
        others = _Facts(names=dict.fromkeys(texts_of(schema, "required")))
        for _, each in self._references.in_place(schema):
            others.add(self._facts(each))
        if "additionalProperties" in written or others.is_open:
            return
        further = dict.fromkeys([*others.names, *sorted(allowed)], True)
        properties = written["properties"]
        written["properties"] = {**dict.fromkeys(properties), **further, **properties}
        written["additionalProperties"] = False

    def _also_unevaluated(self, schema: Schema, allowed: Names | None) -> Names | None:
        """Close an object if its schema has ``unevaluatedProperties`` false."""
        if schema.get("unevaluatedProperties") is not False:
            return allowed
        keywords = {name for name, _ in self._references.in_place(schema)}
        left = [each for _, each in self._references.in_place(schema)]
        seen = set()
        for each in left:
            if isinstance(each, dict) and id(each) not in seen:
                seen.add(id(each))
                keywords |= {name for name, _ in self._references.in_place(each)}
                left += [inner for _, inner in self._references.in_place(each)]
        if keywords & {*_CHOICES} or any(self._facts(each).is_open for each in left):
            raise RequestError(
                "uses 'unevaluatedProperties' with alternatives or with additionalProperties, "
                "which is not supported (write additionalProperties)"
            )
        return frozenset() if allowed is None else allowed

    def _alternative(self, schema: Any, allowed: Names | None) -> Any:
        """Rewrite an alternative of ``oneOf``. llguidance must distinguish it from the others."""
        target = schema
        if isinstance(schema, dict) and "$ref" in schema:
            others = schema.keys() & {
                *TYPES_OF_KEYWORDS,
                "type",
                "const",
                "enum",
                "allOf",
                *_CHOICES,
            }
            target = schema if others else self._references.target(schema)
        if id(target) in self._inlined:
            target = schema
        self._inlined.append(id(target))
        result = self._of(target, allowed)
        self._inlined.pop()
        return result

    def _write_dependent(
        self, name: str, schema: Schema, allowed: Names | None, written: Schema, more: list[Any]
    ) -> None:
        """Write the condition that holds if an object has a property."""
        for trigger, value in mapping_of(schema, name).items():
            needed = {"required": value} if isinstance(value, list) else value
            if self._accepts_all(needed):
                continue
            inherited = self._allowed_in(schema, name, value, allowed)
            is_object = types_in(schema) == {"object"}
            if is_object and trigger in texts_of(schema, "required"):
                more.append(self._of(needed, inherited))
                continue
            choice: list[Schema] = [
                {"type": "object", "properties": {trigger: False}},
                {"type": "object", "required": [trigger], "allOf": [needed]},
            ]
            if not is_object:
                choice.append({"not": {"type": "object"}})
            self._made.append({"anyOf": choice})
            more.append(self._of(self._made[-1], inherited))

    def _containing(self, schema: Schema) -> Schema:
        """Return a schema of lists with an item that ``contains`` accepts among the first."""
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            raise RequestError(
                "uses 'contains' with minContains or maxContains, which is not supported (leave "
                "them out)"
            )
        first = "items" if self._draft.endswith(_OLD_DRAFTS) else "prefixItems"
        end = checked_count("maxItems", schema.get("maxItems", _MAX_CONTAINED)) or 0
        choice: list[Schema] = [
            {"type": "array", first: [*[True] * index, schema["contains"]], "minItems": index + 1}
            for index in range(min(end, _MAX_CONTAINED))
        ]
        if types_in(schema) != {"array"}:
            choice.append({"not": {"type": "array"}})
        self._made.append({"anyOf": choice})
        return self._made[-1]

    def _accepts_all(self, schema: Any) -> bool:
        return self._of(schema, None) in (True, {}, {"required": []})

    def _write_names(self, schema: Schema, written: Schema) -> None:
        """Write ``propertyNames`` as properties or a pattern, if that is possible."""
        if "propertyNames" not in schema or "object" not in (types_of(schema) or ("object",)):
            return
        rule = schema["propertyNames"]
        while isinstance(rule, dict) and {*rule} - {"title", "description"} == {"$ref"}:
            rule = self._references.target(rule)
        names = self._of(rule, None)
        if names is False:
            names = {"enum": []}
        names = {} if names is True else {key: names[key] for key in names if key != "type"}
        if not names:
            return
        others = written.get("additionalProperties", True)
        given = written.get("properties", {})
        if names.keys() <= {"const", "enum"}:
            allowed = listed(names, "enum") if "enum" in names else [names["const"]]
            if "const" in names:
                allowed = [each for each in allowed if each == names["const"]]
            kept = [*(each for each in given if each in allowed), *map(str, allowed)]
            written["properties"] = {each: given.get(each, others) for each in kept}
        elif names.keys() <= {"pattern", "format", "minLength", "maxLength"} and not (
            given or "patternProperties" in written
        ):
            written["patternProperties"] = {name_pattern(names): others}
        else:
            raise RequestError(
                "uses 'propertyNames' that is neither a list nor a pattern nor a length, or beside "
                "'properties', which is not supported (write patternProperties)"
            )
        written["additionalProperties"] = False
