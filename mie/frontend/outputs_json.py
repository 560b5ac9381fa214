"""Convert dataclasses to JSON and back without a loss, for `RequestOutput`.

The annotations determine the conversion. Integer keys of mappings are restored, and numbers that
JSON does not have are written as text ("inf", "-inf", "nan"). This module names no fields.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mie.errors import ConfigError

T = TypeVar("T")


def as_dict(value: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object, including nested ones."""
    return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}


def from_dict(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the dataclass that `as_dict` converted.

    Raises:
        ConfigError: a field is unknown or missing, or its value is of another type.
    """
    return _dataclass(cls, values, cls.__name__)


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


def _dataclass(cls: type[T], values: Any, where: str) -> T:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a JSON object; got {values!r}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in known:
            raise ConfigError(f"{where} has no field {name!r}; known are: {', '.join(known)}")
    for name, field in known.items():
        is_optional = field.default is not MISSING or field.default_factory is not MISSING
        if name not in values and not is_optional:
            raise ConfigError(f"{where} lacks {name!r}")
    hints = get_type_hints(cls)
    return cls(
        **{name: _decoded(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    )


def _decoded(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_that_fits(arguments, value, where)
    if origin is Literal:
        return _checked(value in arguments, value, where, hint)
    if origin in (list, tuple):
        _checked(isinstance(value, list), value, where, hint)
        return origin(_decoded(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is dict:
        _checked(isinstance(value, Mapping), value, where, hint)
        return {
            _key(arguments[0], key, where): _decoded(arguments[1], each, f"{where}[{key!r}]")
            for key, each in value.items()
        }
    if is_dataclass(hint):
        return _dataclass(hint, value, where)  # type: ignore[arg-type]  # a class, not an instance
    return _plain(hint, value, where)


def _plain(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float:
        if value in ("inf", "-inf", "nan"):
            return float(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_checked(is_number, value, where, hint))
    # Not isinstance, because True must not be accepted as an integer.
    return _checked(type(value) is hint, value, where, hint)


def _key(hint: Any, key: str, where: str) -> Any:
    if hint is not int:
        return key
    try:
        return int(key)
    except ValueError as error:
        raise ConfigError(f"{where} must have integer keys; got {key!r}") from error


def _first_that_fits(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return the value as one of several types.

    The error of the last type is raised, because it says most.
    """
    if value is None and type(None) in hints:
        return None
    *others, last = [hint for hint in hints if hint is not type(None)]
    for hint in others:
        try:
            return _decoded(hint, value, where)
        except ConfigError:
            continue
    return _decoded(last, value, where)


def _checked(is_right: bool, value: Any, where: str, hint: Any) -> Any:
    if not is_right:
        raise ConfigError(f"{where} must be {getattr(hint, '__name__', hint)}; got {value!r}")
    return value
