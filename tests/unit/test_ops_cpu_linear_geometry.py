"""Check that a product's group and a tile's width change no bit, under every set of kernels."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mie.ops_cpu.linear import geometry
from mie.ops_cpu.linear.geometry import (
    DEFAULT_WIDTH,
    KERNEL_ROWS,
    MAX_ROWS,
    REFERENCE_GROUP,
    Geometry,
    parts_of,
)
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers

RNG = np.random.default_rng(3)
# The K of published models and of odd ones, in one part and in several.
INPUTS = (1, 9, 64, 130, 576, 896, 2048, 2049, 5632)
OTHER_KERNELS = (
    "SkylakeX",
    "Haswell",
    "Nehalem",
    *(pytest.param(core, marks=pytest.mark.slow) for core in ("Prescott", "Zen")),
)
FILES = [__file__, __file__.replace("_geometry", "")]
THEIR_TESTS = "geometry or (packed and (16_bits or itself or any_number_of_rows))"


def tiles_of(weight: np.ndarray, width: int) -> np.ndarray:
    """Return tiles [N / W, K, W] of a weight [K, N]."""
    return weight.reshape(len(weight), -1, width).transpose(1, 0, 2).copy()


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply by tiles of the default width, 4 rows at a time, and add the parts in order."""
    result = None
    for first, last in parts_of(len(weight)):
        groups = x.reshape(-1, REFERENCE_GROUP, len(weight))[..., first:last]
        tiles = tiles_of(weight, DEFAULT_WIDTH)[:, first:last]
        product = np.matmul(groups, tiles[:, None]).transpose(1, 2, 0, 3).reshape(len(x), -1)
        result = product if result is None else result + product
    assert result is not None
    return result


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_inputs", INPUTS)
def test_every_group_and_width_gives_the_same_bits(num_inputs: int, dtype: str):
    workers = Workers(1)
    plan = TiledPlan(np.dtype(dtype), workers)
    weight = RNG.standard_normal((num_inputs, 128)).astype(dtype)
    x = RNG.standard_normal((96, num_inputs)).astype(dtype)
    used = set()
    with Blas().threads(1):
        wanted = reference(x, weight)
        for width in KERNEL_ROWS:
            if not plan.geometry.is_possible(num_inputs, width):
                continue
            matrix = TiledMatrix(plan, plan.layouts[width], tiles_of(weight, width), 128, None)
            assert REFERENCE_GROUP in plan.geometry.groups(num_inputs, width)
            for num_rows in (*range(1, 10), 12, 13, 17, 20, 24, 48, 95, 96):
                np.testing.assert_array_equal(matrix.apply(x[:num_rows], None), wanted[:num_rows])
                [(_, group, _)] = plan.geometry.cut(num_rows, num_inputs, width).calls
                used.add((width, group))
    workers.close()
    assert len(used) > 1 or num_inputs < 9


def test_rows_are_covered_once_and_one_row_takes_at_most_a_group():
    for num_rows in (0, 1, 2, 5, 64, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS + 7):
        cut = Geometry(np.dtype("float32")).cut(num_rows, 576, DEFAULT_WIDTH)
        covered = [row for rows, _, _ in cut.calls for row in range(num_rows)[rows]]
        assert covered == list(range(num_rows))
        for rows, group, number in cut.calls:
            assert rows.start + group * number <= cut.num_padded
            assert group * number >= len(range(num_rows)[rows])


def test_parts_are_small_and_cover_every_input():
    for num_inputs in INPUTS:
        parts = parts_of(num_inputs)
        assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
        assert parts[-1][1] == num_inputs
        assert max(last - first for first, last in parts) <= geometry.MOST_INPUTS


@pytest.mark.skipif("MIE_OTHER_KERNELS" in os.environ, reason="this is the run that it starts")
@pytest.mark.parametrize("core", OTHER_KERNELS)
def test_the_same_holds_under_other_kernels(core: str):
    """OpenBLAS chooses its kernels when it is loaded, so each choice takes a separate process."""
    if platform.machine() != "x86_64":
        pytest.skip("the kernels are of x86-64")
    if core == "SkylakeX" and " avx512f " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU has no AVX-512")
    if core == Blas().core:
        pytest.skip("the kernels of this process")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    environment |= {"OPENBLAS_CORETYPE": core, "MIE_OTHER_KERNELS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-k", THEIR_TESTS]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", *FILES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
