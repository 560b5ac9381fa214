"""Stand in for libcublas, over the arrays of fake_cupy.py and with its C interface."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from mie.ops_gpu.cublas import COMPUTE_32F, ELEMENT_TYPES, GEMM_DEFAULT, OP_N, OP_T

DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items() if dtype.name != "bfloat16"}


class FakeCublas:
    """A stand-in for libcublas that queues products in the stream of the handle."""

    def __init__(self, cupy: Any) -> None:
        self.handles: list[Any] = []

        def create(handle: Any) -> int:
            handle._obj.value = len(self.handles) + 1
            self.handles.append(SimpleNamespace(stream=0, workspace=0, math_mode=-1))
            return 0

        def set_stream(handle: Any, stream: int) -> int:
            self.state(handle).stream = stream
            self.state(handle).workspace = 0  # the library's own workspace again
            return 0

        def set_workspace(handle: Any, address: int, num_bytes: int) -> int:
            self.state(handle).workspace = num_bytes
            return 0

        def set_math_mode(handle: Any, mode: int) -> int:
            self.state(handle).math_mode = mode
            return 0

        def gemm(*args: Any) -> int:
            (handle, op_a, op_b, m, n, k), rest = args[:6], args[6:]
            alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algo = rest
            assert (op_a, op_b, compute, algo) == (OP_T, OP_N, COMPUTE_32F, GEMM_DEFAULT)
            assert a_type == b_type == c_type
            dtype, factors = DTYPES[a_type], (alpha._obj.value, beta._obj.value)
            # A column-major matrix is its transpose in row-major order.
            arrays = (
                cupy.array_at(a, (m, lda), dtype),
                cupy.array_at(b, (n, ldb), dtype),
                cupy.array_at(c, (n, ldc), dtype),
            )

            def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
                product = b[:, :k].astype(np.float32) @ a[:, :k].astype(np.float32).T
                old = c[:, :m].astype(np.float32) if factors[1] else 0.0
                c[:, :m] = factors[0] * product + factors[1] * old

            cupy.queue(self.state(handle).stream, "cublasGemmEx", run, arrays)
            return 0

        self.cublasCreate_v2 = create
        self.cublasDestroy_v2 = lambda handle: 0
        self.cublasSetStream_v2 = set_stream
        self.cublasSetWorkspace_v2 = set_workspace
        self.cublasSetMathMode = set_math_mode
        self.cublasGemmEx = gemm

    def state(self, handle: Any) -> Any:
        return self.handles[handle.value - 1]
