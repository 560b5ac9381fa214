"""Fields of requests that have no effect, and the rule for all of them.

A hint cannot change a token: it is accepted, and the header ``x-mie-ignored`` names it. A demand
would be broken: it is refused by name. The table ``fields.yaml`` assigns the values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError, core_schema

M = TypeVar("M", bound=BaseModel)

WithoutEffect = Annotated[Any, WithJsonSchema({"description": "It has no effect."})]
"""A field that may have any value, since none could change an answer."""
ANY = "any"
"""In the table: every value that is not neutral is a hint."""


@dataclass(frozen=True)
class Unsupported:
    """Marks a field that mie reads and does not implement."""

    why: str
    neutral: Sequence[Any] = ()
    """Values that mean the same as leaving the field out. Null is neutral too."""
    hints: Sequence[Any] | None = ()
    """Values that cannot change a token. They are accepted and named; None is every other value."""

    def is_hint(self, value: object) -> bool:
        """Return whether an accepted value is named in the header."""
        return value is not None and not _is_in(value, self.neutral)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if self.hints is None:
            return {"description": f"It has no effect: {self.why}."}
        return {"enum": [None, *self.neutral, *self.hints], "description": self.why}

    def _check(self, value: object) -> object:
        if value is None or self.hints is None or _is_in(value, (*self.neutral, *self.hints)):
            return value
        raise PydanticCustomError("unsupported", "{why}", {"why": self.why})


def _is_in(value: object, others: Sequence[Any]) -> bool:
    return any(_is_same(value, each) for each in others)


def _is_same(value: object, other: object) -> bool:
    """Return whether two values are equal in JSON, where 1 is 1.0 and false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def hints_of(body: type[BaseModel]) -> Mapping[str, Unsupported]:
    """Return the marks of a body's fields that may have hints, by the names of the fields."""
    marked = ((n, m) for n, field in body.model_fields.items() for m in field.metadata)
    return {n: m for n, m in marked if isinstance(m, Unsupported) and m.hints != ()}


FIELDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text(encoding="utf-8"))
)
"""The rows of the table by the names of its parts."""


def mark_of(row: Sequence[Any] | Mapping[str, Any]) -> Unsupported:
    """Return the mark of a row."""
    if not isinstance(row, Mapping):
        return Unsupported(row[0], row[1:])
    hints = row["hints"]
    return Unsupported(row["why"], row.get("neutral", ()), None if hints == ANY else hints)


def with_fields_of(part: str) -> Callable[[type[M]], type[M]]:
    """Return a decorator that adds the fields of a part of ``fields.yaml`` to a body."""

    def add(body: type[M]) -> type[M]:
        fields: dict[str, Any] = {}
        for name, row in FIELDS[part].items():
            kind = WithoutEffect if row is None else Annotated[Any, mark_of(row)]
            fields[name] = (kind, None)
        return create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
        )

    return add
