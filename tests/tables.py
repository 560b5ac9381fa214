"""Read tables of cases from `tests/data`, and choose the cases of `make test`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def table(file: str, name: str) -> list[Any]:
    """Return the rows of a table of a JSON file."""
    rows: list[Any] = json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))[name]
    return rows


def yaml_table(file: str) -> Any:
    """Return a YAML file of `tests/serve/data`, read by libyaml where PyYAML has it."""
    import yaml  # not installed where only the quick tests of a Python run

    path = DATA.parent / "serve/data" / f"{file}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def quick_third(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of a test, of which `make test` runs every third."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if number % 3 else [])
        for number, case in enumerate(cases)
    ]
