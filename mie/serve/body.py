"""A request's body: one schema for checks, error reports and the published description.

A field is one of four kinds, at every depth:

* Declared: it has an effect, or is refused by name where it cannot have one.
* `Unsupported`: a demand that mie does not meet is refused by name. A value that means the same as
  leaving the field out is accepted. A hint is accepted and named in the header ``x-mie-ignored``.
* `WithoutEffect`: clients send it for their own or their provider's records.
* Unknown: named in the header too.

The fields of the second and third kind are a table, ``fields.yaml``.
"""

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema
from starlette.requests import Request

from mie.config.params.values import MAX_INTEGER
from mie.errors import shown
from mie.serve.errors import ApiError, invalid, unsupported
from mie.serve.fields import Unsupported, hints_of
from mie.serve.json_text import json_object
from mie.serve.serving import MAX_NAMED, Asked, Serving

logger = logging.getLogger(__name__)

MAX_FIELDS = 1000
"""Maximum number of fields of an object that a schema describes. Clients have about a hundred."""
MAX_OBJECTS = 2**16
"""Maximum number of such objects in a body: messages, parts, calls and so on."""

T = TypeVar("T")
B = TypeVar("B", bound="Body")
R = TypeVar("R", bound=Asked[Any])

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is checked up to its first wrong item.

Pydantic would make an error of each, and a body may hold millions."""


class Body(BaseModel):
    """A JSON object. It keeps unknown fields, and ``given`` is the object as it was sent."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    hints: ClassVar[Mapping[str, Unsupported]]
    """The marks of the fields that may have hints."""

    _given: dict[str, Any] = PrivateAttr()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Note the fields that may have hints, since every object of a request is searched."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.hints = hints_of(cls)

    @property
    def given(self) -> dict[str, Any]:
        """The object as the client sent it, with its fields in their order."""
        return self._given

    @property
    def known(self) -> dict[str, Any]:
        """The declared fields of the object as the client sent it, without nulls."""
        extra = self.model_extra or {}
        return {n: v for n, v in self._given.items() if n not in extra and v is not None}

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[B], info: ValidationInfo) -> B:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise refused(f"has {len(value)} fields; the limit is {MAX_FIELDS}")
        if info.context is not None and next(info.context["objects"]) >= MAX_OBJECTS:
            raise refused(f"is one of more than {MAX_OBJECTS} objects; that is the limit of a body")
        body = handler(value)
        body._given = value
        return body


class IgnoredObject(Body):
    """An object that is accepted and has no effect, such as a tool that another server runs."""


def whole(value: Any) -> Any:
    """Return 1.0 as 1 (the same number in JSON), and anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Whole:
    """Marks an integer. The range has two ends, because JSON allows integers of any size."""

    low: int
    high: int = MAX_INTEGER
    instead_of_zero: str | None = None
    """The values that are allowed, if zero is not."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        number = core_schema.int_schema(ge=self.low, le=self.high, strict=True)
        return core_schema.no_info_before_validator_function(self._check, number)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        return found if self.instead_of_zero is None else {**found, "not": {"const": 0}}

    def _check(self, value: Any) -> Any:
        number = whole(value)
        if self.instead_of_zero is not None and type(number) is int and number == 0:
            raise refused(f"must be {self.instead_of_zero}; got 0")
        return number


def any_of(*alternatives: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the fields that may be sent together. Each alternative has some.

    A field must be sent if the alternative does not allow null.
    """
    described = []
    for alternative in alternatives:
        required = [name for name, schema in alternative.items() if not _may_be_null(schema)]
        described.append(
            {"properties": alternative, **({"required": required} if required else {})}
        )
    return {"anyOf": described}


def _may_be_null(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "null" or None in schema.get("enum", ())


ABSENT: dict[str, Any] = {"type": "null"}
OFF: dict[str, Any] = {"enum": [None, False]}
SOME: dict[str, Any] = {"type": "array", "minItems": 1}
TEXT: dict[str, Any] = {"type": "string"}


def all_of(*conditions: dict[str, Any]) -> ConfigDict:
    """Return the settings of a body that has conditions on several fields together.

    The code that reads the fields checks the conditions.
    """
    return ConfigDict(json_schema_extra={"allOf": [*conditions]})


@dataclass(frozen=True)
class AtMost:
    """Limits the length of a list, an object or a text before anything in it is looked at."""

    most: int | str
    """A number, or the name of one of the server's: see `limits_of`."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        if isinstance(self.most, int):
            kinds = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}
            found[kinds[found["type"]]] = self.most
        return found

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        most = self.most if isinstance(self.most, int) else limit(info, self.most)
        if isinstance(value, list | dict | str) and len(value) > most:
            unit = "characters" if isinstance(value, str) else "entries"
            raise refused(f"may have at most {most} {unit}; got {len(value)}")
        return value


def limit(info: ValidationInfo, name: str) -> int:
    """Return a limit of the server's; bodies that no server reads have none."""
    return int((info.context or {}).get(name, sys.maxsize))


def limits_of(serving: Serving) -> dict[str, Any]:
    """Return the context of one body's validation: limits by their names, a counter of objects."""
    facts = serving.facts
    return {
        "vocabulary": facts.vocab_size,
        "prompt": serving.engine.limits.prompt_chars(facts.max_model_len),
        "objects": itertools.count(),
    }


def refused(message: str) -> PydanticCustomError:
    """Return a validator's error. ``message`` continues the name of the field."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def parse(data: bytes, cls: type[B], serving: Serving | None = None) -> B:
    """Return the body of a request, checked. Without a server there are no limits of its own.

    Raises:
        ApiError: it is not a JSON object, there is no such model, or a field is missing, wrong or
            not supported.
    """
    values = json_object(data)
    if serving is not None and isinstance(values.get("model"), str):
        serving.check_model(values["model"])  # the dialects of other models may differ
    try:
        return cls.model_validate(values, context=serving and limits_of(serving))
    except ValidationError as error:
        raise validation_error(error, values) from error


async def read(request: Request, cls: type[B], kind: Callable[..., R]) -> R:
    """Return a request with its body, checked, as an `Asked` of some ``kind``.

    Raises:
        ApiError: the body is wrong; see `parse`. Or it has a field without an effect, and the
            server runs with ``--strict``.
    """
    serving: Serving = request.app.state.serving
    body = parse(await request.body(), cls, serving)
    is_general = "model" not in cls.model_fields
    model = serving.names[0] if is_general else serving.check_model(getattr(body, "model", None))
    asked = kind(body=body, model=model, headers={}, serving=serving, scope=request.scope)
    asked.ignore(*itertools.islice(ignored_fields(body), MAX_NAMED))
    return asked


def ignored_fields(value: object, place: str = "") -> Iterator[str]:
    """Yield the paths of the fields of a body that are unknown, and of its hints."""
    if isinstance(value, IgnoredObject):
        yield place[:-1]
    elif isinstance(value, Body):
        yield from (f"{place}{_header_safe(name)}" for name in value.model_extra or ())
        for name, inner in vars(value).items():
            if name in value.hints and value.hints[name].is_hint(inner):
                yield f"{place}{name}"
            yield from ignored_fields(inner, f"{place}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for index, each in enumerate(value):
            yield from ignored_fields(each, f"{place}{index}.")


def _header_safe(name: str) -> str:
    plain = name if name.isascii() and name.isprintable() else ascii(name)
    return plain.replace(",", "_")[:64]


def validation_error(error: ValidationError, values: dict[str, Any]) -> ApiError:
    """Return the 400 for one wrong field; of a union, the alternative that came furthest."""
    all_errors = error.errors(include_url=False)
    of_field = [each for each in all_errors if each["loc"][:1] == all_errors[0]["loc"][:1]]
    first = max(of_field, key=_rank)
    kind, place, got = first["type"], first["loc"], first["input"]
    if kind == "missing" or (kind == "union_tag_not_found" and isinstance(got, dict)):
        name = place[-1] if kind == "missing" else _tag_name(first)
        keys = _keys(place[:-1] if kind == "missing" else place, values)
        keys.append(str(name))
        message = f"{'.'.join(keys)} is missing"
        return invalid(message, keys[0], code="missing_required_parameter")
    keys = _keys(place, values)
    path = ".".join(keys) or "the body"
    if kind == "unsupported":
        return unsupported(path, f"{first['msg']} (leave it out); got {shown(got)}")
    return invalid(f"{path}{_what_is_wrong(first)}", keys[0] if keys else None)


def _rank(error: ErrorDetails) -> tuple[int, bool, bool]:
    """Return the rank of an error of a field; the first error of the highest rank is reported."""
    kind = error["type"]
    return len(error["loc"]), not kind.endswith("_type"), kind != "missing"


def _what_is_wrong(error: ErrorDetails) -> str:
    """Return the message of an error without the path that it begins with."""
    kind, context, got = error["type"], error.get("ctx", {}), shown(error["input"])
    if kind == "refused":
        return f" {error['msg']}"
    if kind == "literal_error":
        return f" must be {context['expected']}; got {got}"
    if kind == "union_tag_invalid":
        kinds = " or ".join(context["expected_tags"].rsplit(", ", 1))
        return f".{_tag_name(error)} must be {kinds}; got {shown(context['tag'])}"
    if kind in ("model_type", "model_attributes_type", "dict_type", "union_tag_not_found"):
        return f" must be an object; got {got}"
    if kind == "list_type":
        return f" must be a list; got {got}"
    if kind.endswith("too_short"):
        return " must not be empty"
    if kind == "string_too_long":
        length = len(error["input"])
        return f" may have at most {context['max_length']} characters; got {length}"
    return f": {error['msg']}; got {got}"


def _tag_name(error: ErrorDetails) -> str:
    """Return the name of the field that distinguishes several objects."""
    name = str(error["ctx"]["discriminator"])
    return name.strip("'") if name.startswith("'") else "type"


def _keys(place: tuple[int | str, ...], value: Any) -> list[str]:
    """Return the keys in a place of pydantic's. Such a place has names of types between them."""
    if not place:
        return []
    first, rest = place[0], place[1:]
    skipping = _keys(rest, value)
    is_key = isinstance(value, dict) and first in value
    is_index = isinstance(value, list) and isinstance(first, int) and first < len(value)
    if not is_key and not is_index:
        return skipping
    return max([str(first), *_keys(rest, value[first])], skipping, key=len)
