"""Find the shape of a model by name, in `catalog.json` or in a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.locate import locate_model


def read_catalog() -> Any:
    """Return the devices and the models of `catalog.json`."""
    return json.loads(Path(__file__).with_name("catalog.json").read_text(encoding="utf-8"))


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(read_catalog()["models"])
"""Shapes as in their ``config.json``, without weights."""


def find_shape(name: str) -> ModelConfig:
    """Return the shape of a model in the table, or of one that `locate_model` finds.

    Raises:
        ModelError: it is neither, or its ``config.json`` cannot be used.
    """
    if name in SHAPES:
        return ModelConfig.from_hf(SHAPES[name], source=name)
    return ModelConfig.load(locate_model(name))
