"""Check with forbidden pages that no kernel reads or writes beside its arrays (`guarded.py`)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import needs_numba

pytestmark = needs_numba
PATIENCE = 1500
"""Seconds after which a program counts as hung."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("guarded.py")
    command = [sys.executable, str(script), *arguments]
    tests = script.parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize("layout", ["start", "end"])
@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_no_kernel_touches_what_is_beside_an_array(layout: str, step: int):
    """Take every 25th combination of formats and sizes, or all."""
    process = run(layout, str(step))
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split() == ["products", "quantised_products", "caches", "steps"]


@pytest.mark.parametrize("layout", ["start", "end"])
def test_a_read_beside_an_array_would_be_noticed(layout: str):
    assert run(layout, "fault").returncode == -signal.SIGSEGV
