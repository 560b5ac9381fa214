"""Check the emulator's counts, and bound the memory traffic of the kernels."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import LONG_SHAPES, SHAPES, Shape, attend

from mie.ops_gpu.host.emulator import EmulatedLauncher

pytestmark = needs_compiler

PATTERNS = """
#include "mie_cuda.cuh"
// Each lane touches the word lane * stride of shared memory, then of x.
__global__ void strided(float* x, int stride) {
  float* row = reinterpret_cast<float*>(mie_smem);
  row[threadIdx.x * stride] = 1.0f;
  __syncwarp();
  if (blockIdx.x == 0) x[threadIdx.x * stride] = row[threadIdx.x * stride];
}
// Rows of ldmatrix that are `stride` bytes apart, filled by cp.async.
__global__ void rows(const uint4* x, unsigned* out, int stride) {
  unsigned char* row = mie_smem + threadIdx.x * stride;
  cp_async16(row, x + threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  unsigned r[4];
  ldmatrix_x4(r, row);
  out[threadIdx.x] = r[0] + r[1] + r[2] + r[3];
}
"""


def traffic(kind: str, requests: int, passes: int, least: int) -> dict[str, int]:
    return {f"{kind}.requests": requests, f"{kind}.passes": passes, f"{kind}.least": least}


def excess(counters: Counter[str], kind: str) -> int:
    """Return the passes that another layout would save, which are bank conflicts or waste."""
    return counters[f"{kind}.passes"] - counters[f"{kind}.least"]


@pytest.fixture
def launcher() -> EmulatedLauncher:
    return EmulatedLauncher(check=True, count=True)


def path_of(folder: Path, text: str) -> str:
    path = folder / "patterns.cu"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("stride", "wavefronts", "sectors"), [(1, 1, 4), (2, 2, 8), (32, 32, 32), (33, 1, 32)]
)
def test_bank_conflicts_and_sectors_are_counted(
    launcher: EmulatedLauncher, tmp_path: Path, stride: int, wavefronts: int, sectors: int
):
    x = np.zeros(33 * 32, np.float32)
    kernel = launcher.kernel(path_of(tmp_path, PATTERNS), "strided")
    kernel((3,), (32,), (x, np.int32(stride)), shared_bytes=x.nbytes)
    kernel((1,), (32,), (x, np.int32(stride)), shared_bytes=x.nbytes)
    assert launcher.counters == {
        "patterns.cu strided": Counter(
            {
                "launches": 2,
                "blocks": 4,
                "idle_blocks": 2,  # of the first launch
                # Each block stores. The first of a launch also loads, and stores to global memory.
                **traffic("shared", 6, 6 * wavefronts, 6),
                **traffic("global_memory", 2, 2 * sectors, 8),
            }
        )
    }


@pytest.mark.parametrize(("stride", "factor"), [(16, 1), (128, 8), (144, 1), (64, 4)])
def test_conflicts_of_ldmatrix_and_cp_async_are_counted(
    launcher: EmulatedLauncher, tmp_path: Path, stride: int, factor: int
):
    x, out = np.zeros((32, 4), np.uint32), np.zeros(32, np.uint32)
    kernel = launcher.kernel(path_of(tmp_path, PATTERNS), "rows")
    kernel((1,), (32,), (x, out, np.int32(stride)), shared_bytes=32 * stride)
    counters = launcher.counters["patterns.cu rows"]
    assert counters.items() >= traffic("ldmatrix", 1, 4 * factor, 4).items()
    assert counters.items() >= traffic("cp_async", 1, 4 * factor, 4).items()
    assert counters.items() >= traffic("cp_async_source", 1, 16, 16).items()


# The kernels of the package.

TENSOR_CORE_SHAPES = [
    shape
    for shape in [*SHAPES, *LONG_SHAPES]
    if shape.dtype != "float32" and shape.head_dim in (64, 128) and shape.block_size % 16 == 0
]
SOME_SHAPES = [
    pytest.param(shape, marks=[pytest.mark.slow] if number % 8 else [], id=str(shape))
    for number, shape in enumerate(TENSOR_CORE_SHAPES)
]
"""Each shape takes up to two seconds to build, so `make test` counts every eighth one."""
SEQUENCES = [(1, 300), (1, 40), (17, 70)]


def attend_with(launcher: Any, shape: Shape) -> None:
    for is_deterministic in (False, True):
        attend(launcher, shape, SEQUENCES, is_deterministic)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_tiles_are_copied_while_others_are_multiplied(
    launcher: EmulatedLauncher, is_deterministic: bool
):
    """Only the last tiles of a warp or a block have none behind them."""
    shape = Shape("float16", 64, 3, 1, 32, None)
    attend(launcher, shape, [(1, 1500), (60, 300)], is_deterministic)
    waits = {
        name.partition("<")[0]: counters["overlapped_waits"] / counters["waits"]
        for name, counters in launcher.counters.items()
        if counters["waits"]
    }
    assert len(waits) == 2  # a decode and a prefill
    assert min(waits.values()) > 0.5, waits


@pytest.mark.parametrize("shape", SOME_SHAPES)
def test_tiles_have_no_bank_conflicts_and_fill_whole_sectors(
    launcher: EmulatedLauncher, shape: Shape
):
    attend_with(launcher, shape)
    kernels = {
        name: counters
        for name, counters in launcher.counters.items()
        if counters["ldmatrix.requests"]
    }
    assert len(kernels) >= 2  # a decode and a prefill
    for name, counters in kernels.items():
        assert counters["cp_async.requests"], name
        assert excess(counters, "ldmatrix") == excess(counters, "cp_async") == 0, name
        # Keys and values fill whole sectors. The scales of a quantised cache may begin inside one.
        allowed = 0 if shape.stored == "auto" else 0.1 * counters["cp_async_source.least"]
        assert excess(counters, "cp_async_source") <= allowed, name
