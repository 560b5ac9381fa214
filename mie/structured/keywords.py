"""Read and write single keywords of a JSON schema, for `mie.structured.schemas`."""

from __future__ import annotations

from typing import Any

from mie.errors import RequestError, shown
from mie.structured.schema_values import BOUNDS, checked_bound

Schema = dict[str, Any]

TYPES_OF_KEYWORDS = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys((*BOUNDS, "multipleOf"), "number"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), "object"),
    **dict.fromkeys(("propertyNames", "required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object"),
    "unevaluatedProperties": "object",
}
"""The type of the values that a keyword restricts. It has no effect on values of other types."""


_LEAST_POSITIVE = 1e-15


def name_pattern(names: Schema) -> str:
    """Return the pattern of names that a rewritten schema allows."""
    if "pattern" in names:
        if names.keys() & {"minLength", "maxLength"}:
            raise RequestError("uses 'propertyNames' with a pattern and a length (write a pattern)")
        return str(names["pattern"])
    if "format" in names:
        raise RequestError(f"uses 'propertyNames' with format {names['format']} (write a pattern)")
    return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"


def has_no_effect(name: str, schema: Schema) -> bool:
    """Return whether a keyword that is not written can be left out."""
    value = schema[name]
    if name == "uniqueItems":
        return value is not True or schema.get("maxItems", 2) in (0, 1)
    if name == "contains":
        return schema.get("minContains", 1) == 0 and "maxContains" not in schema
    if name == "unevaluatedItems":
        return value is True or value == {} or ("items" in schema and schema["items"] is not False)
    if name == "unevaluatedProperties":
        return value is False or value is True or value == {} or "additionalProperties" in schema
    if name == "if":
        return all(schema.get(each, True) in (True, {}) for each in ("then", "else"))
    return name != "not" or value is False


def is_nothing(schema: Schema) -> bool:
    """Return whether a schema accepts nothing, because of a ``not`` that accepts all."""
    return schema.get("not", False) in (True, {}) and "not" in schema


def write_bound(name: str, value: Any, schema: Schema, written: Schema) -> None:
    """Write a bound of numbers. In draft 4 a boolean says whether it is exclusive."""
    if isinstance(value, bool):
        return
    exclusive = f"exclusive{name.capitalize()}"
    if schema.get(exclusive) is True:
        name = exclusive
    name, value = checked_bound(name, value, is_integer=is_integer(schema))
    side = BOUNDS[name]
    if name in written:
        value = (min if side > 0 else max)(value, written[name])
    written[name] = value


def narrow_bounds(written: Schema) -> None:
    """Correct a range of numbers that lies between two neighbouring integers.

    llguidance 1.9 allows the integer of an exclusive bound that is the end nearer to zero. Positive
    numbers begin at 1e-15 then.

    Raises:
        RequestError: the end is not zero.
    """
    low, high = written.get("exclusiveMinimum"), written.get("exclusiveMaximum")
    above, below = written.get("maximum", high), written.get("minimum", low)
    if is_integer(written):
        return
    if low == 0 and above is not None and 0 < above < 1:
        written["minimum"] = max(written.get("minimum", 0), _LEAST_POSITIVE)
        del written["exclusiveMinimum"]
        return
    for name, sign, end, other in (
        ("exclusiveMinimum", 1, low, above),
        ("exclusiveMaximum", -1, high, below),
    ):
        if end is None or other is None or end != int(end) or end * sign <= 0:
            continue
        if 0 < (other - end) * sign < 1:
            raise RequestError(
                f"has {name} {shown(end)} in a range that llguidance would widen to it (write a "
                "bound that is no integer)"
            )


def is_integer(schema: Schema) -> bool:
    """Return whether the numbers of a schema are integers."""
    types = schema.get("type")
    return types == "integer" or (isinstance(types, list) and "number" not in types)


def drop_counts(written: Schema) -> None:
    """Leave out numbers of properties that follow from the rest."""
    if written.get("minProperties", 0) <= len({*texts_of(written, "required")}):
        written.pop("minProperties", None)
    is_listed = written.get("additionalProperties") is False and "patternProperties" not in written
    if is_listed and written.get("maxProperties", 0) >= len(written.get("properties", ())):
        written.pop("maxProperties", None)


def require_discriminator(schema: Schema, alternatives: list[Any]) -> None:
    """Require the property by which OpenAPI distinguishes alternatives."""
    discriminator = schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    for each in alternatives:
        if isinstance(name, str) and isinstance(each, dict) and "properties" in each:
            each["required"] = [*texts_of(each, "required"), name]


def has_references_to_tell_apart(schema: Any) -> bool:
    """Return whether references are among the alternatives of a ``oneOf`` of a value."""
    left = [schema]
    for each in left:
        if isinstance(each, dict):
            alternatives = listed(each, "oneOf")
            if any(isinstance(inner, dict) and "$ref" in inner for inner in alternatives):
                return True
            left += [*alternatives, *listed(each, "anyOf"), *listed(each, "allOf")]
    return False


def types_of(schema: Schema) -> list[str] | None:
    """Return the types that a schema allows, or None if it allows all."""
    given = schema.get("type")
    if given is None:
        return None
    listed = given if isinstance(given, list) else [given]
    return ["number" if each == "integer" else str(each) for each in listed]


def listed(schema: Schema, name: str) -> list[Any]:
    """Return the list of a keyword, or an empty list without the keyword."""
    value = schema.get(name, [])
    if not isinstance(value, list):
        raise RequestError(f"has {name} that is not a list: {shown(value)}")
    return value


def texts_of(schema: Schema, name: str) -> list[str]:
    """Return the texts in the list of a keyword."""
    value = schema.get(name)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def mapping_of(schema: Schema, name: str) -> Schema:
    """Return the object of a keyword, or an empty object without the keyword."""
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise RequestError(f"has {name} that is not an object: {shown(value)}")
    return value
