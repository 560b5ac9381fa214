"""Look up typed values in JSON objects that other programs wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mie.errors import ModelError, shown


@dataclass(frozen=True, kw_only=True)
class JsonReader:
    """Looks up values by key. A bad value raises ModelError with ``source`` and the key.

    ``null`` counts as absent, because Hugging Face writes it for "not set". An absent key without a
    default is an error.
    """

    values: Mapping[str, Any]
    source: str  # the file's name in messages

    def integer(
        self, key: str, *, maximum: int, default: int | None = None, minimum: int = 1
    ) -> int:
        """Return the integer under ``key``, in ``minimum`` … ``maximum``."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be an integer", value)
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}", value)
        if value > maximum:
            raise self.error(key, f"must be at most {maximum}", value)
        return value

    def optional_integer(self, key: str, *, maximum: int) -> int | None:
        """Return the positive integer under ``key``, or None if it is absent."""
        return None if self.values.get(key) is None else self.integer(key, maximum=maximum)

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return the number under ``key``, in ``low`` … ``high``."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number", value)
        if not low <= value <= high:  # also NaN; an integer may be too large for a float
            raise self.error(key, f"must be a number in [{low:g}, {high:g}]", value)
        return float(value)

    def optional_number(self, key: str, *, low: float, high: float) -> float | None:
        """Return the number under ``key``, or None if it is absent."""
        return None if self.values.get(key) is None else self.number(key, low=low, high=high)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the boolean under ``key``."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return the string under ``key``."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the list of strings under ``key``, or an empty one if it is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise self.error(key, "must be a list of strings", value)
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids under ``key``: an integer, a list of integers, or none if it is absent."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
            raise self.error(key, "must be an integer or a list of integers", value)
        return tuple(ids)

    def nested(self, key: str) -> JsonReader:
        """Return a reader of the object under ``key``, or of an empty one if it is absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object", value)
        return JsonReader(values=value, source=f"{self.source}, {key}")

    def error(self, key: str, expected: str, got: object) -> ModelError:
        """Return the error for a bad value of ``key``."""
        return ModelError(f"{self.source}: {key} {expected}, got {shown(got)}")

    def _required(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: required key {key!r} is missing")
        return value
