"""Check that tests read private state in one place only, so that a redesign changes few tests."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
READER = TESTS / "audit.py"
"""The file that may read private state."""
BUDGET = 60
"""Number of times that all other files may read private state together."""
PUBLIC = {"_replace", "_fields", "_asdict", "_exit"}
"""Names that belong to the interface of named tuples and of ``os``."""


def private_reads(source: str) -> list[str]:
    """Return the private names that a file reads or sets on other objects than its own."""
    return [
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_tests_read_private_state_in_one_file() -> None:
    found = {
        str(path.relative_to(TESTS)): names
        for path in sorted(TESTS.rglob("*.py"))
        if path != READER and (names := private_reads(path.read_text(encoding="utf-8")))
    }
    number = sum(map(len, found.values()))
    assert number <= BUDGET, f"{number} reads of private state: let tests/audit.py read it; {found}"


def test_a_read_of_private_state_is_found() -> None:
    source = "self._own\ncls._own\nself.engine._runner.rows\nrow._replace(x=1)\nengine.__class__\n"
    assert private_reads(source) == ["_runner"]
    assert private_reads("engine._runner = script") == ["_runner"]
    assert private_reads(READER.read_text(encoding="utf-8"))
