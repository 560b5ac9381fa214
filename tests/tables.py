"""Read tables of cases from `tests/data`."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def table(file: str, name: str) -> list[Any]:
    """Return the rows of a table of a JSON file."""
    rows: list[Any] = json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))[name]
    return rows
