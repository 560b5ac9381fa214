"""Compare the emulator with NumPy: each part of the dialect keeps the promises of CUDA, in every
order."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import on_device
import pytest
from emulated import launcher as shared_launcher
from emulated import needs_compiler

from mie.base.commands import run_command
from mie.errors import ConfigError, MieError
from mie.ops.weights.integer import fused_multiply_add
from mie.ops_gpu.host.build import Builder
from mie.ops_gpu.host.emulator import ORDERS
from mie.ops_gpu.launcher import EmulatedLauncher, Kernel, KernelFault, Launcher

pytestmark = needs_compiler

FILE = str(Path(__file__).parent / "emulator.cu")
FLOATS = {"float": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
MODES = [*ORDERS, "checked", *(["cupy"] if on_device.IS_WANTED else [])]


@pytest.fixture(params=MODES, scope="module")
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "cupy":
        return on_device.device_launcher()
    is_checked = request.param == "checked"
    return shared_launcher(is_checked, "random" if is_checked else request.param)


def ints(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, count, dtype=np.int32)


def normals(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


# Threads and blocks.


def test_saxpy(launcher: Launcher):
    x, y = normals((1000,)), np.ones(1000, np.float32)
    launcher.kernel(FILE, "saxpy")((4,), (256,), (x, y, np.float32(2), np.int32(1000)))
    np.testing.assert_array_equal(y, 1 + 2 * x)


def test_positions_in_three_dimensions(launcher: Launcher):
    out = np.zeros(24 * 30, np.int32)
    launcher.kernel(FILE, "positions")((2, 3, 4), (5, 3, 2), (out,))
    wanted = np.arange(24)[:, None] * 1000 + np.arange(30)
    np.testing.assert_array_equal(out.reshape(24, 30), wanted)


def test_an_empty_grid_runs_nothing(launcher: Launcher):
    y = np.zeros(4, np.float32)
    arguments = (y, y, np.float32(1), np.int32(4))
    for grid in [(0,), (3, 0), (1, 1, 0)]:
        launcher.kernel(FILE, "saxpy")(grid, (32,), arguments)
    assert not y.any()


def test_a_struct_is_passed_by_value(launcher: Launcher):
    line = np.zeros(1, [("slope", np.float32), ("offset", np.float32), ("n", np.int32)])
    line[0] = (2, 1, 7)
    y = np.zeros(8, np.float32)
    launcher.kernel(FILE, "struct_argument")((1,), (8,), (y, line))
    np.testing.assert_array_equal(y, [1, 3, 5, 7, 9, 11, 13, 0])


# Barriers, warps, atomics.


@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_block_sum(launcher: Launcher, threads: int):
    x, y = normals((3, 1500)), np.zeros(3, np.float32)
    launcher.kernel(FILE, "block_sum")((3,), (threads,), (x, y, np.int32(1500)))
    np.testing.assert_allclose(y, x.sum(axis=1, dtype=np.float64), rtol=1e-4)


def test_warp_operations(launcher: Launcher):
    x, out = ints(32), np.zeros((12, 32), np.int32)
    launcher.kernel(FILE, "warp_operations")((1,), (32,), (x, out))
    lane = np.arange(32)
    halves = np.where(lane < 16, x[lane ^ 1] + x[lane ^ 3], x[lane ^ 8])
    wanted = [
        np.full(32, x[5]),
        x[lane // 8 * 8 + (lane + 3) % 8],
        np.where(lane >= 3, x[lane - 3], x),
        np.where(lane % 16 >= 3, x[lane - 3], x),
        np.where(lane + 5 < 32, x[(lane + 5) % 32], x),
        np.where(lane % 8 + 5 < 8, x[(lane + 5) % 32], x),
        x[lane ^ 9],
        x[lane ^ 1],
        np.full(32, sum(1 << i for i in lane if x[i] > 50), np.uint32).view(np.int32),
        np.ones(32),
        np.ones(32),
        halves[lane ^ 16],
    ]
    np.testing.assert_array_equal(out, wanted)


def test_the_larger_number_keeps_nan_and_subnormals(launcher: Launcher):
    nan, inf, tiny = np.nan, np.inf, 1e-45  # the smallest subnormal number
    x = np.array([1, -1, 0, tiny, -tiny, -inf, inf, nan, 3, nan, -0.0, 2 * tiny], np.float32)
    y = np.array([2, -2, tiny, 0, 0, -5, nan, 3, -nan, nan, 0.0, tiny], np.float32)
    out = np.zeros(12, np.float32)
    launcher.kernel(FILE, "larger")((1,), (12,), (x, y, out))
    np.testing.assert_array_equal(out, np.maximum(x, y))


def test_block_votes(launcher: Launcher):
    x, out = ints(96), np.zeros(96, np.int32)
    launcher.kernel(FILE, "block_votes")((1,), (96,), (x, out))
    assert set(out) == {int((x > 90).any()) + 2 + 4 * (x > 50).sum()}


def test_histogram(launcher: Launcher):
    x, counts = ints(5000), np.zeros(100, np.int32)
    kernel = launcher.kernel(FILE, "histogram")
    kernel((3,), (128,), (x, counts, np.int32(5000), np.int32(100)), shared_bytes=400)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=100))


def test_atomics(launcher: Launcher):
    x = ints(128)
    out, total = np.array([99, 0, 0, 0, 0], np.int32), np.zeros(1, np.float32)
    ring = np.zeros(1, np.uint32)
    launcher.kernel(FILE, "atomics")((2,), (64,), (x, out, total, ring))
    np.testing.assert_array_equal(out[:4], [x.min(), x.max(), np.bitwise_or.reduce(x), 7])
    assert out[4] - 1 in x
    assert total[0] == 64
    assert ring[0] == 128 % 10


def test_blocks_that_meet_by_fence_and_ticket(launcher: Launcher):
    x = normals((40, 32))
    partial, tickets, y = np.zeros(40, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    launcher.kernel(FILE, "last_block_adds")((40,), (32,), (x, partial, tickets, y))
    np.testing.assert_allclose(y[0], x.sum(dtype=np.float64), rtol=1e-4)


# 16-bit floats.


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_16_bit_float_widens_exactly(launcher: Launcher, name: str):
    dtype = FLOATS[name]
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    y = np.zeros(65536, dtype)
    launcher.kernel(FILE, f"scaled<{name}>")((512,), (128,), (x, y, np.float32(1)))
    wide = x.astype(np.float32)
    number = ~np.isnan(wide)
    # CuPy compiles with -ftz=true: a GPU flushes the floats that are subnormal.
    exact = number & ((wide == 0) | (abs(wide) >= np.finfo(np.float32).tiny))
    np.testing.assert_array_equal(y.view(np.uint16)[exact], x.view(np.uint16)[exact])
    assert np.isnan(y[~number].astype(np.float32)).all()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_rounding_is_to_nearest_even(launcher: Launcher, name: str):
    dtype = FLOATS[name]
    bits = np.random.default_rng(1).integers(0, 2**32, 2000, dtype=np.uint32)
    ties = np.arange(60000, 60048, dtype=np.uint16).view(dtype).astype(np.float32)
    halfway = (ties[:-1] + ties[1:]) / 2  # halfway between neighbours, which rounds to even
    x = np.concatenate([bits.view(np.float32), halfway, normals((1,))])
    x = np.where(np.isnan(x), np.float32(0), x)
    pairs, y = np.zeros(1024, np.uint32), np.zeros(2048, np.float32)
    launcher.kernel(FILE, f"packed<{name}>")((1,), (1024,), (x, pairs, y))
    with np.errstate(over="ignore"):
        wanted = x.astype(dtype)
    np.testing.assert_array_equal(pairs.view(np.uint16), wanted.view(np.uint16))
    np.testing.assert_array_equal(y, wanted.astype(np.float32))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_pairs_are_multiplied_and_added(launcher: Launcher, name: str):
    """The numbers are integers that need no rounding."""
    rng, dtype = np.random.default_rng(2), {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]
    a, b, c = (rng.integers(-size, size + 1, 512).astype(dtype) for size in (10, 10, 100))
    y = np.zeros(256, np.uint32)
    pairs = (array.view(np.uint32) for array in (a, b, c))
    launcher.kernel(FILE, f"fused<{name}>")((1,), (256,), (*pairs, y))
    wanted = a.astype(np.float32) * b.astype(np.float32) + c.astype(np.float32)
    np.testing.assert_array_equal(y.view(dtype).astype(np.float32), wanted)


@pytest.mark.parametrize(
    ("kernel", "stored"),
    [("widened<int8>", "int8"), ("widened<e4m3>", "e4m3"), ("widened_by_bits", "e4m3")],
)
def test_quantised_elements_are_widened_exactly(launcher: Launcher, stored: str, kernel: str):
    """All 256 codes, at each of the four places in a register."""
    codes = np.arange(256)[:, None] * [1, 3, 5, 7] + [0, 64, 128, 192]  # odd: a permutation
    codes = codes.astype(np.uint8)
    pairs = np.zeros((256, 4), np.uint32)
    launcher.kernel(FILE, kernel)((1,), (256,), (codes.view(np.uint32), pairs))
    numbers = codes.view(np.int8 if stored == "int8" else ml_dtypes.float8_e4m3fn)
    wanted = numbers[:, [0, 1, 2, 3, 0, 2, 1, 3]].astype(np.float32)
    if kernel == "widened_by_bits":  # no cache contains a code of NaN
        is_nan = np.isnan(wanted)
        signs = codes[:, [0, 1, 2, 3, 0, 2, 1, 3]] & 128
        wanted = np.where(is_nan, np.where(signs, -480, 480), wanted)
    got = pairs.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.signbit(got[wanted == 0]), np.signbit(wanted[wanted == 0]))


def test_powers_of_two(launcher: Launcher):
    x = np.concatenate([np.linspace(-100, 100, 200), [0.0, 1.0, 2.0, -np.inf], np.ones(52)])
    x = x.astype(np.float32)
    powers = np.zeros(256, np.float32)
    launcher.kernel(FILE, "base_two")((1,), (256,), (x, powers))
    np.testing.assert_allclose(powers, np.exp2(x.astype(np.float64)), rtol=1e-6)


# Matrices.


def fragment(matrix: np.ndarray) -> np.ndarray:
    """Return the parts of an 8x8 matrix in 32 lanes: elements (g, 2t) and (g, 2t + 1) in a
    register."""
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32)


def test_ldmatrix_and_movmatrix(launcher: Launcher):
    tiles = np.arange(1, 257, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((9, 32), np.uint32)
    launcher.kernel(FILE, "matrices")((1,), (32,), (tiles, out), shared_bytes=512)
    plain = [fragment(tile) for tile in tiles]
    turned = [fragment(tile.T) for tile in tiles]
    wanted = [*plain, turned[0], *turned]
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_gemm_by_cp_async_ldmatrix_and_mma(launcher: Launcher, name: str):
    m, n, k = 41, 24, 80
    a, b = normals((m, k), FLOATS[name]), normals((n, k), FLOATS[name])
    c = np.full((m, n), np.nan, np.float32)
    sizes = tuple(map(np.int32, (m, n, k)))
    kernel = launcher.kernel(FILE, f"gemm<{name}>")
    kernel((n // 8, -(-m // 16)), (32,), (a, b, c, *sizes), shared_bytes=1536)
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c, wanted, rtol=1e-5, atol=1e-4)


def test_integer_mma(launcher: Launcher):
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-128, 128, (n, 32)).astype(np.int8) for n in (16, 8))
    a[0], b[0], b[1] = -128, -128, 127  # the largest sums
    d = rng.integers(-(2**30), 2**30, (16, 8)).astype(np.int32)
    y = np.zeros((2, 16, 8), np.int32)
    words = (np.ascontiguousarray(each).view(np.uint32).reshape(-1) for each in (a, b))
    launcher.kernel(FILE, "integer_matrices")((1,), (32,), (*words, d, y))
    wide_a, wide_b = a.astype(np.int32), b.astype(np.int32)
    np.testing.assert_array_equal(y[0], d + wide_a @ wide_b.T)
    np.testing.assert_array_equal(y[1], d + wide_a[:, :16] @ wide_b[:, :16].T)


def test_ieee_operations_keep_subnormal_numbers(launcher: Launcher):
    rng = np.random.default_rng(5)
    sizes = 2.0 ** rng.integers([[-149], [-20], [-140]], [[-100], [20], [-90]], (3, 256))
    a, b, c = (rng.normal(size=(3, 256)) * sizes).astype(np.float32)
    y = np.zeros((3, 256), np.float32)
    launcher.kernel(FILE, "ieee")((1,), (256,), (a, b, c, y))
    for got, wanted in zip(y, (a + b, a * b, fused_multiply_add(a, b, c)), strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
    assert (np.abs(y[1]) < 2.0**-126).any()


# Poison.


def test_shared_memory_begins_as_nan_in_every_block():
    out = np.zeros(96, np.float32)
    shared_launcher().kernel(FILE, "stale_shared")((3,), (32,), (out,))
    assert np.isnan(out).all()


@pytest.mark.parametrize("is_checked", [False, True])
def test_memory_marked_uninitialised_is_nan(is_checked: bool):
    launcher = shared_launcher(is_checked)
    x = np.zeros((4, 32), np.float16)
    launcher.mark_uninitialised(x)
    assert np.isnan(x).all()
    y = np.zeros(128, np.float16)
    kernel = launcher.kernel(FILE, "scaled<f16>")
    if is_checked:
        with pytest.raises(KernelFault, match="uninitialised: a read of #1 at byte 0"):
            kernel((1,), (128,), (x, y, np.float32(1)))
    kernel((1,), (128,), (y, x, np.float32(1)))
    kernel((1,), (32,), (x[2], y[:32], np.float32(1)))  # a kernel has written it by now


def test_the_fast_build_reports_writes_past_dynamic_shared_memory():
    counts = np.zeros(101, np.int32)
    kernel = shared_launcher().kernel(FILE, "histogram")
    with pytest.raises(KernelFault, match="bytes past the end of dynamic shared"):
        kernel((1,), (32,), (ints(9), counts, np.int32(9), np.int32(101)), shared_bytes=400)


def test_the_watchdog_counts_cpu_time_and_not_wall_time(tmp_path: Path):
    """A busy machine may keep an honest launch waiting for longer than its limit."""
    source = '#include <unistd.h>\n#include "mie_cuda.cuh"\n'
    (tmp_path / "k.cu").write_text(source + "__global__ void k(int* x) { usleep(300000); *x = 1; }")
    x = np.zeros(1, np.int32)
    EmulatedLauncher(limit_s=0.1).kernel(str(tmp_path / "k.cu"), "k")((1,), (1,), (x,))
    assert x[0] == 1


def test_atomics_are_inlined_in_an_unoptimised_build_so_that_a_fault_in_one_has_a_line():
    names = ["atomics"]
    library = Builder().kernels(Path(FILE), names, (), level="-O0", is_checked=False)
    functions = run_command(["nm", "-C", str(library)])
    assert " atomics(" in functions
    assert not re.findall(r"atomic[A-Z].*", functions)


# Refusals of the launcher.


@pytest.fixture
def saxpy() -> Kernel:
    return shared_launcher().kernel(FILE, "saxpy")


X = np.zeros(8, np.float32)
A, N = np.float32(1), np.int32(8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, X, A), "emulator.cu saxpy: got 3 arguments, takes 4: #1, #2, #3, #4"),
        ((X, X, A, 8), "argument #4 must be a NumPy int32, got int"),
        ((X.astype(np.float16), X, A, N), "argument #1 must point at float32, got float16"),
        ((X.tolist(), X, A, N), "argument #1 must be an array, got list"),
        ((X[::2], X, A, N), "argument #1 must be C-contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(saxpy: Kernel, args: tuple, message: str):
    with pytest.raises(TypeError) as caught:
        saxpy((1,), (8,), args)
    assert message in str(caught.value)


def test_a_struct_of_another_size_is_refused():
    kernel = shared_launcher().kernel(FILE, "struct_argument")
    line = np.zeros(1, [("slope", np.float32), ("n", np.int32)])
    with pytest.raises(TypeError, match="must be a struct of 12 bytes, got 8"):
        kernel((1,), (8,), (X, line))
    with pytest.raises(TypeError, match="must be a structured array of one element"):
        kernel((1,), (8,), (X, np.float32(1)))


def test_16_bit_storage_types_are_distinguished():
    kernel = shared_launcher().kernel(FILE, "scaled<f16>")
    half, other = np.zeros(8, np.float16), np.zeros(8, ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="argument #1 must point at float16, got bfloat16"):
        kernel((1,), (8,), (other, half, A))
    with pytest.raises(TypeError, match="must point at bfloat16 or uint16, got float16"):
        shared_launcher().kernel(FILE, "scaled<bf16>")((1,), (8,), (half, other, A))
    shared_launcher().kernel(FILE, "scaled<bf16>")((1,), (8,), (other.view(np.uint16), other, A))


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes", "message"),
    [
        ((1,), (1025,), 0, r"a block of \(1025,\) must have 1 … 1024 threads"),
        ((1, 1, 1, 1), (1,), 0, "grid .* is not one to three sizes"),
        ((1,), (1,), 240_000, "240000 bytes of shared memory; at most 232448"),
    ],
)
def test_impossible_launches_are_refused(
    saxpy: Kernel, grid: tuple, block: tuple, shared_bytes: int, message: str
):
    with pytest.raises(ValueError, match=message):
        saxpy(grid, block, (X, X, A, N), shared_bytes)


def test_an_optional_pointer_may_be_none(saxpy: Kernel):
    saxpy((1,), (8,), (None, X, A, np.int32(0)))
    with pytest.raises(KernelFault, match="no memory at address"):
        saxpy((1,), (8,), (None, X, A, N))


# Building.


def test_the_compiler_s_errors_are_shown(tmp_path: Path):
    broken = tmp_path / "broken.cu"
    broken.write_text('#include "mie_cuda.cuh"\n__global__ void broken(int* x) { x = y; }\n')
    with pytest.raises(MieError, match=r"broken\.cu:2:.*error: .y. was not declared"):
        shared_launcher().kernel(str(broken), "broken")


def test_a_changed_header_causes_a_rebuild(tmp_path: Path):
    (tmp_path / "value.cuh").write_text("#define VALUE 1\n")
    source = '#include "mie_cuda.cuh"\n#include "value.cuh"\n'
    (tmp_path / "k.cu").write_text(source + "__global__ void k(int* x) { *x = VALUE; }\n")
    for value in (1, 2):
        (tmp_path / "value.cuh").write_text(f"#define VALUE {value}\n")
        x = np.zeros(1, np.int32)
        EmulatedLauncher().kernel(str(tmp_path / "k.cu"), "k")((1,), (1,), (x,))
        assert x[0] == value


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("no-such-compiler", "and no-such-compiler is not installed"),
        ("'open", "and 'open is no compiler"),
        ("sh -c true", "and sh -c true is no compiler"),
    ],
)
def test_a_missing_compiler_is_named(named: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", named)
    with pytest.raises(ConfigError, match=f"{message} .install g"):
        EmulatedLauncher()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("kill -KILL $$", "was ended by signal SIGKILL"),
        ("exit 3", "ended with code 3: no message"),
        ("echo 'fatal error: no space' >&2; echo more >&2; exit 1", "fatal error: no space"),
    ],
)
def test_a_compiler_that_fails_says_why(
    action: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\n{action}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MieError, match=r"failed on a kernel of the emulator") as caught:
        Builder().runtime()
    assert str(caught.value).splitlines()[1:] == [message]
