"""Compare writing, gathering and copying blocks of a paged cache with loops over slots."""

import numpy as np
import pytest

from mie.ops.kv_cache import INT4, QUANTIZED, gather_kv, move_blocks, take_blocks, write_kv
from mie.ops.weights import int4_cache
from mie.ops.weights.quantised_cache import LARGEST, SMALLEST_SCALE, dequantize, new_cache, quantize

DTYPES = ("float32", "float64")
NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM = 7, 2, 4


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_keys_and_values_are_read_from_the_slots_to_which_they_were_written():
    caches = np.zeros((2, NUM_BLOCKS, 3, NUM_KV_HEADS, HEAD_DIM))
    vectors = normal(1, (2, 4, NUM_KV_HEADS, HEAD_DIM))
    slots = np.array([10, 11, 15, 16])  # of blocks 3 and 5
    write_kv(vectors[0], vectors[1], caches[0], caches[1], slots)
    for cache, written in zip(caches, vectors, strict=True):
        np.testing.assert_array_equal(gather_kv(cache, np.array([3, 5]), 1, 5, "float64"), written)


# Quantised caches.

FORMATS = tuple(LARGEST)


def every_element(dtype: np.dtype) -> np.ndarray:
    """Return all finite numbers of the format, sorted."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return np.unique(numbers[np.isfinite(numbers) & (np.abs(numbers) <= LARGEST[dtype])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_each_number_becomes_the_nearest_element_of_its_vector_s_scale(stored, dtype):
    """The reference searches all elements. Midpoints occur, and round to the even element."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3, 64)) * 10.0 ** rng.integers(-6, 5, (40, 3, 1))
    x[0] = np.linspace(-LARGEST[stored], LARGEST[stored], 192).round(1).reshape(3, 64)
    x[:, :, 5] = np.where(rng.random((40, 3)) < 0.5, 1, -1) * np.abs(x).max(axis=-1)
    x = frozen(x.astype(dtype))
    got = quantize(x, stored)
    scales = (np.abs(x).max(axis=-1) / np.asarray(LARGEST[stored], dtype)).astype(np.float32)
    np.testing.assert_array_equal(got.scales, scales)
    elements, exact = every_element(stored), x.astype(float) / scales[..., None].astype(float)
    nearest = np.abs(exact[..., None] - elements).min(axis=-1)
    np.testing.assert_allclose(
        np.abs(exact - got.elements.astype(float)), nearest, rtol=0, atol=1e-4
    )
    assert (np.abs(got.elements.astype(float)).max(axis=-1) == LARGEST[stored]).all()
    back = dequantize(got, dtype)
    assert back.dtype == dtype
    np.testing.assert_array_equal(
        back, got.elements.astype(dtype) * got.scales[..., None].astype(dtype)
    )


def test_ties_go_to_the_even_element():
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize(x, QUANTIZED["int8"]).elements.tolist() == [[127, 0, 2, 2, 0, -2]]
    x = np.array([[448, 17, 19, -17, 2**-10, 3 * 2**-10]])  # 16, 18, 20 and 0, 2, 4 * 2**-10
    wanted = [448, 16, 20, -16, 0, 2**-8]
    assert quantize(x, QUANTIZED["fp8"]).elements.astype(float).tolist() == [wanted]


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_zero_vectors_stay_zero_and_nonfinite_ones_become_nan(stored: np.dtype):
    tiny = SMALLEST_SCALE * LARGEST[stored]
    rows = [[0, 0], [tiny * 0.9, 0], [tiny, -tiny], [np.inf, 1], [-np.inf, 1], [np.nan, 1], [1, 1]]
    for dtype in DTYPES:
        got = quantize(np.array(rows, dtype), stored)
        assert got.scales[:2].tolist() == [0, 0]
        assert np.isnan(got.scales).tolist() == [False, False, False, True, True, True, False]
        assert not got.elements[[0, 1, 3, 4, 5]].astype(float).any()
        back = dequantize(got, dtype)
        assert not back[:2].any()
        np.testing.assert_allclose(back[2], rows[2], rtol=1e-6)
        assert np.isnan(back[3:6]).all()
    huge = quantize(np.array([[1e300, 1.0]]), stored)  # its scale does not fit float32
    assert np.isnan(huge.scales).all()


@pytest.mark.parametrize("stored", QUANTIZED.values(), ids=str)
def test_a_quantised_cache_behaves_like_a_float_cache(stored: np.dtype):
    """Everything is compared with a float cache of the same numbers."""

    def numbers(cache) -> np.ndarray:
        dequantised = int4_cache.dequantize if stored == INT4 else dequantize
        return dequantised(cache, np.float32)

    def rounded(x: np.ndarray) -> np.ndarray:
        return numbers(int4_cache.quantize(x) if stored == INT4 else quantize(x, stored))

    shape = (2, 2, NUM_BLOCKS, 3, NUM_KV_HEADS, HEAD_DIM)
    cache, plain = new_cache(shape, stored), np.zeros(shape, np.float32)
    assert cache.shape == shape
    assert cache[1].shape == shape[1:]
    keys, values = (normal(seed, (9, NUM_KV_HEADS, HEAD_DIM), "float32") for seed in (9, 10))
    slots = np.random.default_rng(2).permutation(NUM_BLOCKS * 3)[:9]
    write_kv(keys, values, cache[1, 0], cache[1, 1], slots)
    write_kv(rounded(keys), rounded(values), plain[1, 0], plain[1, 1], slots)
    np.testing.assert_array_equal(numbers(cache), plain)

    copies = np.array([0, 4, 5]), np.array([4, 0, 2])
    move_blocks(cache, cache, *copies)
    move_blocks(plain, plain, *copies)
    np.testing.assert_array_equal(numbers(cache), plain)
    host, plain_host = new_cache(shape, stored), np.zeros(shape, np.float32)
    move_blocks(cache, host, *copies)
    move_blocks(plain, plain_host, *copies)
    np.testing.assert_array_equal(numbers(host), plain_host)

    table = np.array([5, 2, 10**9])
    got = gather_kv(cache[1, 0], table, 1, 6, np.float64)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, gather_kv(plain[1, 0], table, 1, 6), rtol=1e-6)
    tables = np.array([[3, 5], [0, 1]])
    np.testing.assert_array_equal(take_blocks(cache[1, 1], tables, np.float32), plain[1, 1][tables])
    with pytest.raises(IndexError):
        take_blocks(cache[1, 1], tables + NUM_BLOCKS, np.float32)
