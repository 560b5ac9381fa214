"""Run the hardware check and benchmark without hardware."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from gpu import check as gpu_check
from gpu import parts
from gpu.run import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(directory=tmp_path, is_dry_run=True)


def results(directory: Path) -> tuple[dict[str, Any], str]:
    values = json.loads((directory / "gpu_check.json").read_text())
    return values, (directory / "gpu_check.md").read_text()


# The check.


@needs_compiler
@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ample = {name: (part, 1000) for name, (part, _) in parts.PARTS.items()}  # on a slow machine too
    monkeypatch.setattr(gpu_check, "PARTS", ample)
    options = ["--dry-run", "--output", str(tmp_path), "--commit", "abc123", "--seconds", "10000"]
    assert gpu_check.main(options) == 0
    values, page = results(tmp_path)
    statuses = {part["name"]: part["status"] for part in values["parts"]}
    assert statuses == dict.fromkeys(parts.PARTS, "passed")
    assert values["state"]["commit"] == "abc123"
    assert values["parts"][1]["details"]["passed"] > 0
    assert values["parts"][-1]["details"]["decode"]
    for words in ("dry run", "* commit: abc123", "| parity | passed |", "### Decode attention"):
        assert words in page
    assert "exit code: 0" in (tmp_path / "gpu_check.log").read_text()


def test_a_missing_device_gives_one_line(tmp_path: Path):
    code = "import sys; sys.modules['cupy'] = None; from gpu.check import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--child", "environment"],
        cwd=ROOT / "scripts",
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "needs CuPy" in done.stdout


def test_every_ptx_wrapper_has_golden_vectors():
    """The wrappers are named in the kernels of the emulator's tests, or in the headers that these
    use."""
    kernels = ROOT / "mie" / "ops_gpu" / "kernels"
    wrappers = re.findall(
        r"__device__ __forceinline__ \w+ (\w+)\(", (kernels / "mie_ptx.cuh").read_text()
    )
    tried = (ROOT / "tests" / "kernels" / "emulator.cu").read_text()
    tried += (kernels / "mie_cuda.cuh").read_text() + (kernels / "quantized.cuh").read_text()
    assert len(wrappers) > 10
    assert [name for name in wrappers if not re.search(rf"{name}\b", tried)] == ["shared_address"]
