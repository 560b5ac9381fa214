"""Convert dataclasses to JSON and back without a loss, for `RequestOutput`.

The annotations determine the conversion. Integer keys of mappings are restored, and numbers that
JSON does not have are written as text ("inf", "-inf", "nan"). This module names no fields.
"""

import math
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mie.errors import ConfigError, shown

T = TypeVar("T")


def as_dict(value: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object, including nested ones."""
    return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}


def from_dict(cls: type[T], values: Any, where: str = "") -> T:
    """Return the dataclass that `as_dict` converted. ``where`` is its place in a larger one.

    Raises:
        ConfigError: a field is unknown or missing, or its value is of another type.
    """
    where = where or cls.__name__
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a JSON object; got {values!r}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in known:
            raise ConfigError(f"{where} has no field {name!r}; known are: {', '.join(known)}")
    for name, field in known.items():
        is_required = field.default is field.default_factory is MISSING
        if is_required and name not in values:
            raise ConfigError(f"{where} lacks {name!r}")
    hints = get_type_hints(cls)
    return cls(
        **{name: _decoded(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    )


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return as_dict(value)
    if isinstance(value, dict):
        return {str(key): _encoded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _decoded(hint: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as the type that an annotation names."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_that_fits(arguments, value, where)
    if is_dataclass(hint):
        return from_dict(hint, value, where)  # type: ignore[arg-type]  # a class
    if hasattr(hint, "_fields") and isinstance(value, list) and len(value) == len(hint._fields):
        hints = get_type_hints(hint)  # of a named tuple
        places = zip(hint._fields, value, strict=True)
        return hint(*(_decoded(hints[name], each, f"{where}.{name}") for name, each in places))
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_decoded(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {
            _key(arguments[0], key, where): _decoded(arguments[1], each, f"{where}[{key!r}]")
            for key, each in value.items()
        }
    if hint is float and value in ("inf", "-inf", "nan"):
        return float(value)
    if hint is float and type(value) in (int, float):
        return float(value)
    # Not isinstance, because True must not be accepted as an integer.
    if hint is Any or type(value) is hint or (origin is Literal and value in arguments):
        return value
    raise ConfigError(f"{where} must be {getattr(hint, '__name__', hint)}; got {shown(value)}")


def _key(hint: Any, key: str, where: str) -> Any:
    if hint is not int:
        return key
    try:
        return int(key)
    except ValueError as error:
        raise ConfigError(f"{where} must have integer keys; got {key!r}") from error


def _first_that_fits(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return the value as one of several types, or raise the error of the last and fullest type."""
    if value is None and type(None) in hints:
        return None
    *others, last = [hint for hint in hints if hint is not type(None)]
    for hint in others:
        with suppress(ConfigError):
            return _decoded(hint, value, where)
    return _decoded(last, value, where)
