"""Read the supported families from ``families.json``: a row of flags and defaults for each.

A row has the fields of `Family` that differ from the defaults. ``like`` names rows and parts. Their
fields are included. Objects are merged key by key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mie.checkpoint.family import Family
from mie.model.config import Names
from mie.model.layers.config import RecurrentLayers

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ROWS: Mapping[str, Mapping[str, Any]] = _TABLES["parts"] | _TABLES["families"]


def _complete(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the fields of the rows that it is like."""
    own = dict(row)
    like, found = own.pop("like", []), dict[str, Any]()
    for name in [like] if isinstance(like, str) else like:
        found = _merged(found, _complete(_ROWS[name]))
    return _merged(found, own)


def _merged(row: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(row)
    for key, value in own.items():
        is_object = isinstance(value, dict) and isinstance(row.get(key), dict)
        merged[key] = _merged(row[key], value) if is_object else value
    return merged


def _family(row: Mapping[str, Any]) -> Family:
    values = _with_tuples(row)
    values["names"] = Names(**_with_tuples(row.get("names", {})))
    if "recurrent" in row:
        recurrent = _with_tuples(row["recurrent"])
        if "names" in recurrent:
            recurrent["names"] = Names(**_with_tuples(recurrent["names"]))
        values["recurrent"] = RecurrentLayers(**recurrent)
    return Family(**values)


def _with_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: _family(_complete(row)) for name, row in _TABLES["families"].items()}
)
"""The supported families by the name in ``architectures``."""
