"""Test matrix products through cuBLAS, with a C library that has its interface.

The library is a page of C++ with the prototypes of cublas_api.h, so a compiler checks the number,
order and size of the arguments. With MIE_GPU_TESTS=1 the real library multiplies, too.
"""

import ctypes
import shlex
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import on_device
import pytest
from deadlines import PATIENCE
from emulated import COMPILER, launcher, needs_compiler

from mie.errors import ConfigError
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.cublas import Cublas, CublasError, load_library
from mie.ops_gpu.gemm import NumpyGemm

MODES = ["plain", "checked", *(["cupy"] if on_device.IS_WANTED else [])]

LIBRARY = r"""
#include <cstddef>
struct Context { void *stream, *workspace; size_t workspace_bytes; int math_mode; };
extern "C" {
Context last;
int calls;
int cublasCreate_v2(Context **handle) { *handle = new Context{}; return 0; }
int cublasDestroy_v2(Context *handle) { delete handle; return 0; }
int cublasSetStream_v2(Context *handle, void *stream) {
  handle->stream = stream;
  handle->workspace = nullptr;
  return 0;
}
int cublasSetWorkspace_v2(Context *handle, void *workspace, size_t bytes) {
  if ((size_t)workspace % 256) return 7;
  handle->workspace = workspace;
  handle->workspace_bytes = bytes;
  return 0;
}
int cublasSetMathMode(Context *handle, int mode) { handle->math_mode = mode; return 0; }
int cublasGemmEx(Context *handle, int transa, int transb, int m, int n, int k, const void *alpha,
                 const void *A, int Atype, int lda, const void *B, int Btype, int ldb,
                 const void *beta, void *C, int Ctype, int ldc, int computeType, int algo) {
  if (Atype != 0 || Btype != 0 || Ctype != 0 || computeType != 68 || algo != -1) return 15;
  last = *handle;
  ++calls;
  const float *a = (const float *)A, *b = (const float *)B;
  float *c = (float *)C, x = *(const float *)alpha, y = *(const float *)beta;
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < m; ++i) {
      float sum = 0;
      for (int l = 0; l < k; ++l)
        sum += (transa ? a[l + (size_t)i * lda] : a[i + (size_t)l * lda]) *
               (transb ? b[j + (size_t)l * ldb] : b[l + (size_t)j * ldb]);
      float *to = c + i + (size_t)j * ldc;
      *to = x * sum + (y == 0 ? 0 : y * *to);
    }
  return 0;
}
}
"""


class Context(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("math_mode", ctypes.c_int),
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("cublas")
    source, built = folder / "cublas.cpp", folder / "libcublas.so"
    source.write_text(LIBRARY)
    options = "-std=c++17 -O1 -shared -fPIC"
    subprocess.run(
        [COMPILER, *shlex.split(options), source, "-o", built], check=True, timeout=PATIENCE
    )
    return ctypes.CDLL(str(built))


class Array(np.ndarray):
    """An array with its address where CuPy has it."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def on_gpu(array: np.ndarray) -> Any:
    return array.view(Array)


def aligned(size: int, dtype: str) -> Array:
    """Return memory that is aligned like CuPy's."""
    raw = np.zeros(size + 256, dtype)
    offset = -raw.ctypes.data % 256
    return on_gpu(raw[offset : offset + size])


CUPY = SimpleNamespace(
    empty=aligned, cuda=SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability="87"))
)
STREAM = SimpleNamespace(ptr=0x1234_5678_9ABC)


@pytest.fixture
def cublas(library: ctypes.CDLL) -> Cublas:
    return Cublas(CUPY, STREAM, launcher(), library)


@needs_compiler
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_products(cublas: Cublas, num_tokens: int, has_bias: bool, has_residual: bool):
    rng = np.random.default_rng(0)
    shapes = ((num_tokens, 16), (5, 16), (5,), (num_tokens, 5))
    x, weight, bias, residual = (
        on_gpu(rng.normal(size=shape).astype(np.float32)) for shape in shapes
    )
    wanted = x @ weight.T + has_bias * bias + has_residual * residual
    for gemm in (cublas, NumpyGemm()):
        out = residual.copy() if has_residual else on_gpu(np.full(shapes[3], np.nan, np.float32))
        given = bias if has_bias else None
        gemm.matmul(x, weight, given, out, 0, is_added=has_residual)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


@needs_compiler
def test_the_handle_sets_its_stream_before_its_workspace(library: ctypes.CDLL, cublas: Cublas):
    one = on_gpu(np.ones((1, 1), np.float32))
    cublas.multiply(one, one, one.copy(), is_added=False)
    last = Context.in_dll(library, "last")
    assert last.stream == STREAM.ptr
    assert (last.workspace, last.workspace_bytes) == (cublas._workspace.ctypes.data, 4 << 20)
    assert last.math_mode == 16


@needs_compiler
def test_a_failed_call_names_its_status(cublas: Cublas):
    half = on_gpu(np.ones((1, 1), np.float16))
    with pytest.raises(CublasError, match=r"cublasGemmEx failed: CUBLAS_STATUS_NOT_SUPPORTED \(15"):
        cublas.multiply(half, half, half.copy(), is_added=False)


class CudaModule:
    """Stand-in for cupy.cuda, which loads cuBLAS when it is accessed."""

    def __init__(self, version: int, error: Exception | None) -> None:
        self.runtime = SimpleNamespace(runtimeGetVersion=lambda: version)
        self._error = error
        self.was_named = False

    @property
    def cublas(self) -> None:
        self.was_named = True
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("version", "wheel"), [(12060, "nvidia-cublas-cu12"), (13020, "nvidia-cublas")]
)
def test_a_missing_library_says_what_to_install(
    version: int, wheel: str, monkeypatch: pytest.MonkeyPatch
):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda = CudaModule(version, None)
    with pytest.raises(ConfigError, match=rf"cuBLAS cannot be loaded.*pip install {wheel}\)"):
        load_library(SimpleNamespace(cuda=cuda))
    assert cuda.was_named


@needs_compiler
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_added", [False, True])
def test_a_bias_is_written_before_the_product_is_added(
    library: ctypes.CDLL, mode: str, dtype: str, is_added: bool
):
    rng = np.random.default_rng(0)
    bias, out = (rng.normal(size=shape).astype(DTYPES[dtype]) for shape in ((300,), (3, 300)))
    wanted = (bias.astype(np.float32) + is_added * out.astype(np.float32)).astype(DTYPES[dtype])
    gpu: Any = on_device.device_launcher() if mode == "cupy" else launcher(mode == "checked")
    Cublas(CUPY, STREAM, gpu, library).add_bias(bias, out, 0, has_residual=is_added)
    assert out.tobytes() == np.broadcast_to(wanted, out.shape).tobytes()


if on_device.IS_WANTED:

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
    def test_products_on_the_device(dtype: str, num_tokens: int):
        """Compare with float64. With TF32 the error of 1e-6 of float32 sums would be 1e-3."""
        import cupy

        from mie.ops_gpu.launcher import CupyLauncher

        stream = cupy.cuda.Stream()
        gemm = Cublas(cupy, stream, CupyLauncher())
        rng = np.random.default_rng(0)
        shapes = ((num_tokens, 2048), (1536, 2048), (1536,), (num_tokens, 1536))
        host = [rng.normal(size=shape).astype(DTYPES[dtype]) for shape in shapes]
        with stream:
            x, weight, bias, out = map(cupy.asarray, host)
            gemm.matmul(x, weight, bias, out, 0, is_added=True)
            got = cupy.asnumpy(out).astype(np.float64)
        x, weight, bias, residual = (array.astype(np.float64) for array in host)
        wanted = x @ weight.T + bias + residual
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < {"float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3}[dtype]
