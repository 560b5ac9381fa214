"""Test the memory that a step's results are made of."""

import gc
import tracemalloc

import numpy as np
import pytest

from mie.ops_cpu.allocator import (
    CACHE_LINE,
    CHUNK_BYTES,
    HUGE_PAGE,
    SMALL_BYTES,
    CachingAllocator,
    WeightAllocator,
    huge_empty,
)

MANY = SMALL_BYTES  # enough elements for a slab


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (MANY,), (3, MANY, 2)])
def test_an_array_has_the_requested_shape_and_dtype(shape: tuple[int, ...], dtype: str) -> None:
    array = CachingAllocator().empty(shape, np.dtype(dtype))
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_memory_without_references_is_reused() -> None:
    allocator = CachingAllocator()
    first = allocator.empty((MANY,), np.dtype("float32"))
    at = address(first)
    view = first[10:].reshape(2, -1).T
    del first
    gc.disable()  # references alone decide
    try:
        assert address(allocator.empty((MANY,), np.dtype("float32"))) != at
        del view
        assert address(allocator.empty((MANY // 2,), np.dtype("float64"))) == at
    finally:
        gc.enable()


def test_arrays_in_use_never_overlap() -> None:
    rng = np.random.default_rng(0)
    allocator, held = CachingAllocator(), []
    for number in range(300):
        array = allocator.empty((int(rng.integers(1, 5 * MANY)),), np.dtype("float32"))
        array.fill(number)
        held.append((number, array))
        while len(held) > 6 or (held and rng.random() < 0.3):
            held.pop(int(rng.integers(len(held))))
        assert all((array == number).all() for number, array in held)


def test_the_allocator_keeps_only_what_was_in_use_at_once() -> None:
    """About: a block is rounded up to huge pages, and one more aligns it."""
    allocator, at_once = CachingAllocator(), 4
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        held = []
        for _ in range(500):
            held.append(allocator.empty((int(rng.integers(1, 3 * HUGE_PAGE)),), np.dtype("uint8")))
            held = held[-at_once:]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= (at_once + 1) * 4 * HUGE_PAGE + SMALL_BYTES


def test_large_memory_begins_with_a_huge_page() -> None:
    assert address(huge_empty(SMALL_BYTES)) % HUGE_PAGE == 0
    assert len(huge_empty(HUGE_PAGE + 1)) >= HUGE_PAGE + 1
    assert 3 <= len(huge_empty(3)) <= CACHE_LINE


def test_all_memory_begins_at_a_cache_line() -> None:
    for num_bytes in (1, 100, SMALL_BYTES - 1, SMALL_BYTES, HUGE_PAGE):
        held = [huge_empty(num_bytes) for _ in range(4)]
        assert {address(memory) % CACHE_LINE for memory in held} == {0}


def test_weights_lie_next_to_each_other_without_overlapping() -> None:
    rng = np.random.default_rng(0)
    allocator, held = WeightAllocator(), []
    for number in range(50):
        array = allocator.empty((int(rng.integers(1, 1000)), 7), "float32")
        array.fill(number)
        held.append(array)
    large = allocator.empty((CHUNK_BYTES + 1,), "uint8")
    large.fill(255)
    assert all((array == number).all() for number, array in enumerate(held))
    starts = [address(array) for array in held]
    assert {start % CACHE_LINE for start in [*starts, address(large)]} == {0}
    for start, following, array in zip(starts, starts[1:], held, strict=False):
        assert 0 <= following - start - array.nbytes < CACHE_LINE


def test_weights_have_the_requested_shape_and_dtype() -> None:
    array = WeightAllocator().empty((3, 0, 5), np.float64)
    assert array.shape == (3, 0, 5)
    assert WeightAllocator().empty((3, 5), np.float64).dtype == np.float64
