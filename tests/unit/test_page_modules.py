"""Run the unit tests of the page's JavaScript modules with node's own test runner."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def node_version() -> tuple[int, int] | None:
    if shutil.which("node") is None:
        return None
    shown = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=60)
    found = re.match(r"v(\d+)\.(\d+)", shown.stdout)
    return (int(found[1]), int(found[2])) if found else None


@pytest.mark.skipif((node_version() or (0, 0)) < (20, 0), reason="needs node 20 or later")
def test_the_modules_pass_their_own_tests() -> None:
    files = sorted(str(path) for path in (ROOT / "tests/web").glob("*.test.js"))
    done = subprocess.run(
        ["node", "--test", *files], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"^# pass (\d+)", done.stdout, re.MULTILINE)[0]) >= 20
