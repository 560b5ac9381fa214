"""Test the facts about the NVIDIA driver and the libraries of CuPy, with imitated libraries."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mie.ops_gpu.environment import cupy_facts, driver_facts

GIB = 1 << 30


class FakeCuda:
    """A libcuda with two GPUs, or with an error."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12060
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = f"GPU {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = 8 * GIB
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = {18: 1, 75: 8, 76: 7}[attribute]
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_NO_DEVICE" if code == 100 else None
        return 0


def test_the_driver_reports_its_gpus() -> None:
    facts = driver_facts(lambda name: FakeCuda())
    orin = {"capability": "8.7", "memory": 8 * GIB, "integrated": True}
    gpus = [{"name": f"GPU {device}", **orin} for device in (10, 11)]
    assert facts == {"found": True, "cuda": "12.6", "gpus": gpus}


@pytest.mark.parametrize(("code", "name"), [(100, "CUDA_ERROR_NO_DEVICE"), (777, "error 777")])
def test_the_driver_reports_its_error(code: int, name: str) -> None:
    facts = driver_facts(lambda _: FakeCuda(code))
    assert facts == {"found": True, "cuda": "12.6", "gpus": [], "error": name}


def test_asking_the_driver_imports_no_numpy() -> None:
    """A broken NumPy must not hide the driver's facts."""
    code = "import sys, mie.ops_gpu.environment; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
