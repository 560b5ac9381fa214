"""Test CupyLauncher against a stand-in for CuPy: its calls of CuPy, and its own refusals."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import nvrtc_check
import pytest

from mie.base.cache_dir import CacheError
from mie.errors import ConfigError, MieError, MissingExtraError
from mie.ops_gpu.cubins import KernelName
from mie.ops_gpu.launcher import CupyLauncher
from mie.ops_gpu.load import load_cupy_backend
from mie.ops_gpu.nvrtc import Compiled, CompileError, compile_apart
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
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module: Any = ModuleType("cupy")
    module.ndarray = np.ndarray
    module.device = SimpleNamespace(compute_capability="90")
    module.cuda = SimpleNamespace(is_available=lambda: True, Device=lambda: module.device)
    module.modules, module.function = [], Function()

    def raw_module(path: str) -> Any:
        module.modules.append(Path(path).read_bytes())
        return SimpleNamespace(get_function=lambda name: module.function)

    module.RawModule = raw_module
    module.nvrtc = FakeNvrtc()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr("mie.ops_gpu.launcher.nvrtc_of_cupy", lambda cupy: module.nvrtc)
    monkeypatch.setattr("mie.ops_gpu.cubins.open_cache", lambda name: tmp_path)
    monkeypatch.setattr(
        "mie.ops_gpu.cubins.compile_apart", lambda path, *work: module.nvrtc.compile(*work)
    )
    return module


class FakeNvrtc:
    """A stand-in for `Nvrtc` that records its work. Its machine code is the kernel's name."""

    path, version = "libnvrtc.so", "12.6"

    def __init__(self) -> None:
        self.work: list[tuple[Any, ...]] = []

    def architectures(self) -> list[int]:
        return [80, 87, 90]

    def compile(self, source: str, names: list[str], options: list[str]) -> Compiled:
        self.work.append((source, names, options))
        return Compiled(cubin=names[0].encode(), log="", mangled={names[0]: "mangled"})


def test_a_kernel_is_compiled_once_from_one_text(cupy: Any):
    launcher = CupyLauncher()
    kernel = launcher.kernel("gather_rows.cu", "gather_rows<f16>", ("-DX=1",))
    assert launcher.kernel("gather_rows.cu", "gather_rows<f16>", ("-DX=1",)) is kernel
    [(source, names, options)] = cupy.nvrtc.work
    assert options[:3] == ["-std=c++17", "-DX=1", "-arch=sm_90"]
    assert {*options[3:]} == {"-ftz=true", "--device-as-default-execution-space"}
    assert names == ["gather_rows<f16>"]
    # The text includes headers, because the cache is keyed by the text.
    assert "struct __align__(2) f16" in source
    assert '#include "mie_cuda.cuh"' not in source
    assert cupy.modules == [b"gather_rows<f16>"]


def test_compiled_kernels_are_kept_for_the_same_compiler_and_chip(cupy: Any, tmp_path: Path):
    def compiled(*kernels: KernelName) -> list[str]:
        """Return the kernels that another process would compile."""
        cupy.nvrtc.work.clear()
        counts: list[int] = []

        @contextmanager
        def progress(number: int) -> Iterator[Any]:
            counts.append(-number)
            yield counts.append

        CupyLauncher().build(kernels, progress)
        assert sum(counts) == 0
        return sorted(names[0] for _, names, _ in cupy.nvrtc.work)

    kernels = [KernelName(*NORM), KernelName("gather_rows.cu", "gather_rows<f16>")]
    assert compiled(*kernels, kernels[0]) == ["gather_rows<f16>", "rms_norm<float>"]
    assert compiled(*kernels) == []
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert compiled(KernelName(*NORM, ("-DX=1",))) == ["rms_norm<float>"]
    cupy.nvrtc.version = "12.8"
    assert compiled(kernels[0]) == ["rms_norm<float>"]
    cupy.nvrtc.version = "12.6"
    cupy.device.compute_capability = "87"
    assert compiled(*kernels) == ["gather_rows<f16>", "rms_norm<float>"]
    cupy.device.compute_capability = "86"  # runs the code of 8.0
    assert compiled(kernels[0]) == ["rms_norm<float>"]
    assert "-arch=sm_80" in cupy.nvrtc.work[0][2]


@pytest.mark.parametrize("fault", ["code", "digest", "no digest", "link", "writable"])
def test_a_damaged_or_foreign_cubin_is_compiled_again(cupy: Any, tmp_path: Path, fault: str):
    CupyLauncher().kernel(*NORM)
    [cubin], [about] = tmp_path.glob("*.cubin"), tmp_path.glob("*.json")
    if fault == "code":
        cubin.write_bytes(b"another's code")
    elif fault == "digest":
        about.write_text('{"function": "mangled", "sha256": "0"}')
    elif fault == "no digest":
        about.unlink()
    elif fault == "link":
        cubin.rename(tmp_path / "elsewhere")
        cubin.symlink_to(tmp_path / "elsewhere")
    else:
        cubin.chmod(0o622)
    CupyLauncher().kernel(*NORM)
    assert len(cupy.nvrtc.work) == 2
    assert cupy.modules == [b"rms_norm<float>"] * 2
    assert not cubin.is_symlink()
    assert cubin.stat().st_mode & 0o777 == 0o600


def test_kernels_run_from_a_folder_of_the_process_without_a_cache(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(name: str) -> Path:
        raise CacheError("others may write to it")

    monkeypatch.setattr("mie.ops_gpu.cubins.open_cache", refuse)
    launcher = CupyLauncher()
    launcher.kernel(*NORM)
    assert cupy.modules == [b"rms_norm<float>"]
    assert launcher.cubins.folder.stat().st_mode & 0o777 == 0o700
    assert "not kept: others may write to it" in caplog.text


def test_kernels_are_listed_without_being_compiled(cupy: Any):
    launcher = CupyLauncher()
    with launcher.listing() as listed:
        launcher.kernel(*NORM)((1,), (8,), ())
    assert listed == [KernelName(*NORM)]
    assert cupy.nvrtc.work == cupy.modules == []
    launcher.build(listed, lambda number: nullcontext(int))
    assert cupy.modules == [b"rms_norm<float>"]


def test_a_kernel_that_nvrtc_refuses_is_named(cupy: Any, monkeypatch: pytest.MonkeyPatch):
    def refuse(*work: Any) -> Any:
        raise CompileError("rms_norm.cu(3): error: no such type")

    monkeypatch.setattr(cupy.nvrtc, "compile", refuse)
    message = r"NVRTC 12\.6 refuses the kernel rms_norm<float> in rms_norm\.cu: .*no such type"
    with pytest.raises(MieError, match=message):
        CupyLauncher().kernel(*NORM)


def test_a_gpu_newer_than_nvrtc_is_refused(cupy: Any):
    cupy.device.compute_capability = "120"
    message = r"NVRTC 12\.6 does not compile for this GPU, which is sm_120 \(.*cupy-cuda13x"
    with pytest.raises(ConfigError, match=message):
        CupyLauncher()


@pytest.mark.parametrize("version", nvrtc_check.TARGETS)
def test_a_process_of_its_own_compiles_the_same_code(version: str):
    compilers = nvrtc_check.installed()
    if version not in compilers:
        pytest.skip(f"NVRTC {version} is not installed (pip install '.[nvrtc]')")
    nvrtc, options = compilers[version], ["-arch=sm_87"]
    assert 87 in nvrtc.architectures()
    work = ("__global__ void nothing() {}", ["nothing"], options)
    assert compile_apart(nvrtc.path, *work) == nvrtc.compile(*work)
    with pytest.raises(CompileError, match="expected"):
        compile_apart(nvrtc.path, "__global__ void", ["nothing"], options)
    with pytest.raises(CompileError, match="process of a compilation failed"):
        compile_apart("/no/such/library", *work)


def test_launches_are_passed_on(cupy: Any):
    """Shared memory is raised where a launch needs it, a null pointer is eight zero bytes, and an
    empty grid is not launched."""
    kernel, function = CupyLauncher().kernel(*NORM), cupy.function
    kernel((2, 1), (8,), (X, X, X, X, N, N, A))
    assert function.preferred_shared_memory_carveout == -1
    kernel((2, 0), (8,), (X, X, X, X, N, N, A))
    kernel((2, 1), (8,), (None, X, X, X, N, N, A), shared_bytes=64)
    assert function.preferred_shared_memory_carveout == 100
    assert function.max_dynamic_shared_size_bytes == 48 * 1024
    (first, (_, _, (null, *rest), shared_bytes)) = function.launches
    assert first == ((2, 1), (8,), (X, X, X, X, N, N, A), 0)
    assert (null.dtype, null, rest, shared_bytes) == (np.uint64, 0, [X, X, X, N, N, A], 64)
    kernel((2,), (8,), (X, X, X, X, N, N, A), shared_bytes=100_000)
    assert function.max_dynamic_shared_size_bytes == 100_000


def test_bfloat16_needs_a_cupy_that_supports_it(cupy: Any):
    cupy.__version__ = "13.6.0"
    with pytest.raises(ConfigError, match=r"bfloat16 needs CuPy 14 or newer; this is 13\.6\.0"):
        load_cupy_backend("bfloat16")


@pytest.mark.parametrize(
    "args",
    [
        (X, X, X, X, N, N),
        (X, X, X, X, N, N, 1.0),
        (X, X, X, X, 8, N, A),
        (X[::2], X, X, X, N, N, A),
    ],
)
def test_arguments_that_do_not_fit_are_refused(cupy: Any, args: tuple[Any, ...]):
    with pytest.raises(TypeError, match=r"rms_norm\.cu rms_norm<float>: "):
        CupyLauncher().kernel(*NORM)((1,), (8,), args)
    assert cupy.function.launches == []


def test_a_missing_cupy_names_the_extras(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"cupy-cuda12x.*cupy-cuda13x"):
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
    message = rf"CuPy, which is installed but cannot be imported: {reason} \(.*cupy-cuda12x"
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
