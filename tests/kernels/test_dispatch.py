"""Test the tables of kernels row by row."""

from __future__ import annotations

import itertools

import pytest

from mie.ops_gpu.chip import Chip
from mie.ops_gpu.dispatch import decode_kernel, prefill_kernel

H200 = Chip(num_multiprocessors=132, shared_bytes=228 << 10)
ORIN_NANO = Chip(num_multiprocessors=8, shared_bytes=164 << 10)


STORED = [None, "int8", "e4m3"]
"""Element types of a cache. None is the type of the queries."""


def parameters(*words: object, stored: str | None) -> str:
    return f"<{', '.join(map(str, [*words, *([stored] if stored else [])]))}>"


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("may_stream", [False, True])
def test_16_bit_heads_of_64_and_128_go_to_tensor_cores(may_stream: bool, stored: str | None):
    kind = "stream" if may_stream else "mma"
    stages = {64: 8, 128: 6} if stored else {64: 4, 128: 3}
    shapes = itertools.product(("f16", "bf16"), (64, 128), range(1, 17), (16, 32, 48))
    for element, head_dim, group, block_size in shapes:
        chosen = decode_kernel(
            element, head_dim, group, block_size, stored=stored or element, may_stream=may_stream
        )
        assert chosen.kind == kind
        assert chosen.head_tiles == (1 if group <= 8 else 2)
        assert chosen.parameters == parameters(
            element, head_dim, chosen.head_tiles, 4, stages[head_dim], stored=stored
        )


@pytest.mark.parametrize(
    ("element", "head_dim", "group", "block_size"),
    [
        ("float", 64, 4, 16),
        ("f16", 80, 4, 16),
        ("f16", 96, 4, 16),
        ("bf16", 256, 1, 32),
        ("f16", 64, 17, 16),
        ("f16", 128, 4, 8),
        ("bf16", 64, 4, 1),
    ],
)
@pytest.mark.parametrize("stored", STORED)
def test_other_shapes_go_to_the_plain_kernel(
    element: str, head_dim: int, group: int, block_size: int, stored: str | None
):
    chosen = decode_kernel(
        element, head_dim, group, block_size, stored=stored or element, may_stream=True
    )
    assert chosen.kind == "plain"
    assert chosen.parameters == parameters(element, head_dim, group, 4, stored=stored)


@pytest.mark.parametrize(
    ("element", "head_dim", "block_size", "stored", "name"),
    [
        ("f16", 64, 16, None, "paged_prefill_mma"),
        ("bf16", 128, 5, None, "paged_prefill_mma"),
        ("f16", 96, 16, None, "paged_prefill"),
        ("bf16", 256, 16, None, "paged_prefill"),
        ("float", 64, 16, None, "paged_prefill"),
        ("f16", 128, 16, "int8", "paged_prefill_mma"),
        ("bf16", 64, 48, "e4m3", "paged_prefill_mma"),
        ("f16", 64, 8, "int8", "paged_prefill"),
        ("bf16", 96, 16, "e4m3", "paged_prefill"),
        ("float", 64, 16, "int8", "paged_prefill"),
    ],
)
def test_prefill_on_tensor_cores(
    element: str, head_dim: int, block_size: int, stored: str | None, name: str
):
    chosen = prefill_kernel(element, head_dim, block_size, stored=stored or element)
    assert chosen.name == name
    assert chosen.parameters == parameters(element, head_dim, stored=stored)


def test_every_kernel_fits_the_smallest_chip():
    """A block on sm_87 has 163 KB of shared memory."""
    for element, head_dim, group, stored in itertools.product(
        ("f16", "float"), range(8, 257, 8), range(1, 17), STORED
    ):
        chosen = decode_kernel(
            element, head_dim, group, 16, stored=stored or element, may_stream=False
        )
        assert chosen.shared_bytes <= 163 << 10
        chosen = prefill_kernel(element, head_dim, 16, stored=stored or element)
        assert chosen.shared_bytes <= 163 << 10


def test_the_number_of_resident_blocks_is_right():
    """Shared memory limits the number. A quantised cache needs about as much of it."""
    for stored in ("f16", "int8"):
        wide, narrow = (
            decode_kernel("f16", head_dim, 8, 16, stored=stored, may_stream=True).shared_bytes
            for head_dim in (128, 64)
        )
        check_residents(wide, narrow)
    assert ORIN_NANO.resident_blocks(1 << 20, 3) == 8


def check_residents(wide: int, narrow: int) -> None:
    assert H200.resident_blocks(wide, 3) == 132 * 2
    assert H200.resident_blocks(narrow, 3) == 132 * 3
    assert ORIN_NANO.resident_blocks(wide, 3) == 8
    assert ORIN_NANO.resident_blocks(narrow, 3) == 8 * 2
