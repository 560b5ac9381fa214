"""The README begins with a picture of a real run, which can be read on light and on dark pages."""

from __future__ import annotations

import runpy
from pathlib import Path

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
