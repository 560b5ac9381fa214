"""The README begins with a picture of a real run, which can be read on light and on dark pages."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "draw_readme.py"))
PICTURE = ROOT / "docs" / "pictures" / "blocks.svg"


def test_the_picture_is_what_the_script_draws() -> None:
    drawn = SCRIPT["draw"](*SCRIPT["record_run"]())
    assert drawn == PICTURE.read_text(encoding="utf-8"), "run scripts/draw_readme.py"


def test_the_readme_begins_with_the_installation_lines_that_work_and_the_picture() -> None:
    beginning = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert len(beginning.splitlines()) < 40
    places = [beginning.index(each) for each in ("pip install mie", "```python", "blocks.svg")]
    assert places == sorted(places)


def luminance(color: str) -> float:
    """Return the relative luminance of "#rrggbb" as WCAG 2 defines it."""
    shares = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors, from 1 to 21."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117", "#131416"])
def test_text_beside_the_boxes_can_be_read_on_every_page(page: str) -> None:
    assert contrast(SCRIPT["GRAY"], page) > 4


@pytest.mark.parametrize("fill", SCRIPT["FILLS"].values())
def test_text_in_a_box_can_be_read(fill: str) -> None:
    assert contrast(SCRIPT["INK"], fill) > 7
