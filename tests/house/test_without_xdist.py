"""Check that the tests also run without the plugin pytest-xdist."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_are_collected_without_xdist() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "tests/unit/test_resources.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
