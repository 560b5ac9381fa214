"""Read JSON that other programs wrote, within limits and without ambiguity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mie.errors import MieError, shown
from mie.system.files import read_file

MAX_DIGITS = 1000
"""Digits of an integer in JSON. Parsing takes time that grows with their square."""


def read_json_object(path: Path, max_bytes: int, error_type: type[MieError]) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        MieError: an ``error_type`` whose message names the file. The file is missing or unreadable,
            is not a regular file, is longer than ``max_bytes``, is not JSON, or holds something
            other than an object.
    """
    try:
        value = parse_json(read_file(path, max_bytes))
    except OSError as error:
        raise error_type(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise error_type(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise error_type(f"{path} must contain a JSON object, got {_json_type(value)}")
    return value


def parse_json(data: bytes) -> Any:
    """Parse the JSON text ``data``.

    An object that gives a name two different values is refused, because programs differ in which
    one they take.

    Raises:
        ValueError: it is not JSON in UTF-8, gives a name two values, or has an integer of too many
            digits.
        RecursionError: it is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) == len(pairs):
            return values
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen and seen[name] != value:
                raise ValueError(f"{shown(name)} is given twice")
            seen[name] = value
        return values

    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique, parse_int=_integer)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits; the limit is {MAX_DIGITS:,}")
    return int(digits)


def _json_type(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
