"""Check prompts whose keys several blocks share, against float64 and by their launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from emulated import needs_compiler
from test_attention_bounds import H200, Recorder
from test_kernels import Shape, cache_shape, make_backend, make_batch, make_cache, normal
from test_prefill import TILE, prefill

from mie.base.arithmetic import ceil_div
from mie.ops.backend import StepBatch
from mie.ops_gpu import attention as launches
from mie.ops_gpu.arena import Arena
from mie.ops_gpu.attention import PagedAttention
from mie.ops_gpu.batch import to_device
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.dispatch import MAX_SPLITS, PrefillSplits, prefill_splits
from mie.ops_gpu.host.emulator import EmulatedLauncher

MODES = ("forward", "reverse", "random", "checked")
STORED = ("auto", "int8", "fp8")


@contextmanager
def splits(count: int, num_tiles: int) -> Iterator[None]:
    """Let every launch have this many splits of so many tiles on any chip."""
    with pytest.MonkeyPatch.context() as patch:
        chosen = PrefillSplits(count=count, tokens=num_tiles * TILE)
        patch.setattr(launches, "prefill_splits", lambda *_: chosen)
        yield


def shape_of(
    stored: str = "auto", window: int | None = None, group: int = 2, dtype: str = "float16"
) -> Shape:
    return Shape(dtype, 64, group, 2, 16, window, stored)


@needs_compiler
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_may_see_no_key_of_a_split(mode: str, stored: str, window: int | None):
    """The chunk begins in one tile and ends two tiles later.

    Only its last rows see the last tile, and with a window only its first rows see the first one.
    """
    with splits(6, 1):
        prefill(mode, shape_of(stored, window, group=1), [(130, 215)], 1.0)


@needs_compiler
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stored", STORED)
def test_large_scores_are_merged(mode: str, stored: str):
    """Two to the power of a score exceeds a float, so the merge needs the maximum subtracted."""
    with splits(3, 2):
        prefill(mode, shape_of(stored), [(20, 330), (3, 200)], 60.0)


Chunks = list[tuple[int, int]]


def bits(backend: CupyBackend, shape: Shape, sequences: Chunks, window: int | None = None) -> bytes:
    """Return the bits of one call."""
    batch, num_blocks = make_batch(sequences, shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    num_heads = shape.group * shape.num_kv_heads
    q = normal(shape.dtype, int(batch.cu_seqlens_q[-1]), num_heads, shape.head_dim)
    got: bytes = backend.paged_attention(q, cache, 0, batch, window).tobytes()
    return got


@needs_compiler
def test_a_second_call_gives_the_same_bits():
    """The last block resets the counters, and the order of the parts is fixed."""
    with splits(4, 1):
        results = {
            bits(backend, shape_of(), [(20, 250), (9, 100)])
            for backend in (make_backend("random", "float16"), make_backend("forward", "float16"))
            for _ in range(2)
        }
    assert len(results) == 1


@needs_compiler
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_result_depends_on_the_chip_only_without_batch_invariance(is_deterministic: bool):
    results = set()
    for num_multiprocessors in (1, 132):
        chip = Chip(num_multiprocessors=num_multiprocessors, shared_bytes=228 << 10)
        backend = make_backend("forward", "float16", is_deterministic, chip)
        results.add(bits(backend, shape_of(), [(20, 700)]))
    assert len(results) == (1 if is_deterministic else 2)


# Launches.


def batch_of(sequences: Chunks) -> StepBatch:
    return replace(make_batch(sequences, 16)[0], num_decodes=0)


class Prefill:
    """The launch and the partial results of one layer's prompts on an H200."""

    def __init__(
        self, sequences: Chunks, window: int | None = None, is_deterministic: bool = False
    ) -> None:
        recorder, arena = Recorder(), Arena(np)
        attend = PagedAttention(recorder, H200, is_deterministic, arena.empty)
        batch = to_device(np, batch_of(sequences))
        cache = np.broadcast_to(np.float16(0), (1 << 16, 2, 8, 16, 128))
        attend(np.zeros((len(batch.token_ids), 32, 128), np.float16), cache, batch, window)
        self.blocks = recorder.blocks["paged_prefill_mma"]
        self.partial_bytes = sum(
            size for name, size in arena.num_bytes.items() if name.startswith("partial")
        )
        shape = cache_shape(1, 16, 8, 128)
        longest = max(length for _, length in sequences)
        self.planned_bytes = attend.partial_bytes(
            len(sequences), longest, 32, shape, element="f16", stored="f16"
        )


def test_a_short_chunk_fills_the_chip():
    """64 tokens of 32 heads are 4 tiles of 8 KV heads, for the 264 blocks that the chip holds."""
    chunk = [(64, 64 + 32_768)]
    assert Prefill(chunk, is_deterministic=True).blocks == 32
    assert Prefill(chunk).blocks == 256


@pytest.mark.parametrize(
    ("sequences", "window", "num_splits"),
    [
        ([(64, 32_832)], None, 8),
        ([(64, 32_832)], 4096, 5),  # as many as for a context of the window
        ([(64, 4160)], None, 5),
        ([(64, 500)], None, 2),
        ([(64, 64)], None, 1),
        ([(300, 32_768)], None, 1),
        ([(9, 100_000), (1, 100_000), (5, 60)], None, 11),
        ([(4096, 4096)], None, 1),
        ([(16, 1 << 20)], None, MAX_SPLITS),
    ],
)
def test_launches_and_partial_results_are_bounded(
    sequences: Chunks, window: int | None, num_splits: int
):
    made = Prefill(sequences, window)
    num_tiles = ceil_div(4 * max(count for count, _ in sequences), 64)
    num_blocks = num_tiles * len(sequences) * 8
    assert made.blocks == num_splits * num_blocks
    assert num_splits == 1 or made.blocks <= 264
    assert (made.partial_bytes > 0) == (num_splits > 1)
    assert made.partial_bytes <= made.planned_bytes < 17 << 20


def test_splits_have_more_tiles_than_there_are_splits():
    for num_tiles in range(1, 4000, 7):
        chosen = prefill_splits(num_tiles * TILE - 5, 1, 10_000)
        assert chosen.count * chosen.tokens >= num_tiles * TILE
        assert (chosen.count - 1) * chosen.tokens < num_tiles * TILE, "no empty split"
        assert chosen.count == 1 or chosen.tokens >= 2 * TILE * chosen.count
        assert chosen.count <= MAX_SPLITS


@needs_compiler
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 700])
def test_every_launched_block_of_a_chunk_writes(window: int | None):
    launcher = EmulatedLauncher(check=True, count=True)
    backend = make_backend(launcher, "float16", chip=replace(H200, num_multiprocessors=8))
    bits(backend, shape_of(), [(20, 1500)], window)
    [counters] = launcher.counters.values()
    assert counters["idle_blocks"] == 0
    assert counters["blocks"] == 2 * (3 if window is None else 2)
