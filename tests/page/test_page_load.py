"""The page takes in 5,000 events a second for ten seconds, and shows all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import chromium

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "page_load.py"


@pytest.mark.slow
def test_a_fast_engine() -> None:
    with chromium():
        pass  # or the test is skipped
    command = [sys.executable, str(SCRIPT), "--seconds", "10", "--steps-per-second", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *intervals, verdict = map(json.loads, done.stdout.splitlines())
    assert verdict["is_right"]
    assert verdict["errors"] == []
    assert intervals[-1]["sent"] > 0
