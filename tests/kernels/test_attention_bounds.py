"""Bound the launches and allocations of attention for any lengths of sequences."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from emulated import chip_of, needs_compiler
from test_graphs import decodes
from test_kernels import Shape, attend, cache_shape

from mie.base.arithmetic import ceil_div
from mie.ops_gpu import attention as launches
from mie.ops_gpu.arena import Arena
from mie.ops_gpu.attention import MAX_SPLITS, SPLIT_TOKENS, PagedAttention, max_splits
from mie.ops_gpu.batch import DeviceBatch, bucket_of, host_batch, padded
from mie.ops_gpu.host.emulator import EmulatedLauncher

H200 = chip_of("h200")
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
LONG_AND_SHORT = [500] * 255 + [70_000]
LONG = [32_768] * 64
LENGTHS = {"mixed": LONG_AND_SHORT, "long": LONG, "short": [1], "alone": [100_000]}


class Recorder:
    """A launcher that only notes the grids."""

    xp: Any = np

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}

    def kernel(self, file: str, name: str) -> Any:
        def launch(grid: tuple[int, ...], *_: Any, shared_bytes: int = 0) -> None:
            short = name.partition("<")[0]
            self.blocks[short] = self.blocks.get(short, 0) + math.prod(grid)

        return launch


class Decode:
    """The launches and the partial results of one layer's decodes, padded as in a captured step."""

    def __init__(
        self,
        lengths: list[int],
        window: int | None,
        is_deterministic: bool,
        arena: Arena | None = None,
    ) -> None:
        batch = decodes(lengths, ceil_div(max(lengths), BLOCK))
        self.bucket = bucket_of(batch)
        assert self.bucket is not None
        host = host_batch(padded(batch, self.bucket), self.bucket.max_len)
        integers = np.concatenate(host.parts).astype(np.int32)
        recorder, arena = Recorder(), arena or Arena(np)
        attend = PagedAttention(recorder, H200, is_deterministic, arena.empty)
        # The cache is not read. One number stands for all of it.
        shape = (1 << 20, 2, KV_HEADS, BLOCK, HEAD_DIM)
        cache = np.broadcast_to(np.float16(0), shape)
        q = np.zeros((self.bucket.num_seqs, HEADS, HEAD_DIM), np.float16)
        self.device_batch: DeviceBatch = host.on_device(integers)
        for _ in range(2):  # layers
            attend(q, cache, self.device_batch, window)
        self.blocks = recorder.blocks
        self.partial_bytes = sum(
            size for name, size in arena.num_bytes.items() if name.startswith("partial")
        )
        self.planned_bytes = attend.partial_bytes(
            len(lengths),
            max(lengths),
            HEADS,
            cache_shape(1, BLOCK, KV_HEADS, HEAD_DIM),
            element="f16",
            stored="f16",
        )


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_streaming_launches_what_the_chip_holds(lengths: list[int], window: int | None):
    decode = Decode(lengths, window, is_deterministic=False)
    assert decode.blocks["paged_decode_stream"] == 2 * 264
    assert decode.blocks.get("count_tiles", 0) == (window is not None and max(lengths) > window)
    assert decode.partial_bytes < 5 << 20
    assert decode.partial_bytes <= decode.planned_bytes < 17 << 20  # which prompts may need


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_pieces_are_bounded(lengths: list[int], window: int | None):
    """255 sequences beside one of 70,000 tokens launched 1,048,576 blocks, which took 2.1 GB."""
    decode = Decode(lengths, window, is_deterministic=True)
    assert decode.blocks["paged_decode_stream"] == 2 * 264
    assert decode.partial_bytes <= decode.planned_bytes
    pieces = max_splits(max(lengths)) if window is None else 17  # 16, and one that it cuts
    room = decode.bucket.num_seqs * HEADS * min(pieces, MAX_SPLITS) * 4 * (HEAD_DIM + 1)
    assert decode.partial_bytes < 2 * room  # rounded up to powers of two


def test_partial_results_at_least_double_when_they_grow():
    """Captured steps keep the buffers before. All of them together are below twice the last."""
    arena = Arena(np)
    sizes = []
    for length in [300, 800, 1500, 4000, 4400, 9000]:
        for count in (1, 3, 5):
            Decode([length] * count, None, is_deterministic=True, arena=arena)
            sizes.append(arena.num_bytes["partial"])
    grown = sorted(set(sizes))
    assert grown == list(dict.fromkeys(sizes))
    assert len(grown) > 3
    assert all(after >= 2 * before for before, after in itertools.pairwise(grown))


@needs_compiler
@pytest.mark.parametrize("window", [None, 21, 200, 600])
def test_only_splits_with_tokens_write(monkeypatch: pytest.MonkeyPatch, window: int | None):
    """Sequences with more splits than allowed get longer ones. Results are compared as always."""
    monkeypatch.setattr(launches, "MAX_SPLITS", 3)
    shape = Shape("float16", 16, 2, 2, 16, window)
    lengths = [40, 4 * SPLIT_TOKENS + 50, 1, 2 * SPLIT_TOKENS, 3 * SPLIT_TOKENS + 1]
    launcher = EmulatedLauncher(check=True, count=True)
    attend(launcher, shape, [(1, length) for length in lengths], is_deterministic=True)
    [decode] = [each for name, each in launcher.counters.items() if "paged_decode<" in name]
    useful = 0
    for length in lengths:
        oldest = max(0, length - window) // 16 * 16 if window else 0
        useful += 2 * min(3, ceil_div(length - oldest, SPLIT_TOKENS))
    assert decode["blocks"] - decode["idle_blocks"] == useful
    assert decode["blocks"] <= 2 * len(lengths) * 3


@needs_compiler
@pytest.mark.parametrize("window", [21, 200, 600])
def test_streaming_reads_the_window_only(window: int):
    shape = Shape("float16", 64, 2, 1, 16, window)
    lengths = [40, 4 * SPLIT_TOKENS + 50, 1, 2 * SPLIT_TOKENS]
    launcher = EmulatedLauncher(check=True, count=True)
    attend(launcher, shape, [(1, length) for length in lengths])
    [decode] = [each for name, each in launcher.counters.items() if "decode_stream<" in name]
    seen = sum(min(length, window) for length in lengths)
    sectors = 2 * 2 * 64 // 32  # of a token: keys and values of 64 float16
    assert decode["cp_async_source.passes"] == sectors * seen
