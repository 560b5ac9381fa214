"""Test the tables of kernels row by row."""

import itertools
from typing import Any

import pytest
from emulated import chip_of

from mie.ops_gpu.dispatch import decode_kernel, prefill_kernel

H200, ORIN_NANO = chip_of("h200"), chip_of("jetson-orin-nano")

STORED = [None, "int8", "e4m3"]
"""Element types of a cache. None is the type of the queries."""


@pytest.mark.parametrize(
    ("element", "head_dim", "group", "block_size", "decode", "prefill"),
    [
        ("f16", 64, 1, 16, "stream", "paged_prefill_mma"),
        ("bf16", 128, 16, 48, "stream", "paged_prefill_mma"),
        ("f16", 64, 17, 16, "plain", "paged_prefill_mma"),
        ("bf16", 80, 1, 32, "stream", "paged_prefill_mma"),
        ("bf16", 96, 4, 16, "stream", "paged_prefill_mma"),
        ("f16", 112, 16, 16, "stream", "paged_prefill_mma"),
        ("bf16", 256, 8, 16, "stream", "paged_prefill_mma"),
        ("f16", 256, 9, 16, "plain", "paged_prefill_mma"),
        ("bf16", 72, 4, 16, "plain", "paged_prefill"),
        ("f16", 192, 4, 16, "plain", "paged_prefill"),
        ("float", 64, 4, 16, "plain", "paged_prefill"),
    ],
)
@pytest.mark.parametrize("stored", STORED)
def test_kernels_are_chosen_by_the_tables(
    element: str, head_dim: int, group: int, block_size: int, decode: str, prefill: str, stored: Any
):
    chosen = decode_kernel(element, head_dim, group, block_size, stored=stored or element)
    assert chosen.kind == decode
    assert prefill_kernel(element, head_dim, block_size, stored=stored or element).name == prefill


def test_decodes_with_large_heads_need_the_shared_memory_of_a_data_centres_chip():
    """A block of the tensor-core kernel has up to 131 KB of it, and a prompt's block less."""
    for device, kind in (("h200", "stream"), ("jetson-orin-nano", "stream"), ("rtx-5090", "plain")):
        room = chip_of(device).shared_bytes
        for stored in ("bf16", "int8"):
            chosen = decode_kernel("bf16", 256, 4, 16, stored=stored, shared_bytes=room)
            assert chosen.kind == kind
            assert chosen.shared_bytes + 1024 <= room
            assert prefill_kernel("bf16", 256, 16, stored=stored).shared_bytes + 1024 <= room


def test_a_block_of_another_size_needs_the_plain_kernels():
    chosen = decode_kernel("f16", 128, 4, 8, stored="f16")
    assert chosen.kind == "plain"
    assert prefill_kernel("f16", 64, 8, stored="int8").name == "paged_prefill"
    assert prefill_kernel("f16", 64, 8, stored="f16").name == "paged_prefill_mma"


@pytest.mark.parametrize(
    ("head_dim", "on_h200", "on_orin"),
    [(64, 132 * 3, 16), (96, 132 * 3, 16), (112, 132 * 2, 8), (128, 132 * 2, 8), (256, 132, 8)],
)
@pytest.mark.parametrize("stored", ["f16", "int8"])
def test_shared_memory_limits_the_resident_blocks(
    stored: str, head_dim: int, on_h200: int, on_orin: int
):
    size = decode_kernel("f16", head_dim, 8, 16, stored=stored).shared_bytes
    assert H200.resident_blocks(size, 3) == on_h200
    assert ORIN_NANO.resident_blocks(size, 3) == on_orin
    assert ORIN_NANO.resident_blocks(1 << 20, 3) == 8


def test_every_kernel_fits_the_smallest_chip():
    """A block on sm_87 has 163 KB of shared memory."""
    for element, head_dim, group, stored in itertools.product(
        ("f16", "float"), range(8, 257, 8), range(1, 17), STORED
    ):
        chosen = decode_kernel(element, head_dim, group, 16, stored=stored or element)
        assert chosen.shared_bytes <= 163 << 10
        chosen = prefill_kernel(element, head_dim, 16, stored=stored or element)
        assert chosen.shared_bytes <= 163 << 10
