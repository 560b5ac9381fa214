"""Check the emulator's counts, and bound the memory traffic of the kernels."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_few_rows import norm_of
from test_kernels import LONG_SHAPES, SHAPES, Shape, attend, normal
from test_quantised_products import FORMS, matrix_of, rows_of

from mie.ops_gpu.chip import EMULATED_CHIP, Chip
from mie.ops_gpu.dispatch import LARGE_GROUP, LARGE_HEAD, MMA_STAGES
from mie.ops_gpu.few_rows import FewRows, shape_named
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
// Multiplies `count` loaded registers, of which `ahead` are loaded before the first product.
__global__ void pipeline(const unsigned* x, float* out, int count, int ahead) {
  float sum[4] = {};
  unsigned loaded[16];
  for (int i = 0; i < ahead; ++i) loaded[i % 16] = x[i * 32 + threadIdx.x];
  for (int i = 0; i < count; ++i) {
    if (ahead == 0) loaded[i % 16] = x[i * 32 + threadIdx.x];
    const unsigned a = loaded[i % 16];
    mma_m16n8k16<f16>(sum, {a, a, a, a}, {a, a});
    const int next = i + ahead;
    if (ahead > 0 && next < count) loaded[next % 16] = x[next * 32 + threadIdx.x];
  }
  out[blockIdx.x * 32 + threadIdx.x] = sum[0];
}
// Each warp begins `copies` copies a lane, and warp 0 loads `loads` words. Then all meet.
__global__ void meeting(const uint4* x, float* out, int copies, int loads) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int i = 0; i < copies; ++i) cp_async16(mie_smem + (i * 64 + threadIdx.x) * 16, x + lane);
  if (threadIdx.x < 32)
    for (int i = 0; i < loads; ++i) sum += reinterpret_cast<const float*>(x)[lane + i];
  cp_async_commit();
  __syncthreads();
  cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = sum;
}
// Block i multiplies i times.
__global__ void uneven(float* out) {
  float sum[4] = {};
  for (unsigned i = 0; i < blockIdx.x; ++i) mma_m16n8k16<f16>(sum, {0, 0, 0, 0}, {0, 0});
  out[blockIdx.x * 32 + threadIdx.x] = sum[0];
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


@pytest.mark.parametrize(("ahead", "in_flight"), [(0, 0), (1, 0), (4, 10.5), (8, 21)])
def test_loads_in_flight_are_counted(
    launcher: EmulatedLauncher, tmp_path: Path, ahead: int, in_flight: float
):
    """A load counts until a product has used it. The pipeline runs dry at the end."""
    x, out = np.zeros((16, 32), np.uint32), np.zeros(64, np.float32)
    kernel = launcher.kernel(path_of(tmp_path, PATTERNS), "pipeline")
    kernel((2,), (32,), (x, out, np.int32(16), np.int32(ahead)))
    counters = launcher.counters["patterns.cu pipeline"]
    assert counters["mma"] == 32
    assert counters["loads_in_flight"] == 32 * in_flight


def test_copies_and_loads_before_a_barrier_are_counted(launcher: EmulatedLauncher, tmp_path: Path):
    x, out = np.zeros((32, 4), np.float32), np.zeros(64, np.float32)
    kernel = launcher.kernel(path_of(tmp_path, PATTERNS), "meeting")
    kernel((1,), (64,), (x, out, np.int32(3), np.int32(5)), shared_bytes=64 * 3 * 16)
    counters = launcher.counters["patterns.cu meeting"]
    assert counters["copies_at_barriers"] == 64 * 3  # at the first of two
    assert counters["longest_loads"] == 4 * 5


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_products_are_counted_for_each_block(tmp_path: Path, order: Any):
    launcher = EmulatedLauncher(check=True, count=True, order=order)
    kernel = launcher.kernel(path_of(tmp_path, PATTERNS), "uneven")
    kernel((4,), (32,), (np.zeros(128, np.float32),))
    assert launcher.products == {"patterns.cu uneven": [0, 1, 2, 3]}


# The kernels of the package.

TENSOR_CORE_SHAPES = [
    shape
    for shape in [*SHAPES, *LONG_SHAPES]
    if shape.dtype != "float32" and shape.head_dim in MMA_STAGES and shape.block_size % 16 == 0
    if shape.head_dim < LARGE_HEAD or shape.group <= LARGE_GROUP
    if shape.stored != "int4"
]
SOME_SHAPES = [
    pytest.param(shape, marks=[pytest.mark.slow] if number % 32 else [], id=str(shape))
    for number, shape in enumerate(TENSOR_CORE_SHAPES)
]
"""Each shape takes up to two seconds to build, so `make test` counts one in 32."""
SEQUENCES = [(1, 300), (1, 40), (17, 70)]


def attend_with(launcher: Any, shape: Shape) -> None:
    for is_deterministic in (False, True):
        attend(launcher, shape, SEQUENCES, is_deterministic)


COUNTED = (
    *("mma", "ldmatrix.requests", "cp_async.requests", "cp_async_source.passes", "in_flight"),
    *("barriers", "blocks", "idle_blocks", "unhinted_copies"),
)
PREFILL = (3840, 1920, 480, 6760, 10448, 30, 3, 0, 0)
WORK = {
    "splits": {
        "paged_decode_stream": (752, 752, 752, 12000, 29568, 18, 9, 3, 0),
        "paged_prefill_mma": PREFILL,
    },
    "streams": {
        "paged_decode_stream": (752, 752, 752, 12000, 20352, 27, 9, 0, 0),
        "paged_prefill_mma": PREFILL,
    },
    "int4 products": {"few_rows_linear": (768, 0, 288, 2592, 7776, 12, 2, 0, 0)},
    "dense products": {"few_rows_linear": (1120, 0, 1120, 14210, 53376, 50, 6, 0, 0)},
}
"""The counts of `COUNTED` in each load of `do_work`, by kernel.

They are the same with every compiler. A change that makes one larger must be worth it.
"""


ONE_MULTIPROCESSOR = Chip(num_multiprocessors=1, shared_bytes=228 << 10)


def do_work(load: str, launcher: Any) -> None:
    """Run a small load that each part of a kernel has work in."""
    if load in ("splits", "streams"):
        shape = Shape("float16", 64, 3, 1, 32, None)
        attend(launcher, shape, [(1, 1500), (60, 300)], load == "splits")
        return
    weight, chip = matrix_of(rows_of(FORMS[0], 104, 1144)), ONE_MULTIPROCESSOR
    if load == "dense products":
        weight, chip = normal("float16", 200, 1120), EMULATED_CHIP
    width, depth = weight.shape
    x, out = normal("float16", 3, depth), normal("float16", 3, width)
    FewRows(launcher, chip).linear(x, weight, out, norm=norm_of("float16", depth))


@pytest.mark.parametrize(
    "load",
    [
        "splits",
        pytest.param("streams", marks=pytest.mark.slow),
        "int4 products",
        pytest.param("dense products", marks=pytest.mark.slow),
    ],
)
def test_launches_do_the_work_of_the_ledger(launcher: EmulatedLauncher, load: str):
    """Notice an empty tile, a lost cache hint, a barrier too many, or a copy that nothing hides."""
    do_work(load, launcher)
    done = {
        name.partition("<")[0].split()[-1]: tuple(counters[count] for count in COUNTED)
        for name, counters in launcher.counters.items()
        if counters["mma"]
    }
    assert done == WORK[load], f"{load}: {done}"


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


def test_a_prompts_longest_blocks_start_first(launcher: EmulatedLauncher):
    """The blocks that end last are short, for each sequence and KV head."""
    attend(launcher, Shape("float16", 64, 3, 2, 16), [(150, 300)], is_deterministic=True)
    [products] = launcher.products.values()
    for of_head in np.array(products).reshape(2, -1):
        assert of_head[0] > of_head[-1]
        assert (np.diff(of_head) <= 0).all()


RINGS = {
    "int4 products": (1144, 2 * (32 + 4), "<f16, nibbles, 64, false, 32, 1, true, true>", 2, 4),
    "dense products": (1120, 2 * 64, "<f16, f16, 64, false, 32, 1, true, true>", 6, 7),
}
"""The inputs, the copies of a stage, the kernel, and its blocks and output tiles, by load."""


@pytest.mark.parametrize(
    "load", ["int4 products", pytest.param("dense products", marks=pytest.mark.slow)]
)
def test_few_rows_share_iterations_and_keep_their_rings_full(launcher: EmulatedLauncher, load: str):
    """While a stage is waited for, all others of the ring are in flight.

    The first stages are requested before the rows are measured, and all warps measure them.
    """
    do_work(load, launcher)
    [counters], [products] = launcher.counters.values(), launcher.products.values()
    depth, copies, parameters, num_blocks, num_tiles = RINGS[load]
    shape = shape_named(parameters)
    slices = shape.num_slices(depth)
    edges = [i * num_tiles * slices // num_blocks for i in range(num_blocks + 1)]
    in_flight = at_barriers = 0
    for begin, end in pairwise(edges):
        for warp in range(8):
            inputs = [
                i % slices * 8 * shape.inputs + warp * shape.inputs for i in range(begin, end)
            ]
            sizes = [copies * (k < depth) for k in inputs]
            in_flight += sum(
                sum(sizes[i + 1 : i + shape.stages]) for i, size in enumerate(sizes) if size
            )
            at_barriers += 2 * sum(sizes[: shape.stages])  # of the norm
    assert counters["in_flight"] == in_flight
    assert counters["copies_at_barriers"] >= at_barriers
    assert max(products) - min(products) <= shape.inputs // 16 * 2 * 8  # one iteration
    # A thread loads its vectors of three rows, the norm, and its kept inputs.
    most = 3 * 16 * -(-depth * 2 // (256 * 16))
    assert counters["longest_loads"] <= 4 * num_blocks * most


def test_streamed_blocks_have_equal_work(launcher: EmulatedLauncher):
    """No block has more than a unit more than another, whatever sequences it serves."""
    shape, chip = (
        Shape("float16", 64, 2, 1, 16),
        Chip(num_multiprocessors=4, shared_bytes=228 << 10),
    )
    attend(launcher, shape, [(1, 1536), (1, 64), (1, 640)], chip=chip)
    [products] = launcher.products.values()
    one_unit = 4 * 2 * 64 // 16  # four warps' products of scores and of values
    assert len(products) == 12
    assert max(products) - min(products) <= one_unit
