"""Run integer products of aarch64 in an emulator, if `scripts/digest_check.py` has fetched one."""

import os
import subprocess
from pathlib import Path

import pytest
from compiled import needs_numba
from emulated_products import FORMS, panels_of

from mie.ops_jit.compiler import Cpu, compile_kernel

ROOT = Path(__file__).parents[2]
AARCH64 = ROOT / "build/aarch64"
pytestmark = [
    needs_numba,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (AARCH64 / "complete").exists(),
        reason="no emulator of aarch64: scripts/digest_check.py --aarch64 fetches it",
    ),
]
PATIENCE = 1500
"""Seconds after which the emulator counts as hung."""


@pytest.mark.parametrize(("name", "features"), [("cortex-a78", "+dotprod"), ("cortex-a72", "")])
def test_products_of_aarch64_have_the_bits_of_the_definition(
    name: str, features: str, tmp_path: Path
):
    cpu = Cpu("aarch64-unknown-linux-gnu", name, features)
    for form in FORMS:
        panels, _ = panels_of(form)
        for kernel in (f"multiply_int8[{panels.format}]", str(panels.rounding)):
            (tmp_path / kernel).write_bytes(compile_kernel(kernel, cpu))
    system, wheels = AARCH64 / "system", AARCH64 / "wheels"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", wheels)))
    process = subprocess.run(
        [
            *(AARCH64 / "qemu/usr/bin/qemu-aarch64-static", "-L", system),
            *(system / "usr/bin/python3", Path(__file__).with_name("emulated_products.py")),
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines() == [*map(str, FORMS)]
