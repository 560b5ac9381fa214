"""Read the bugs that tests plant in kernels and in their launches."""

from pathlib import Path
from typing import Any

from toml_files import read_toml


def bugs_of(table: str) -> dict[str, dict[str, Any]]:
    """Return the bugs of a file in `tests/planted` by name, each with its file and its check."""
    sets = read_toml(Path(__file__).parents[1] / "planted" / table)["set"]
    return {
        name: {**each, "old": old, "new": new}
        for each in sets
        for name, (old, new) in each["bugs"].items()
    }
