"""Test ``mie doctor`` as a process, on this machine and with fake libraries."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, ENVIRONMENT


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(
        [*COMMAND, "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=240,
        check=False,
    )
    assert "Traceback" not in process.stderr + process.stdout
    return process


def report(*arguments: str, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor("--json", *arguments, **environment).stdout)
    return found


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    [one] = [each for each in found["checks"] if each["name"] == name]
    return dict(one)


def fake_module(folder: Path, code: str, name: str = "cupy") -> str:
    """Return a PYTHONPATH on which importing ``name`` runs ``code``."""
    (folder / f"{name}.py").write_text(code)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_this_machine_is_examined() -> None:
    process = doctor("--backend", "numpy")
    assert process.returncode == 0
    assert process.stderr == ""
    words = [line.split() for line in process.stdout.splitlines() if line]
    assert {line[0] for line in words} <= {"ok", "note", "problem", "remedy:", "backend"}
    assert [line for line in words if line[0] == "backend"] == [["backend", "numpy", "works"]]


@pytest.mark.slow
def test_the_emulated_kernels_do_not_work_without_a_compiler() -> None:
    process = doctor("--backend", "cupy-emulated", CXX="no-such-compiler")
    assert process.returncode == 1
    assert "no-such-compiler is not installed" in process.stdout
    assert "backend  cupy-emulated  does not work: the kernel emulator" in process.stdout


@pytest.mark.slow
def test_a_cupy_that_crashes_does_not_crash_the_doctor(tmp_path: Path) -> None:
    found = report("--backend", "cupy", PYTHONPATH=fake_module(tmp_path, "import os; os.abort()"))
    assert check(found, "CuPy")["status"] == "problem"
    assert "was ended by signal SIGABRT" in check(found, "CuPy")["value"]
    assert found["backends"][0]["works"] is False


@pytest.mark.slow
def test_a_broken_numpy_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    code, value = (
        "raise ImportError('libopenblas: no such file')",
        "ImportError: libopenblas: no such",
    )
    process = doctor("--backend", "numpy", PYTHONPATH=fake_module(tmp_path, code, name="numpy"))
    assert process.returncode == 1
    assert f"problem  NumPy          {value}" in process.stdout
    assert "remedy: pip install --force-reinstall 'numpy>=" in process.stdout
    assert f"backend  numpy          does not work: {value}" in process.stdout
