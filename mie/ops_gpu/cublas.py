"""Call cuBLAS directly, because CuPy refuses matrix products while a graph is captured.

One handle with its own stream and workspace allocates nothing in a call, so the call can be
captured. Sums are float32 for every element type (CUBLAS_COMPUTE_32F). 16-bit elements use the
tensor cores. float32 elements do not, because TF32 would round them to ten bits of mantissa.
"""

import ctypes
import weakref
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.errors import ConfigError
from mie.ops.backend import Array
from mie.ops_gpu.arrays import DTYPES, block_threads, kernel_type
from mie.ops_gpu.launcher import Launcher

WORKSPACE_BYTES = {9: 32 << 20, 0: 4 << 20}
"""Workspace by minimum compute capability, as the cuBLAS documentation recommends."""

# From cublas_api.h and library_types.h.
OP_N, OP_T = 0, 1
COMPUTE_32F = 68
GEMM_DEFAULT = -1
MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # added to CUBLAS_DEFAULT_MATH, which is 0
ELEMENT_TYPES = {  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
    DTYPES["float32"]: 0,
    DTYPES["float16"]: 2,
    DTYPES["bfloat16"]: 14,
}

STATUS = {
    1: "CUBLAS_STATUS_NOT_INITIALIZED",
    3: "CUBLAS_STATUS_ALLOC_FAILED",
    7: "CUBLAS_STATUS_INVALID_VALUE",
    8: "CUBLAS_STATUS_ARCH_MISMATCH",
    11: "CUBLAS_STATUS_MAPPING_ERROR",
    13: "CUBLAS_STATUS_EXECUTION_FAILED",
    14: "CUBLAS_STATUS_INTERNAL_ERROR",
    15: "CUBLAS_STATUS_NOT_SUPPORTED",
    16: "CUBLAS_STATUS_LICENSE_ERROR",
}

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_matrix = (_pointer, _int, _int)  # address, element type, leading dimension

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(_pointer),),
    "cublasDestroy_v2": (_pointer,),
    "cublasSetStream_v2": (_pointer, _pointer),
    "cublasSetWorkspace_v2": (_pointer, _pointer, ctypes.c_size_t),
    "cublasSetMathMode": (_pointer, _int),
    "cublasGemmEx": (
        *(_pointer, _int, _int, _int, _int, _int),  # handle, operations, m, n, k
        *(_pointer, *_matrix, *_matrix),  # alpha, A, B
        *(_pointer, *_matrix),  # beta, C
        *(_int, _int),  # compute type, algorithm
    ),
}
"""The functions that are called, with their parameters. Each returns a status."""


class CublasError(RuntimeError):
    """A cuBLAS call failed."""


class Cublas:
    """A `Gemm` with a cuBLAS handle that works in ``stream``."""

    def __init__(self, cupy: Any, stream: Any, launcher: Launcher, library: Any = None) -> None:
        """Create a handle. ``library`` is the loaded libcublas, by default CuPy's."""
        self._launcher = launcher
        self._library = load_library(cupy) if library is None else library
        for name, parameters in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = parameters, _int
        handle = _pointer()
        self._call("cublasCreate_v2", ctypes.byref(handle))
        self._handle = handle
        # The finalizer does not run at exit, because the driver may be gone by then.
        weakref.finalize(self, self._library.cublasDestroy_v2, handle).atexit = False
        self._call("cublasSetStream_v2", handle, stream.ptr)
        # This comes after setting the stream, because that resets the workspace to the library's
        # own.
        num_bytes = workspace_bytes(int(cupy.cuda.Device().compute_capability))
        self._workspace = cupy.empty(num_bytes, "uint8")
        self._call("cublasSetWorkspace_v2", handle, self._workspace.data.ptr, num_bytes)
        self._call("cublasSetMathMode", handle, MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)
        # The factors alpha and beta are read from host memory during the call.
        self._one, self._zero = (ctypes.byref(ctypes.c_float(factor)) for factor in (1, 0))

    def matmul(
        self, x: Array, weight: Array, bias: Array | None, out: Array, first: int, *, is_added: bool
    ) -> None:
        """Multiply, with the addend in ``out`` beforehand.

        That is what was there, the bias, or both. Their sum is then rounded once more.
        """
        if bias is not None:
            self.add_bias(bias, out, first, has_residual=is_added)
        self.multiply(x, weight, out, first, is_added=is_added or bias is not None)

    def add_bias(self, bias: Array, out: Array, first: int, *, has_residual: bool) -> None:
        """Write the bias to each row of ``out``, or add it to the residual there."""
        (num_tokens, stride), width = out.shape, len(bias)
        threads = block_threads(width)
        kernel = self._launcher.kernel("add_bias.cu", f"add_bias<{kernel_type(out)}>")
        sizes = (np.int32(size) for size in (width, stride, has_residual))
        grid = (num_tokens, ceil_div(width, threads))
        kernel(grid, (threads,), (bias, out.reshape(-1)[first:], *sizes))

    def multiply(
        self, x: Array, weight: Array, out: Array, first: int = 0, *, is_added: bool
    ) -> None:
        """Compute out = x @ weight.T, or out += x @ weight.T, in N columns of ``out``.

        x [T, K], weight [N, K], out [T, M], contiguous and of one dtype. cuBLAS is column-major, so
        it sees the transpose of each of these matrices. It therefore computes out^T [N, T] = weight
        [N, K] . x^T [K, T], with a transposed weight.
        """
        (num_tokens, depth), width, stride = x.shape, weight.shape[0], out.shape[1]
        element = ELEMENT_TYPES[x.dtype]
        assert weight.dtype == out.dtype == x.dtype
        assert weight.shape == (width, depth)
        assert len(out) == num_tokens
        assert first + width <= stride
        for each in (x, weight, out):
            assert each.flags.c_contiguous
        if num_tokens == 0:
            return
        beta = self._one if is_added else self._zero
        self._call(
            "cublasGemmEx",
            *(self._handle, OP_T, OP_N, width, num_tokens, depth),
            *(self._one, weight.data.ptr, element, depth, x.data.ptr, element, depth),
            *(beta, out.data.ptr + first * out.dtype.itemsize, element, stride),
            *(COMPUTE_32F, GEMM_DEFAULT),
        )

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise CublasError(f"{name} failed: {STATUS.get(status, 'unknown status')} ({status})")


def workspace_bytes(compute_capability: int) -> int:
    """Return the workspace of a compute capability: 32 MiB for "90", 4 MiB for "87"."""
    major = compute_capability // 10
    return next(size for first, size in WORKSPACE_BYTES.items() if major >= first)


def load_library(cupy: Any) -> Any:
    """Load the libcublas that CuPy uses, from a wheel or from the system's CUDA.

    Accessing ``cupy.cuda.cublas`` makes CuPy find and load it. A library that is already in the
    process is then found by its name alone.
    """
    name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        _ = cupy.cuda.cublas
        return ctypes.CDLL(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"cuBLAS cannot be loaded: {str(error).splitlines()[0]} (install CUDA's libraries: "
            f"the system's package, JetPack's cuda-libraries, or pip install "
            f"nvidia-cublas{'-cu12' if name.endswith('12') else ''})"
        ) from error


def library_version(cupy: Any) -> str:
    """Return the version of the libcublas that CuPy uses, such as "12.9.1"."""
    library, parts = load_library(cupy), [ctypes.c_int() for _ in range(3)]
    for property_type, part in enumerate(parts):  # major, minor and patch level: library_types.h
        library.cublasGetProperty(property_type, ctypes.byref(part))
    return ".".join(str(part.value) for part in parts)
