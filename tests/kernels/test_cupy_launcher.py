"""Test CupyLauncher against a stand-in for CuPy: its calls of CuPy, and its own refusals."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_loader
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mie.errors import ConfigError, MissingExtraError
from mie.ops_gpu.launcher import CupyLauncher
from mie.ops_gpu.load import load_cupy_backend
from mie.ops_gpu.signature import SIGNATURES, declared
from mie.ops_gpu.source import KERNELS

X, A, N = np.zeros(8, np.float32), np.float32(1), np.int32(8)
NORM = "rms_norm.cu", "rms_norm<float>"


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
    kernel = launcher.kernel("gather_rows.cu", "gather_rows<f16>", ("-DX=1",))
    assert launcher.kernel("gather_rows.cu", "gather_rows<f16>", ("-DX=1",)) is kernel
    [options] = cupy.modules
    assert options["options"] == ("-std=c++17", "-DX=1")
    assert options["name_expressions"] == ("gather_rows<f16>",)
    assert options["backend"] == "nvrtc"
    # The text includes headers and instantiation, because CuPy's cache is keyed by the text.
    assert "struct __align__(2) f16" in options["code"]
    assert '#include "mie_cuda.cuh"' not in options["code"]
    assert options["code"].startswith("// gather_rows<f16>\n")


def test_launches_are_passed_on(cupy: Any):
    """Shared memory is raised where a launch needs it, a null pointer is eight zero bytes, and an
    empty grid is not launched."""
    kernel, function = CupyLauncher().kernel(*NORM), cupy.function
    kernel((2, 1), (8,), (X, X, X, N, A))
    assert function.preferred_shared_memory_carveout == -1
    kernel((2, 0), (8,), (X, X, X, N, A))
    kernel((2, 1), (8,), (None, X, X, N, A), shared_bytes=64)
    assert function.preferred_shared_memory_carveout == 100
    assert function.max_dynamic_shared_size_bytes == 48 * 1024
    (first, (_, _, (null, *rest), shared_bytes)) = function.launches
    assert first == ((2, 1), (8,), (X, X, X, N, A), 0)
    assert (null.dtype, null, rest, shared_bytes) == (np.uint64, 0, [X, X, N, A], 64)
    kernel((2,), (8,), (X, X, X, N, A), shared_bytes=100_000)
    assert function.max_dynamic_shared_size_bytes == 100_000


def test_bfloat16_needs_a_cupy_that_supports_it(cupy: Any):
    cupy.__version__ = "13.6.0"
    with pytest.raises(ConfigError, match=r"bfloat16 needs CuPy 14 or newer; this is 13\.6\.0"):
        load_cupy_backend("bfloat16")


@pytest.mark.parametrize(
    "args", [(X, X, X, N), (X, X, X, N, 1.0), (X, X, X, 8, A), (X[::2], X, X, N, A)]
)
def test_arguments_that_do_not_fit_are_refused(cupy: Any, args: tuple[Any, ...]):
    with pytest.raises(TypeError, match=r"rms_norm\.cu rms_norm<float>: "):
        CupyLauncher().kernel(*NORM)((1,), (8,), args)
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


def test_the_table_of_signatures_has_every_kernel():
    """The emulator compares each entry with the compiler's types where the kernel is built."""
    sources = [path.read_text() for path in KERNELS.glob("*.cu")]
    assert sum(source.count("__global__") for source in sources) == len(SIGNATURES)
    assert all(any(f"{name}(" in source for source in sources) for name in SIGNATURES)


def test_types_of_a_template_fill_its_signature():
    """The type of the cache is that of the queries, unless it is named."""
    for name, letters in (("paged_decode<bf16, 64, 4, 4>", "*cb2"), ("<f16, 8, int8>", "*ci1")):
        kv = (declared(name if name[0] == "p" else "paged_prefill" + name) or ())[1]
        assert (kv.name, kv.letters) == ("kv", letters)
