"""Test the facts about the NVIDIA driver and the libraries of CuPy, with imitated libraries."""

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import PATIENCE, run
from emulated import needs_compiler

from mie.cli.doctor import ask
from mie.ops_gpu.environment import cupy_facts

GIB = 1 << 30


LIBCUDA = r"""
#include <cstdio>
#include <cstdlib>
extern "C" {
int cuDriverGetVersion(int* version) { *version = 12060; return 0; }
int cuInit(unsigned) { return getenv("CUDA_ERROR") ? atoi(getenv("CUDA_ERROR")) : 0; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int index) { *device = 10 + index; return 0; }
int cuDeviceGetName(char* name, int n, int id) { snprintf(name, n, "GPU %d", id); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = size_t{8} << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 7 : attribute == 18;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : nullptr;
  return 0;
}
}
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a libcuda.so.1 of two GPUs, or of the error in CUDA_ERROR."""
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.cpp").write_text(LIBCUDA)
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    command = [*compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.cpp"]
    subprocess.run(command, cwd=folder, check=True, timeout=PATIENCE)
    return str(folder)


@needs_compiler
@pytest.mark.parametrize(
    ("code", "name"), [("0", None), ("100", "CUDA_ERROR_NO_DEVICE"), ("777", "error 777")]
)
def test_the_driver_reports_its_gpus_or_its_error(libcuda, code, name, monkeypatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", libcuda)
    monkeypatch.setenv("CUDA_ERROR", code)
    orin = {"capability": "8.7", "memory": 8 * GIB, "integrated": True}
    gpus = [{"name": f"GPU {device}", **orin} for device in (10, 11)]
    own = {"gpus": gpus} if name is None else {"gpus": [], "error": name}
    assert ask("driver") == {"found": True, "cuda": "12.6", **own}


def test_asking_the_driver_imports_no_numpy() -> None:
    """A broken NumPy must not hide the driver's facts."""
    code = "import sys, mie.ops_gpu.environment; sys.exit('numpy' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0


class Device:
    mem_info = (5 * GIB, 8 * GIB)

    def __init__(self, index: int) -> None:
        assert index == 0


def fake_cupy(**runtime: Any) -> SimpleNamespace:
    about = {"name": b"Orin", "capability": "8.7", "totalGlobalMem": 8 * GIB, "integrated": 1}
    functions = {
        "runtimeGetVersion": lambda: 12090,
        "getDeviceCount": lambda: 1,
        "getDeviceProperties": lambda index: about,
    }
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 6))
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(**{**functions, **runtime}), nvrtc=nvrtc, Device=Device, cublas=None
    )
    return SimpleNamespace(__version__="14.2.0", cuda=cuda)


class FakeCublas:
    """A library of version 12.9.7."""

    def __init__(self, name: str) -> None:
        assert name == "libcublas.so.12"

    def cublasGetProperty(self, property_type: int, value: Any) -> int:
        value._obj.value = (12, 9, 7)[property_type]
        return 0


def test_cupy_reports_its_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cupy_cuda12x-14.2.0.dist-info", "cupyx_tools-1.dist-info", "cupy"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "no-such")])
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setattr(ctypes, "CDLL", FakeCublas)
    assert cupy_facts() == {
        "packages": {"cupy-cuda12x": "14.2.0"},
        "version": "14.2.0",
        "cuda": "12.9",
        "nvrtc": "12.6",
        "cublas": "12.9.7",
        "free": [5 * GIB],
    }
