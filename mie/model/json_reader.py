"""Typed look-ups in a JSON object, for files that other programs wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ModelError: the file is missing or unreadable, is not JSON, or holds something other than an
            object. The message names the file.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {_json_type(value)}")
    return value


@dataclass(frozen=True, kw_only=True)
class JsonReader:
    """Look-ups by key that raise ModelError, naming ``source`` and the key, for a bad value.

    ``null`` counts as absent: Hugging Face writes it for "not set". A key that is absent, and for
    which the call gives no default, is an error.
    """

    values: Mapping[str, Any]
    source: str  # the file, as messages name it

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        """The integer under ``key``, at least ``minimum``."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be an integer", value)
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}", value)
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """The integer under ``key``, or None when there is none."""
        return None if self.values.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, *, default: float | None = None, above: float = 0.0) -> float:
        """The finite number under ``key``, greater than ``above``."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number", value)
        if not above < value < math.inf:
            raise self.error(key, f"must be a finite number greater than {above:g}", value)
        return float(value)

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        """The finite number under ``key``, or None when there is none."""
        return None if self.values.get(key) is None else self.number(key, above=above)

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under ``key``."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """The string under ``key``."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of strings under ``key``; empty when there is none."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise self.error(key, "must be a list of strings", value)
        return tuple(value)

    def nested(self, key: str) -> JsonReader:
        """A reader of the object under ``key``; of an empty one when there is none."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object", value)
        return JsonReader(values=value, source=f"{self.source}, {key}")

    def error(self, key: str, expected: str, got: object) -> ModelError:
        """The error that says what ``key`` should have been."""
        return ModelError(f"{self.source}: {key} {expected}, got {_shown(got)}")

    def _required(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: required key {key!r} is missing")
        return value


def _json_type(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
