"""Test CupyLauncher against a stand-in for CuPy: its calls of CuPy, and what it refuses itself."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mie.errors import ConfigError, MissingExtraError
from mie.ops_gpu.launcher import CupyLauncher
from mie.ops_gpu.load import load_cupy_backend
from mie.ops_gpu.signature import Parameter, kernels_in, read_signature

FILE = str(Path(__file__).parent / "emulator.cu")
X, A, N = np.zeros(8, np.float32), np.float32(1), np.int32(8)


class Function:
    """A stand-in for cupy.RawKernel that records its launches."""

    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 48 * 1024
        self.preferred_shared_memory_carveout = -1
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int) -> None:
        self.launches.append((grid, block, args, shared_mem))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("cupy")
    module.ndarray = np.ndarray
    module.device = SimpleNamespace(compute_capability="90")
    module.cuda = SimpleNamespace(is_available=lambda: True, Device=lambda: module.device)
    module.modules, module.function = [], Function()

    def raw_module(**options: Any) -> Any:
        module.modules.append(options)
        return SimpleNamespace(get_function=lambda name: module.function)

    module.RawModule = raw_module
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_a_kernel_is_compiled_once_from_one_text(cupy: Any):
    launcher = CupyLauncher()
    kernel = launcher.kernel(FILE, "scaled<f16>", ("-DX=1",))
    assert launcher.kernel(FILE, "scaled<f16>", ("-DX=1",)) is kernel
    [options] = cupy.modules
    assert options["options"] == ("-std=c++17", "-DX=1")
    assert options["name_expressions"] == ("scaled<f16>",)
    assert options["backend"] == "nvrtc"
    # The text includes headers and instantiation, because CuPy's cache is keyed by the text.
    assert "ldmatrix.sync" in options["code"]
    assert '#include "mie_cuda.cuh"' not in options["code"]
    assert options["code"].startswith("// scaled<f16>\n")


def test_launches_are_passed_on(cupy: Any):
    CupyLauncher().kernel(FILE, "saxpy")((2, 1), (8,), (X, X, A, N), shared_bytes=64)
    assert cupy.function.launches == [((2, 1), (8,), (X, X, A, N), 64)]
    assert cupy.function.max_dynamic_shared_size_bytes == 48 * 1024


def test_a_kernel_requests_more_shared_memory(cupy: Any):
    CupyLauncher().kernel(FILE, "saxpy")((2,), (8,), (X, X, A, N), shared_bytes=100_000)
    assert cupy.function.max_dynamic_shared_size_bytes == 100_000


def test_a_small_launch_sets_no_shared_memory_limit(cupy: Any):
    kernel = CupyLauncher().kernel(FILE, "saxpy")
    del cupy.function.max_dynamic_shared_size_bytes
    kernel((2,), (8,), (X, X, A, N), shared_bytes=64)
    assert len(cupy.function.launches) == 1


def test_bfloat16_needs_a_cupy_that_supports_it(cupy: Any):
    cupy.__version__ = "13.6.0"
    with pytest.raises(ConfigError, match=r"bfloat16 needs CuPy 14 or newer; this is 13\.6\.0"):
        load_cupy_backend("bfloat16")


def test_a_null_pointer_is_eight_zero_bytes(cupy: Any):
    CupyLauncher().kernel(FILE, "saxpy")((1,), (8,), (None, X, A, N))
    [(_, _, args, _)] = cupy.function.launches
    assert args[0].dtype == np.uint64
    assert args[0] == 0


def test_an_empty_grid_is_not_launched(cupy: Any):
    CupyLauncher().kernel(FILE, "saxpy")((2, 0), (8,), (X, X, A, N))
    assert cupy.function.launches == []


@pytest.mark.parametrize("args", [(X, X, A), (X, X, 1.0, N), (X, X, A, 8), (X[::2], X, A, N)])
def test_arguments_that_do_not_fit_are_refused(cupy: Any, args: tuple[Any, ...]):
    with pytest.raises(TypeError, match=r"emulator\.cu saxpy: "):
        CupyLauncher().kernel(FILE, "saxpy")((1,), (8,), args)
    assert cupy.function.launches == []


def test_a_missing_cupy_names_the_extras(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"mie\[cuda12\].*mie\[cuda13\]"):
        CupyLauncher()


class Broken(MetaPathFinder):
    """A finder of a CuPy whose import fails as it does without CUDA's libraries."""

    def __init__(self, text: str) -> None:
        self._text = text

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return spec_from_loader(name, self) if name == "cupy" else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(self._text, vars(module))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            """
try:
    raise ImportError("libnvrtc.so.12: cannot open shared object file")
except ImportError as error:
    raise ImportError("======\\nA page of advice\\n======") from error
""",
            r"libnvrtc\.so\.12: cannot open shared object file",
        ),
        ("import fastrlock_that_is_not_there", "No module named 'fastrlock_that_is_not_there'"),
    ],
)
def test_a_broken_cupy_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str
):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(text), *sys.meta_path])
    message = rf"CuPy, which is installed but cannot be imported: {reason} \(.*mie\[cuda12\]"
    with pytest.raises(ConfigError, match=message) as caught:
        CupyLauncher()
    assert "\n" not in str(caught.value)


def test_a_missing_gpu_is_reported(cupy: Any):
    cupy.cuda.is_available = lambda: False
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, and CuPy finds none"):
        CupyLauncher()


@pytest.mark.parametrize("capability", ["37", "70", "75"])
def test_an_old_gpu_is_refused_by_name(cupy: Any, capability: str):
    cupy.device.compute_capability = capability
    message = rf"does not run on this GPU, which is sm_{capability}: .* 8\.0 .*use backend numpy"
    with pytest.raises(ConfigError, match=message):
        load_cupy_backend()


@pytest.mark.parametrize("capability", ["80", "87", "90", "120"])
def test_newer_gpus_are_accepted(cupy: Any, capability: str):
    cupy.device.compute_capability = capability
    assert CupyLauncher().xp is cupy


def test_the_carve_out_is_set_where_shared_memory_is_used(cupy: Any):
    kernel = CupyLauncher().kernel(FILE, "saxpy")
    kernel((2,), (8,), (X, X, A, N))
    assert cupy.function.preferred_shared_memory_carveout == -1
    kernel((2,), (8,), (X, X, A, N), shared_bytes=64)
    assert cupy.function.preferred_shared_memory_carveout == 100


SOURCE = """
template <typename T, int N, typename U = float>  // a comment, with a comma
__global__ void __launch_bounds__(32 * (N + 1), 2)
wide(const T* __restrict__ x, U *y, /* not, this */ unsigned int n, const unsigned char* const b,
     Params p, bool is_last, long long big) {}
__global__ void __launch_bounds__(128) plain() {}
"""


def test_signatures_are_read_from_the_source():
    assert kernels_in(SOURCE) == {"wide": True, "plain": False}
    assert read_signature(SOURCE, "plain") == ()
    letters = {each.name: each.letters for each in read_signature(SOURCE, "wide<bf16, 64>")}
    assert letters == {
        "x": "*cb2",
        "y": "*mf4",
        "n": "u4",
        "b": "*cu1",
        "p": "s",
        "is_last": "u1",
        "big": "i8",
    }
    assert read_signature(SOURCE, "wide<int, 64, f16>")[1] == Parameter(name="y", letters="*mf2")
