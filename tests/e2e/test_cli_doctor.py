"""Test ``mie doctor`` as a process, on this machine and with fake libraries."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, ENVIRONMENT
from emulated import needs_compiler

LIBCUDA = r"""
#include <cstdio>
#include <cstdlib>
extern "C" {
int cuDriverGetVersion(int* version) { *version = 12060; return 0; }
int cuInit(unsigned) { return getenv("NO_GPU") ? 100 : 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetName(char* name, int size, int) { snprintf(name, size, "Paper GPU"); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = size_t{8} << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 7 : 0;
  return 0;
}
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
}
"""


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


def test_the_emulated_kernels_do_not_work_without_a_compiler() -> None:
    process = doctor("--backend", "cupy-emulated", CXX="no-such-compiler")
    assert process.returncode == 1
    assert "no-such-compiler is not installed; backend cupy-emulated needs one" in process.stdout
    assert "backend  cupy-emulated  does not work: the kernel emulator" in process.stdout


def test_a_cupy_that_crashes_does_not_crash_the_doctor(tmp_path: Path) -> None:
    found = report("--backend", "cupy", PYTHONPATH=fake_module(tmp_path, "import os; os.abort()"))
    assert check(found, "CuPy")["status"] == "problem"
    assert "was ended by signal SIGABRT" in check(found, "CuPy")["value"]
    assert found["backends"][0]["works"] is False


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


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a libcuda.so.1 that has one GPU, for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.cpp").write_text(LIBCUDA)
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    command = [*compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder)


@needs_compiler
def test_a_driver_without_cupy(tmp_path: Path, libcuda: str) -> None:
    absent = fake_module(
        tmp_path, "raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')"
    )
    process = doctor("--backend", "cupy", LD_LIBRARY_PATH=libcuda, PYTHONPATH=absent)
    assert process.returncode == 1
    assert "Paper GPU, compute capability 8.7, 8.0 GiB" in process.stdout
    assert "problem  CuPy           not installed" in process.stdout
    assert "remedy: pip install 'mie[cuda12]'" in process.stdout
    assert "backend  cupy           does not work: backend 'cupy' needs CuPy" in process.stdout
