"""Replicas and batches on a Ray cluster of this machine: the checks of scripts/ray_check.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra ray")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_replicas_serve_as_one_engine_does(tmp_path: Path):
    """Equal bytes, hit rates, a killed replica, a disconnect, restarts, scaling, and 64 streams.

    Also Ray's own proxy, and batches.
    """
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, str(ROOT / "scripts" / "ray_check.py")]
        code = subprocess.run(
            command, stdout=file, stderr=file, cwd=ROOT, check=False, timeout=3000
        ).returncode
    text = log.read_text()
    assert code == 0, text[-4000:]
    found = json.loads(text[text.rindex('{\n  "problems"') :])
    assert found["problems"] == []
    assert sum(name.startswith("64 streams") for name in found) == 2
