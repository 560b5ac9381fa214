"""Check how streamed decodes are dealt to blocks: in even shares, and in pieces of a sequence."""

from dataclasses import replace
from typing import Any

import pytest
from emulated import needs_compiler
from test_kernels import Shape, attend, make_backend, make_batch, make_cache, normal

from mie.ops_gpu import attention as launches
from mie.ops_gpu.attention import SPLIT_TOKENS
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.host.emulator import EmulatedLauncher

pytestmark = needs_compiler

SHAPE = Shape("float16", 64, 2, 2, 16)
ONE_UNIT = 4 * 2 * 64 // 16
"""Products of four warps with a tile of keys and values each."""


def chip_of(num_multiprocessors: int) -> Chip:
    return Chip(num_multiprocessors=num_multiprocessors, shared_bytes=228 << 10)


def bits(mode: Any, lengths: list[int], chip: Chip, *, only: int, shape: Shape = SHAPE) -> bytes:
    """Return the bits of one sequence of a deterministic decode."""
    backend = make_backend(mode, shape.dtype, is_deterministic=True, chip=chip)
    batch, num_blocks = make_batch([(1, length) for length in [700, *lengths]], shape.block_size)
    tables = batch.block_tables.copy()
    tables[[0, only + 1]] = tables[[only + 1, 0]]  # the first sequence, in another place
    seq_lens = batch.seq_lens.copy()
    seq_lens[[0, only + 1]] = seq_lens[[only + 1, 0]]
    batch = replace(batch, block_tables=tables, seq_lens=seq_lens)
    cache, _ = make_cache(shape, batch, num_blocks)
    numbers = normal(shape.dtype, 64, 2, 2, 16, 64, seed=3)
    blocks = tables[only + 1, : -(-700 // 16)]
    cache.layers[0][blocks] = numbers[: len(blocks)]
    q = normal(shape.dtype, len(lengths) + 1, 4, 64)
    q[only + 1] = normal(shape.dtype, 4, 64)
    got = backend.paged_attention(q, cache, 0, batch, shape.window)
    return got[only + 1].tobytes()


@pytest.mark.parametrize("window", [None, pytest.param(333, marks=pytest.mark.slow)])
def test_pieces_depend_on_the_sequence_alone(window: int | None):
    """The bits depend neither on the chip, nor on the other sequences, nor on the place."""
    shape = replace(SHAPE, window=window)
    results = {
        bits("forward", lengths, chip_of(size), only=only, shape=shape)
        for size in (1, 5, 132)
        for lengths, only in (([3], 0), ([1500, 64, 65, 700], 2))
    }
    assert len(results) == 1


@pytest.mark.parametrize("mode", ["forward", "checked"])
@pytest.mark.parametrize("window", [None, 600])
def test_a_sequence_of_more_pieces_than_allowed_has_longer_ones(
    monkeypatch: pytest.MonkeyPatch, mode: str, window: int | None
):
    monkeypatch.setattr(launches, "MAX_SPLITS", 3)
    lengths = [40, 4 * SPLIT_TOKENS + 50, 1, 2 * SPLIT_TOKENS, 3 * SPLIT_TOKENS + 1]
    shape = replace(SHAPE, window=window)
    attend(mode, shape, [(1, length) for length in lengths], is_deterministic=True)


@pytest.mark.parametrize("mode", ["forward", pytest.param("checked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_more_sequences_than_a_warp_has_lanes(mode: str, is_deterministic: bool):
    """A warp holds 32 sequences, and a block may begin or end among any of them, or have all."""
    lengths = [1 + number % 5 * 29 for number in range(70)]
    shape = Shape("float16", 64, 1, 1, 16)
    for chip in (chip_of(2), Chip(num_multiprocessors=1, shared_bytes=0)):
        attend(mode, shape, [(1, length) for length in lengths], is_deterministic, chip)


def test_pieces_are_dealt_evenly():
    """A block has its share of the units, and less than a piece more."""
    launcher, lengths = EmulatedLauncher(check=True, count=True), [1536, 64, 640, 300]
    sequences = [(1, length) for length in lengths]
    attend(launcher, SHAPE, sequences, is_deterministic=True, chip=chip_of(2))
    [products] = launcher.products.values()
    share = sum(products) / len(products)
    assert len(products) == 6
    assert max(products) < share + 4 * ONE_UNIT
    assert min(products) > share - 4 * ONE_UNIT


def counters_of(sequences: list[tuple[int, int]], num_multiprocessors: int) -> Any:
    launcher = EmulatedLauncher(check=True, count=True)
    attend(launcher, SHAPE, sequences, is_deterministic=True, chip=chip_of(num_multiprocessors))
    [counters] = launcher.counters.values()
    return counters


def test_the_next_run_is_requested_before_a_merge():
    """A warp's next run has three tiles of 16 copies a lane on their way at the barrier of a merge,
    and one has arrived at the barrier after it. Three blocks have twenty runs."""
    counters = counters_of([(1, 256)] * 10, 1)
    assert counters["barriers"] == 20 + 17
    assert counters["copies_at_barriers"] == 128 * 48 * 17


def test_a_merge_requests_sixteen_parts_at_once():
    """The rounds of loads are 162. They would be 168 with four parts at once."""
    counters = counters_of([(1, 16 * 256)], 4)
    assert counters["load_rounds"] == 162
