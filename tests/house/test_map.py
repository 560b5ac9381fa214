"""The map in docs/architecture.md names the rooms that exist."""

import re
from collections import Counter
from pathlib import Path

import mie

PACKAGE = Path(mie.__file__).parent
MAP = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")


def test_the_map_names_every_room_and_no_other() -> None:
    modules = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    section = MAP.partition("## The map of rooms\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\|[^|]*\|([^|]*)\|", section, re.MULTILINE)
    rooms = {room for cell in named for room in re.findall(r"`(\w+)`", cell)}
    assert rooms == modules - {"__init__", "__main__"}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Tests import each other by these names, whatever their folder is."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("*.py"))
    shared = {name for name, count in names.items() if count > 1}
    assert shared == {"conftest.py"}
