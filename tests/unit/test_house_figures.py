"""The script that counts rooms, arrows, lines and sentences counts them right."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "house_figures.py"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "from mie.llm import LLM\n",
        "errors.py": '"""Errors."""\n',
        "llm.py": "from mie import errors\nfrom .ops.rope import rope\n",
        "ops/__init__.py": "",
        "ops/rope.py": '"""Doc."""\n\n\ndef rope():\n    """Doc."""\n    # why\n'
        "    import mie.errors\n    return (\n        1\n    )\n",
        "ops/norm.py": "from . import rope\nfrom .rope import rope as again\nimport numpy.errors\n",
    }
    for name, text in files.items():
        path = tmp_path / "mie" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "mie"


def test_rooms_and_arrows_between_them_are_counted(package: Path) -> None:
    assert SCRIPT["rooms_of"](package) == {"errors", "llm", "ops"}
    assert SCRIPT["arrows"](package) == {("llm", "errors"), ("llm", "ops"), ("ops", "errors")}
    assert SCRIPT["circles"](SCRIPT["arrows"](package)) == set()


def test_a_circle_of_imports_is_seen(package: Path) -> None:
    (package / "errors.py").write_text("if TYPE_CHECKING:\n    from mie.llm import LLM\n")
    assert SCRIPT["circles"](SCRIPT["arrows"](package)) == {"errors", "llm", "ops"}


def test_lines_of_code_leave_out_docstrings_comments_and_blank_lines(package: Path) -> None:
    assert SCRIPT["code_lines"](package / "ops/rope.py") == {4, 7, 8, 9, 10}
    assert list(SCRIPT["functions"](package / "ops/rope.py")) == [(5, "rope")]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("One two three. Four `five six` seven.", [3, 3]),
        ("* One two three\n* four five six seven\n", [3, 4]),
        ("# Not this heading\n\n| nor | this | row |\n\n    nor this code block\n", []),
        ("```python\nnor this code block\n```\nBut [this link](to/a/page.md) counts.", [4]),
        ("Too short.", []),
    ],
)
def test_sentences_are_counted_outside_code_and_tables(text: str, lengths: list[int]) -> None:
    assert SCRIPT["sentence_lengths"](text) == lengths


def test_every_part_of_the_core_is_found() -> None:
    lines = SCRIPT["lines_of"](ROOT / "mie", SCRIPT["CORE"])
    assert all(lines.values()), lines


def test_the_page_has_a_place_for_the_tables() -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    assert page.count("<!-- house figures -->\n\n| ") == 1
    assert page.count(" |\n\n<!-- end of house figures -->") == 1
