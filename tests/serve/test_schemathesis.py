"""schemathesis sends requests by /openapi.json, good and bad, and checks the answers against it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import live_bundled

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None,
    reason="schemathesis is not installed, which needs Python 3.11",
)
CONFIG = Path(__file__).parent / "data" / "schemathesis.toml"
"""All of its checks, with one exception: on some routes a 400 may answer data that fit."""
SECONDS = 1500


@pytest.mark.slow
def test_schemathesis_finds_nothing(tmp_path: Path):
    with live_bundled() as url:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
        command += [f"{url}/openapi.json", "--no-color", "--seed", "1"]
        command += ["--generation-database", "none", "--request-timeout", "600"]
        result = subprocess.run(  # it writes where it runs
            command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path
        )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2000:]
    assert "Selected: 28/28" in result.stdout
    assert "Tested: 28" in result.stdout
