"""Compare every kernel with the NumPy operators, on the emulator.

Each runs with its production grid in three orders of threads and blocks. It runs once more in the
checked build, which reports accesses out of bounds, uninitialised or racing. Outputs and scratch
begin as NaN. With MIE_GPU_TESTS=1 each also runs on a GPU. The operators run in float64 on the
kernel's inputs, so the difference is the kernel's own rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import on_device
import pytest
from emulated import launcher, needs_compiler

from mie.ops import activation, attention, norm, rope
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops.kv_cache import QUANTIZED as ROUNDED
from mie.ops.weights import int4_cache
from mie.ops.weights.quantised_cache import QuantizedCache, dequantize, quantize
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.attention import SPLIT_TOKENS
from mie.ops_gpu.chip import EMULATED_CHIP, Chip
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.dispatch import TILE_TOKENS
from mie.ops_gpu.gemm import NumpyGemm
from mie.ops_gpu.host.nccl import EmulatedNccl
from mie.ops_gpu.kv_cache import ELEMENTS, KVCache
from mie.ops_gpu.queue import EmulatedQueue

pytestmark = needs_compiler

QUANTIZED = {name: ROUNDED[name] for name in ("int8", "fp8")}

# Maximum |got - wanted| / |wanted|. The last rounding, to the dtype, alone gives 0.3 of its epsilon
# on average: 3e-8, 2e-4, 1.7e-3.
ERRORS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}

DEVICE_MODES = ["cupy"] if on_device.IS_WANTED else []
MODES = ["forward", "reverse", "random", "checked", *DEVICE_MODES]


def launcher_of(mode: Any) -> Any:
    """Return the launcher of a mode, or the launcher itself."""
    if not isinstance(mode, str):
        return mode
    if mode == "cupy":
        return on_device.device_launcher()
    is_checked = mode == "checked"
    return launcher(is_checked, "random" if is_checked else mode)


class PoisoningLauncher:
    """A launcher whose new arrays are NaN, which the checked build treats as uninitialised."""

    uploaded: tuple[Any, ...] = (np.uint8,)
    """The dtypes of arrays that the host uploads."""

    is_listing = False

    def __init__(self, mode: Any) -> None:
        self._launcher = launcher_of(mode)
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        """The names and grids of the kernels."""
        self.xp: Any = SimpleNamespace(
            empty=self._empty,
            empty_like=lambda array: self._empty(array.shape, array.dtype),
            zeros=np.zeros,
            stack=np.stack,
            asarray=np.asarray,
        )

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> Any:
        kernel = self._launcher.kernel(file, name, options)

        def launch(grid: tuple[int, ...], *arguments: Any, **sizes: int) -> None:
            self.launches.append((name.partition("<")[0], grid))
            kernel(grid, *arguments, **sizes)

        return launch

    def _empty(self, shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        if array.size and array.dtype not in self.uploaded:
            self._launcher.mark_uninitialised(array)
        return array


def make_backend(
    mode: Any,
    dtype: str,
    is_deterministic: bool = False,
    chip: Chip = EMULATED_CHIP,
    stored: str = "auto",
    activations: str = "float32",
    uploaded: tuple[Any, ...] = (np.uint8,),
    enforce_eager: bool = False,
) -> CupyBackend:
    launcher = PoisoningLauncher(mode)
    launcher.uploaded = uploaded
    return CupyBackend(
        "cupy-emulated",
        launcher,
        NumpyGemm(),
        dtype,
        chip,
        queue=EmulatedQueue(),
        is_deterministic=is_deterministic,
        kv_cache_dtype=stored,
        activations=activations,
        enforce_eager=enforce_eager,
        nccl=EmulatedNccl(EmulatedQueue().submit),
    )


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, num_layers: int = 1
) -> KVCacheShape:
    return KVCacheShape(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def normal(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Return standard normal numbers in the dtype."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(DTYPES[dtype])


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def check(got: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    assert got.dtype == DTYPES[dtype]
    assert got.shape == wanted.shape
    error = np.linalg.norm(wide(got) - wanted) / np.linalg.norm(wanted)
    assert error < ERRORS[dtype], error


# The kernels of a layer, with widths below a warp, not a multiple of 16 bytes, and above a block.


@pytest.mark.parametrize("width", [1, 24, 33, 2100])
def test_gather_rows(mode: str, dtype: str, width: int):
    backend = make_backend(mode, dtype)
    table, rows = normal(dtype, 5, width), np.array([4, 0, 0, 3], np.int32)
    assert backend.take_rows(table, rows).tobytes() == table[rows].tobytes()
    assert backend.take_rows(table, rows[:0]).shape == (0, width)


@pytest.mark.parametrize("width", [1, 24, 33, 2100])
def test_rms_norm(mode: str, dtype: str, width: int):
    backend = make_backend(mode, dtype)
    x, weight = normal(dtype, 3, width), normal(dtype, width, seed=1)
    check(backend.rms_norm(x, weight, 1e-5), norm.rms_norm(wide(x), wide(weight), 1e-5), dtype)
    alone = backend.rms_norm(x[1:2], weight, 1e-5)
    assert alone.tobytes() == backend.rms_norm(x, weight, 1e-5)[1:2].tobytes()


@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_head_norm(mode: str, dtype: str, head_dim: int):
    """With five heads, some warps of the last block have no head."""
    qkv, weight = normal(dtype, 1, 8, head_dim), normal(dtype, head_dim, seed=1)
    got = qkv.copy()
    make_backend(mode, dtype).head_norm(got, 1, 6, weight, 1e-6)
    check(got[:, 1:6], norm.rms_norm(wide(qkv[:, 1:6]), wide(weight), 1e-6), dtype)
    others = [0, 6, 7]
    assert got[:, others].tobytes() == qkv[:, others].tobytes()


@pytest.mark.parametrize("width", [1, 33, 300])
@pytest.mark.parametrize("kind", activation.ACTIVATIONS)
def test_gated_mul(mode: str, dtype: str, width: int, kind: activation.Activation):
    gate_up = 4 * normal(dtype, 3, 2 * width)
    gate_up[0, 0] = -100  # exp overflows
    got = make_backend(mode, dtype).activate(gate_up, kind)
    check(got, activation.activate(wide(gate_up), kind), dtype)


def test_soft_cap(mode: str, dtype: str):
    logits = 20 * normal(dtype, 3, 300)
    got = make_backend(mode, dtype).soft_cap(logits.copy(), 15.0)
    check(got, activation.soft_cap(wide(logits), 15.0), dtype)


def test_rope_write_kv(mode: str, dtype: str):
    """Padded tokens (slot -1) leave the cache unchanged. Whole tables of numbers are compared."""
    backend, head_dim, size = make_backend(mode, dtype), 24, 4
    shape = cache_shape(6, size, 2, head_dim, 1)
    cache = backend.new_kv_cache(shape)
    inv_freq = 10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    table = backend.load_rope(inv_freq, 1.0, 50)
    qkv = normal(dtype, 4, 3 + 2 * 2, head_dim)
    positions, slots = np.array([0, 49, 7, 3], np.int32), np.array([5, -1, 23, 0], np.int32)
    batch = SimpleNamespace(positions=positions, slot_mapping=slots)
    q = backend.rope_write_kv(qkv, table, cache, 0, batch)
    rotated = rope.rope(wide(qkv[:, :5]), wide(table[positions]))
    check(q, rotated[:, :3], dtype)
    wanted = np.zeros((6, 2, 2, size, head_dim))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // size, 0, :, slot % size] = rotated[token, 3:]
            wanted[slot // size, 1, :, slot % size] = wide(qkv[token, 5:])
    check(cache.layers[0], wanted, dtype)


@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("head_dim", [8, 256])
def test_rope_write_kv_quantises(mode: str, dtype: str, stored: str, head_dim: int):
    """Values are quantised bit for bit as by the operator. Keys are close, because their rotation
    is rounded.

    Some heads are zero or contain NaN.
    """
    backend, size = make_backend(mode, dtype, stored=stored), 3
    shape = cache_shape(4, size, 2, head_dim, 1)
    cache = backend.new_kv_cache(shape)
    table = backend.load_rope(10000.0 ** (-np.arange(head_dim // 2) / head_dim), 1.0, 50)
    qkv = normal(dtype, 7, 3 + 2 * 2, head_dim)
    sizes = 10 ** np.random.default_rng(1).uniform(-2, 2, (7, 7, 1))
    qkv = (wide(qkv) * sizes).astype(qkv.dtype)
    qkv[0, 5], qkv[1, 5], qkv[2, 6], qkv[3, 3], qkv[4, 6] = 0, 0, 0, 0, 1e-29
    qkv[1, 5, 3], qkv[2, 6, head_dim - 1], qkv[3, 4, 0] = np.nan, -np.inf, np.nan
    qkv[4, 3, 1] = np.inf
    # With a scale of 1 for fp8: around the smallest normal number, and halfway between two codes.
    qkv[6, 5, :8] = 448, 0.75 * 2**-6, 2**-7, 1.5 * 2**-8, 2**-10, 1.0625, 2**-6, -1.1875
    positions = np.array([0, 49, 7, 3, 1, 2, 20], np.int32)
    slots = np.array([5, 1, 11, 0, 7, -1, 8], np.int32)
    batch = SimpleNamespace(positions=positions, slot_mapping=slots)
    q = backend.rope_write_kv(qkv, table, cache, 0, batch)
    rotated = rope.rope(wide(qkv[:, :5]), wide(table[positions]))
    check(q, rotated[:, :3], dtype)

    kept = slots >= 0
    blocks, offsets = slots[kept] // size, slots[kept] % size
    untouched = np.ones((4, 2, 2, size), bool)
    untouched[blocks, :, :, offsets] = False
    assert not cache.layers[0][untouched].any()
    assert not cache.scales[0][untouched].any()
    elements = cache.layers[0][blocks, :, :, offsets].view(QUANTIZED[stored])  # [T, 2, Hkv, Dh]
    scales = cache.scales[0][blocks, :, :, offsets]
    values = quantize(qkv[kept, 5:].astype(np.float32), QUANTIZED[stored])
    assert elements[:, 1].tobytes() == values.elements.tobytes()
    np.testing.assert_array_equal(scales[:, 1], values.scales)

    keys, got = rotated[kept, 3:], QuantizedCache(elements[:, 0], scales[:, 0])
    wanted = quantize(keys, QUANTIZED[stored])
    np.testing.assert_allclose(got.scales, wanted.scales, rtol=1e-6)
    error, least = (np.abs(dequantize(x, np.float64) - keys) for x in (got, wanted))
    largest = np.abs(keys).max(axis=-1, keepdims=True)
    assert ((error <= least + 1e-5 * largest) | ~np.isfinite(largest)).all()


@pytest.mark.parametrize("head_dim", [8, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stored", ["auto", *ELEMENTS])
def test_blocks_are_copied_exported_and_imported_bit_for_bit(
    mode: str, dtype: str, stored: str, head_dim: int
):
    backend = make_backend(mode, dtype, stored=stored)
    shape = cache_shape(7, 16, 3, head_dim, 2)
    cache, host = backend.new_kv_cache(shape), backend.new_host_cache(shape)
    assert len(cache.planes) == (2 if stored == "auto" else 4)
    assert sum(plane.nbytes for plane in cache.planes) == backend.kv_cache_bytes(shape)
    for seed, plane in enumerate(cache.planes):
        plane[...] = (9 * np.abs(normal(dtype, *plane.shape, seed=seed))).astype(plane.dtype)
    before = [plane.copy() for plane in cache.planes]
    backend.move_blocks(cache, cache, (1, 3), (2, 6))
    backend.move_blocks(cache, cache, (0, 1), (1, 0))
    backend.move_blocks(cache, host, (4, 6), (0, 5))
    backend.move_blocks(host, cache, (5, 0), (4, 5))
    origin = [1, 0, 1, 3, 3, 4, 3]
    for plane, old in zip(cache.planes, before, strict=True):
        assert plane.tobytes() == old[origin].tobytes()


def launches_of_copies(src: tuple[int, ...], dst: tuple[int, ...]) -> list[str]:
    """Return the kernels of one copy of blocks in a quantised cache of two layers."""
    backend = make_backend("forward", "float16", stored="int8")
    cache = backend.new_kv_cache(cache_shape(7, 16, 3, 8, 2))
    backend.move_blocks(cache, cache, src, dst)
    launches: Any = backend.launcher
    return [name for name, _ in launches.launches]


def test_blocks_are_staged_only_if_a_destination_is_a_source():
    """A direct copy reads and writes each byte once, and a staged one twice."""
    assert launches_of_copies((1, 3), (2, 6)) == ["copy_blocks"] * 4
    assert launches_of_copies((0, 1), (1, 0)) == ["gather_blocks"] * 4 + ["scatter_blocks"] * 4


# Attention.


@dataclass(frozen=True)
class Shape:
    """A case. Not every combination of dtype, head size, group and block size is tested, but each
    value is."""

    dtype: str
    head_dim: int
    group: int
    num_kv_heads: int
    block_size: int
    window: int | None = None
    stored: str = "auto"
    """The dtype of the KV cache."""

    def __str__(self) -> str:
        return (
            f"{self.dtype}-Dh{self.head_dim}-G{self.group}x{self.num_kv_heads}"
            f"-B{self.block_size}-W{self.window}-{self.stored}"
        )


SHAPES = [
    Shape("float32", 8, 2, 3, 4),
    Shape("float32", 64, 7, 1, 16, 20),
    Shape("float32", 256, 1, 2, 32),
    Shape("float16", 64, 2, 2, 5, 1),
    Shape("float16", 72, 16, 1, 8),
    Shape("float16", 128, 4, 1, 16, 1000),
    Shape("float16", 64, 7, 2, 48, 33),
    Shape("bfloat16", 64, 16, 1, 16),
    Shape("bfloat16", 128, 9, 1, 32, 18),
    Shape("bfloat16", 96, 3, 2, 16, 33),
    Shape("bfloat16", 128, 8, 1, 32),
    Shape("float32", 8, 3, 2, 5, None, "int8"),
    Shape("float32", 64, 1, 2, 16, None, "fp8"),
    Shape("float16", 72, 2, 1, 8, 20, "fp8"),
    Shape("float16", 64, 3, 2, 16, None, "int8"),
    Shape("float16", 128, 9, 1, 32, 33, "fp8"),
    Shape("bfloat16", 128, 4, 1, 16, 18, "int8"),
    Shape("bfloat16", 64, 16, 1, 48, None, "fp8"),
    Shape("bfloat16", 64, 2, 1, 24, None, "int8"),
    Shape("float32", 80, 3, 2, 5, None, "int4"),
    Shape("float16", 64, 2, 2, 16, 20, "int4"),
    Shape("bfloat16", 128, 4, 1, 16, None, "int4"),
    Shape("float32", 8, 1, 2, 3, 9, "int4"),
    Shape("float16", 80, 5, 1, 16, None, "fp8"),
    Shape("bfloat16", 112, 16, 1, 16, 33),
    Shape("bfloat16", 256, 8, 1, 16),
    Shape("float16", 96, 2, 2, 32, None, "int8"),
    Shape("float16", 256, 1, 2, 16, 40, "int8"),
    Shape("bfloat16", 112, 9, 1, 16, None, "fp8"),
    Shape("float16", 80, 9, 1, 48, 20),
    Shape("bfloat16", 256, 9, 1, 16, 33),
    Shape("bfloat16", 256, 4, 1, 16, None, "fp8"),
]

LONG_SHAPES = [
    Shape("float32", 8, 2, 3, 4),
    Shape("float32", 64, 7, 1, 16, 200),
    Shape("float16", 64, 7, 2, 16),
    Shape("bfloat16", 128, 9, 1, 32),
    Shape("float16", 128, 2, 1, 16, 300),
    Shape("float16", 64, 3, 2, 16, None, "int8"),
    Shape("bfloat16", 128, 4, 1, 16, 300, "int8"),
    Shape("float16", 128, 9, 1, 32, None, "fp8"),
    Shape("float16", 64, 2, 2, 16, 300, "int4"),
    Shape("bfloat16", 80, 1, 2, 16, 300),
    Shape("float16", 96, 9, 1, 16),
    Shape("float16", 256, 4, 1, 16, 300),
    Shape("bfloat16", 112, 5, 1, 32, None, "int8"),
    Shape("bfloat16", 256, 8, 1, 16, None, "int8"),
    Shape("float16", 80, 3, 1, 16, None, "int8"),
]


@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("num_queries", [1, 2])
@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
def test_tensor_cores_widen_every_element_exactly(
    mode: str, dtype: str, stored: str, num_queries: int
):
    """A query that sees one key returns its value, so every element is tested in each place of a
    register."""
    codes = np.arange(256, dtype=np.uint8)
    if stored == "fp8":
        codes[codes % 128 == 127] = 0  # NaN, which is never written
    rows = np.concatenate([np.roll(codes, by) for by in range(4)]).reshape(16, 64)
    shape = Shape(dtype, 64, 1, 1, 16)
    batch, num_blocks = make_batch([(num_queries, num_queries)] * 16, shape.block_size)
    cache = KVCache(
        layers=[np.zeros((num_blocks, 2, 1, 16, 64), ELEMENTS[stored])],
        scales=[np.full((num_blocks, 2, 1, 16), 0.125, np.float32)],
    )
    cache.layers[0][batch.block_tables[:, 0], 1, 0, :num_queries] = rows[:, None].view(np.int8)
    q = normal(dtype, 16 * num_queries, 1, 64)
    backend = make_backend(mode, dtype, stored=stored)
    got = wide(backend.paged_attention(q, cache, 0, batch, 1))
    wanted = 0.125 * rows.view(QUANTIZED[stored]).astype(np.float64)
    np.testing.assert_array_equal(got, np.repeat(wanted, num_queries, axis=0)[:, None])


INVARIANT = [
    ("float32", 64, "auto"),
    ("float16", 64, "auto"),
    ("float16", 64, "int8"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("float16", 80, "fp8"),
            ("bfloat16", 96, "auto"),
            ("float16", 112, "int8"),
            ("bfloat16", 256, "auto"),
            ("float16", 256, "int8"),
        )
    ),
    pytest.param("float16", 64, "int4", marks=pytest.mark.slow),
]


def some(shapes: list[Shape], step: int = 3) -> list[Any]:
    """Return the shapes, of which `make test` takes every ``step``-th."""
    return [
        pytest.param(shape, marks=[pytest.mark.slow] if number % step else [], id=str(shape))
        for number, shape in enumerate(shapes)
    ]


def in_turn(shapes: list[Shape], step: int = 1) -> list[Any]:
    """Return every shape with both kinds of decode.

    `make test` takes every ``step``-th shape with one of them, in turn.
    """
    return [
        pytest.param(
            *(shape, is_deterministic),
            marks=[pytest.mark.slow] if number % step or number // step % 2 != kind else [],
            id=f"{shape}-{is_deterministic}",
        )
        for number, shape in enumerate(shapes)
        for kind, is_deterministic in enumerate((False, True))
    ]


def make_batch(sequences: list[tuple[int, int]], block_size: int) -> tuple[StepBatch, int]:
    """Return sequences of (number of queries, length) with scattered blocks, and the number of
    blocks."""
    needed = [-(-length // block_size) for _, length in sequences]
    free = np.random.default_rng(0).permutation(sum(needed)).tolist()
    tables = np.full((len(sequences), max(needed) + 1), -1)  # -1 must have no effect
    for row, count in enumerate(needed):
        tables[row, :count] = [free.pop() for _ in range(count)]
    cu_seqlens_q = np.cumsum([0, *(num_queries for num_queries, _ in sequences)])
    none = np.zeros(0, np.int64)
    batch = StepBatch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=np.array([length for _, length in sequences]),
        block_tables=tables,
        logits_rows=none,
    )
    return batch, sum(needed)


def make_cache(shape: Shape, batch: StepBatch, num_blocks: int) -> tuple[KVCache, np.ndarray]:
    """Return a layer of the cache and the numbers that it represents, [2, N, B, Hkv, Dh] in
    float64.

    Slots of the batch's tokens have numbers, and every other slot is NaN. In a quantised cache the
    magnitudes of values differ by a factor of a thousand between tokens.
    """
    dims = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    kv = normal(shape.dtype, *dims, seed=7)
    if shape.stored != "auto":
        sizes = np.random.default_rng(6).uniform(-2, 1, dims[:-1])[:, 1, ..., None]
        kv[:, 1] = (wide(kv[:, 1]) * 10**sizes).astype(kv.dtype)
    for table, length in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
        if length % shape.block_size:
            kv[table[length // shape.block_size], :, :, length % shape.block_size :] = np.nan
    if shape.stored == "auto":
        return KVCache(layers=[kv]), wide(kv).transpose(1, 0, 3, 2, 4)
    if shape.stored == "int4":
        codes = int4_cache.quantize(wide(kv))
        codes.codes[np.isnan(codes.factors[..., 0, 0])] = 0xFF
        factors = np.ascontiguousarray(codes.factors.swapaxes(-1, -2)).view(np.float32)
        cache = KVCache(layers=[codes.codes.view(np.uint32)], scales=[factors[..., 0]])
        return cache, numbers_of_int4(cache)
    quantized = quantize(wide(kv), QUANTIZED[shape.stored])
    elements = np.where(np.isnan(quantized.scales)[..., None], np.int8(127), as_bits(quantized))
    cache = KVCache(layers=[elements.astype(ELEMENTS[shape.stored])], scales=[quantized.scales])
    return cache, dequantize(quantized, np.float64).transpose(1, 0, 3, 2, 4)


def content_of_int4(cache: KVCache) -> int4_cache.Int4Cache:
    """Return the codes and the factors of a layer [N, 2, Hkv, B, ...] of a cache of four bits."""
    factors = cache.scales[0].view(np.float16).reshape(*cache.scales[0].shape, 2)
    codes = np.ascontiguousarray(cache.layers[0]).view(np.uint8)
    return int4_cache.Int4Cache(codes, factors.swapaxes(-1, -2))


def numbers_of_int4(cache: KVCache) -> np.ndarray:
    """Return the numbers [2, N, B, Hkv, Dh] of a layer in float64."""
    numbers = int4_cache.dequantize(content_of_int4(cache), np.float64)
    return numbers.transpose(1, 0, 3, 2, 4)


def as_bits(quantized: QuantizedCache) -> np.ndarray:
    """Return the elements of any one-byte dtype as int8."""
    return quantized.elements.view(np.int8)


def operators_attention(
    q: np.ndarray,
    planes: Iterable[np.ndarray],
    batch: StepBatch,
    shape: Shape,
    sinks: np.ndarray | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Return the operator's result in float64 for a cache of these keys and values."""
    return attention.paged_attention(  # type: ignore[call-arg]
        wide(q),
        *planes,
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        shape.head_dim**-0.5,
        shape.window,
        soft_cap,
        None if sinks is None else wide(sinks),
    )


def attend(
    mode: Any,
    shape: Shape,
    sequences: list[tuple[int, int]],
    is_deterministic: bool = False,
    chip: Chip = EMULATED_CHIP,
    query_scale: float = 1.0,
    sinks: np.ndarray | None = None,
    soft_cap: float | None = None,
) -> None:
    """Compare one call with the operator."""
    batch, num_blocks = make_batch(sequences, shape.block_size)
    cache, planes = make_cache(shape, batch, num_blocks)
    num_tokens, num_heads = int(batch.cu_seqlens_q[-1]), shape.group * shape.num_kv_heads
    q = normal(shape.dtype, num_tokens, num_heads, shape.head_dim, seed=8)
    q = (q * query_scale).astype(q.dtype)
    backend = make_backend(mode, shape.dtype, is_deterministic, chip)
    got = backend.paged_attention(q, cache, 0, batch, shape.window, soft_cap, sinks)
    wanted = operators_attention(q, planes, batch, shape, sinks, soft_cap)
    check(got, wanted, shape.dtype)


@pytest.mark.parametrize(("shape", "is_deterministic"), in_turn(SHAPES, step=3))
def test_paged_decode(mode: str, shape: Shape, is_deterministic: bool):
    """The lengths are around the end of a block, and around the tokens that four warps process at
    once."""
    size = shape.block_size
    lengths = [1, size - 1, size, size + 1, 15, 17, 65]
    attend(mode, shape, [(1, length) for length in lengths], is_deterministic)


@pytest.mark.parametrize(("shape", "is_deterministic"), in_turn(LONG_SHAPES, step=3))
def test_decode_of_long_sequences(mode: str, shape: Shape, is_deterministic: bool):
    """There are more tiles than a ring has stages, cuts inside sequences, and short sequences
    beside them."""
    lengths = [3, SPLIT_TOKENS, 3 * SPLIT_TOKENS + 5, SPLIT_TOKENS + 1, 64]
    attend(mode, shape, [(1, length) for length in lengths], is_deterministic)


@pytest.mark.parametrize(("shape", "is_deterministic"), in_turn(LONG_SHAPES, step=5))
def test_decode_of_large_scores(mode: str, shape: Shape, is_deterministic: bool):
    """Two to the power of a score exceeds a float, so every sum needs its maximum subtracted."""
    lengths = [3 * SPLIT_TOKENS + 5, 40]
    attend(mode, shape, [(1, length) for length in lengths], is_deterministic, query_scale=60.0)


def test_a_decode_of_more_tiles_than_a_warp_has_lanes(mode: str):
    """A warp reads the block ids of 32 tiles at a time, here twice."""
    shape = Shape("float16", 64, 1, 1, 16)
    lone = Chip(num_multiprocessors=1, shared_bytes=0)
    attend(mode, shape, [(1, 33 * TILE_TOKENS), (1, 20)], chip=lone)


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
def test_more_parts_than_a_warp_has_lanes_are_merged(mode: str):
    """47 blocks share the keys of one sequence. A warp weighs 32 parts at a time."""
    chip = Chip(num_multiprocessors=132, shared_bytes=228 << 10)
    attend(mode, Shape("float16", 64, 1, 1, 16), [(1, 6000)], chip=chip)


@pytest.mark.parametrize("shape", some(SHAPES))
def test_paged_prefill(mode: str, shape: Shape):
    """The batch has prompts, chunks and decodes. Tiles of keys begin and end inside them."""
    attend(mode, shape, [(6, 6), (1, 5), (3, 140), (17, 33), (2, 32), (1, 64), (33, 65)])


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
@pytest.mark.parametrize(("dtype", "head_dim", "stored"), INVARIANT)
def test_a_deterministic_decode_does_not_depend_on_its_batch(
    mode: str, dtype: str, head_dim: int, stored: str
):
    """The bits depend neither on the other lengths nor on whether those are split."""
    shape = Shape(dtype, head_dim, 2, 2, 16, None, stored)
    backend = make_backend(mode, shape.dtype, is_deterministic=True)
    batch, num_blocks = make_batch([(1, 300), (1, 40), (1, 700)], shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    q = normal(shape.dtype, 3, 4, head_dim)
    together = backend.paged_attention(q, cache, 0, batch, None)
    for row in range(3):
        alone = replace(
            batch,
            cu_seqlens_q=np.array([0, 1]),
            seq_lens=batch.seq_lens[row : row + 1],
            block_tables=batch.block_tables[row : row + 1],
        )
        got = backend.paged_attention(q[row : row + 1], cache, 0, alone, None)
        assert got.tobytes() == together[row : row + 1].tobytes()


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
@pytest.mark.parametrize(("dtype", "head_dim", "stored"), INVARIANT)
@pytest.mark.parametrize("window", [None, 21])
def test_a_prompts_result_does_not_depend_on_its_chunks(
    mode: str, dtype: str, head_dim: int, stored: str, window: int | None
):
    """The bits are equal if no chunk is a single token, which another kernel computes."""
    shape = Shape(dtype, head_dim, 3, 1, 16, None, stored)
    backend = make_backend(mode, shape.dtype)
    batch, num_blocks = make_batch([(70, 70)], shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    q = normal(shape.dtype, 70, 3, head_dim)
    whole = backend.paged_attention(q, cache, 0, batch, window)
    for begin, end in ((0, 13), (13, 41), (41, 70)):
        chunk = replace(batch, cu_seqlens_q=np.array([0, end - begin]), seq_lens=np.array([end]))
        got = backend.paged_attention(q[begin:end], cache, 0, chunk, window)
        assert got.tobytes() == whole[begin:end].tobytes()
