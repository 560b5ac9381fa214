"""Read the bugs that tests plant in kernels and in their launches."""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def bugs_of(table: str) -> dict[str, dict[str, Any]]:
    """Return the bugs of a file in `tests/planted` by name, each with its file and its check."""
    sets = tomllib.loads((Path(__file__).parents[1] / "planted" / table).read_text())["set"]
    return {
        name: {**each, "old": old, "new": new}
        for each in sets
        for name, (old, new) in each["bugs"].items()
    }
