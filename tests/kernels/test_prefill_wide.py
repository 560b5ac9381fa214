"""Check prompts in blocks with 32 rows a warp: their bits, their use, and what they read."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import MODES, Shape, attend, make_backend, make_batch, make_cache, normal

from mie.ops_gpu.chip import Chip
from mie.ops_gpu.dispatch import WIDE_HEADS
from mie.ops_gpu.host.emulator import EmulatedLauncher

pytestmark = needs_compiler

SMALL = Chip(num_multiprocessors=1, shared_bytes=228 << 10)
"""Two blocks fill it, so its launches are wide."""

LARGE = replace(SMALL, num_multiprocessors=132)
SEQUENCES = [(90, 200), (17, 150), (2, 66)]


def run(shape: Shape, chip: Chip) -> tuple[bytes, int]:
    """Return the bits of one call, and the number of tiles of rows of its launch."""
    backend = make_backend("forward", shape.dtype, is_deterministic=True, chip=chip)
    batch, num_blocks = make_batch(SEQUENCES, shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    heads = shape.group * shape.num_kv_heads
    q = normal(shape.dtype, int(batch.cu_seqlens_q[-1]), heads, shape.head_dim)
    got = backend.paged_attention(q, cache, 0, batch, shape.window)
    launcher: Any = backend.launcher
    [(name, grid)] = launcher.launches
    assert name == "paged_prefill_mma"
    return got.tobytes(), grid[0]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window"),
    [
        ("float16", 64, 70),
        *(
            pytest.param("bfloat16", head_dim, window, marks=pytest.mark.slow)
            for head_dim in WIDE_HEADS
            for window in (None, 70)
        ),
    ],
)
def test_rows_have_the_same_bits_in_wide_blocks(dtype: str, head_dim: int, window: int | None):
    """90 tokens of three heads are three tiles of 128 rows, or five of 64."""
    shape = Shape(dtype, head_dim, 3, 1, 16, window)
    wide, narrow = run(shape, SMALL), run(shape, LARGE)
    assert (wide[1], narrow[1]) == (3, 5)
    assert wide[0] == narrow[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", WIDE_HEADS)
@pytest.mark.parametrize("window", [None, 33])
def test_wide_blocks(mode: str, head_dim: int, window: int | None):
    """Groups of one to sixteen, and blocks of 5 and 16 tokens, are compared with float64."""
    for group, block_size in ((1, 16), (7, 5), (16, 16)):
        shape = Shape("float16", head_dim, group, 1, block_size, window)
        attend(mode, shape, SEQUENCES, chip=SMALL, query_scale=3.0)


@pytest.mark.parametrize(
    ("shape", "shared_kb", "is_wide"),
    [
        (Shape("float16", 64, 3, 1, 16), 228, True),
        (Shape("float16", 128, 3, 1, 16), 164, False),  # two blocks do not fit
        (Shape("float16", 112, 3, 1, 16), 228, False),
        (Shape("float16", 256, 3, 1, 16), 228, False),
        (Shape("float16", 64, 3, 1, 16, None, "int8"), 228, False),
    ],
)
def test_wide_blocks_are_for_shapes_that_have_registers(
    shape: Shape, shared_kb: int, is_wide: bool
):
    chip = Chip(num_multiprocessors=1, shared_bytes=shared_kb << 10)
    assert run(shape, chip)[1] == (3 if is_wide else 5)


def counters_of(chip: Chip) -> Counter[str]:
    launcher = EmulatedLauncher(check=True, count=True)
    attend(launcher, Shape("float16", 64, 3, 1, 32), [(90, 200)], True, chip)
    [counters] = launcher.counters.values()
    return counters


def test_a_wide_block_reads_a_fragment_for_twice_the_rows():
    wide, narrow = counters_of(SMALL), counters_of(LARGE)
    assert wide["mma"] == 4 * wide["ldmatrix.requests"]
    assert narrow["mma"] == 2 * narrow["ldmatrix.requests"]
    for kind in ("ldmatrix", "cp_async", "cp_async_source"):
        assert wide[f"{kind}.passes"] == wide[f"{kind}.least"]
    assert wide["cp_async.requests"] < 0.7 * narrow["cp_async.requests"]


def test_an_infinite_query_spoils_no_other_row():
    """A row that is not finite is in a row tile with others, which keep their bits."""
    shape = Shape("float16", 64, 3, 1, 16)
    backend = make_backend("forward", shape.dtype, is_deterministic=True, chip=SMALL)
    batch, num_blocks = make_batch([(90, 90)], shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    q = normal(shape.dtype, 90, 3, 64)
    before = backend.paged_attention(q, cache, 0, batch, None).copy()
    q[41, 1, 5] = np.inf
    with np.errstate(all="ignore"):
        after = backend.paged_attention(q, cache, 0, batch, None)
    changed = (before.view(np.uint16) != after.view(np.uint16)).any(axis=-1)
    assert np.argwhere(changed).tolist() == [[41, 1]]
