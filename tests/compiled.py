"""Share the set-up of the compiled backend's tests: the reason to skip them, and its cache."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.kv_cache import HALVES, QUANTIZED

if TYPE_CHECKING:
    from mie.ops_jit.jit_backend import JitBackend
    from mie.ops_jit.memory import JitCache

HAS_NUMBA = importlib.util.find_spec("numba") is not None

needs_numba = pytest.mark.skipif(
    not HAS_NUMBA, reason="no Numba: the jit backend compiles its kernels with it"
)

LANES = 16
CACHES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), **HALVES, **QUANTIZED}
"""The dtypes of caches' elements."""
QUICK_CACHES = ("float32", "int8")
"""The dtypes whose kernels `make test` compiles."""
EACH_CACHE = [
    pytest.param(name, marks=[] if name in QUICK_CACHES else [pytest.mark.slow])
    for name in CACHES
    if name != "int4"
]
"""Caches with an element for each number. `test_jit_int4_cache.py` tests the other."""


@functools.cache  # each keeps threads
def jit_backend(
    num_threads: int = 2, enforce_eager: bool = False, activations: str = "float32"
) -> JitBackend:
    """Return a backend that a process shares. Matrices and caches bring their own dtypes."""
    config = EngineConfig(
        num_threads=num_threads, enforce_eager=enforce_eager, activations=activations
    )
    backend: Any = load_backend("jit", "auto", config)
    return backend


def planes_of(cache: JitCache) -> NDArray[Any]:
    """Return a copy of the elements of a cache as [L, 2, N, B, Hkv, Dh]."""
    size, dim = cache.shape.block_size, _padded(cache.shape.head_dim)
    keys, values = heads_of(cache, cache.elements).swapaxes(0, 1)
    heads = keys.shape[:3]  # L, Hkv, N
    if size % LANES == 0:
        keys = keys.reshape(*heads, -1, dim, LANES).swapaxes(-1, -2)
    both = [each.reshape(*heads, size, dim) for each in (keys, values)]
    return np.moveaxis(np.stack(both, axis=1), 2, 4)[..., : cache.shape.head_dim].copy()


def scales_of(cache: JitCache) -> NDArray[np.float32]:
    """Return a copy of the scales of a cache as [L, 2, N, B, Hkv]."""
    assert cache.scales is not None
    return np.moveaxis(heads_of(cache, cache.scales), 2, 4)


def fill_cache(
    cache: JitCache, planes: NDArray[Any], scales: NDArray[np.float32] | None = None
) -> None:
    """Overwrite the elements with planes [L, 2, N, B, Hkv, Dh], and the scales [L, 2, N, B, Hkv].

    The elements that pad a head become zero.
    """
    size, dim = cache.shape.block_size, _padded(cache.shape.head_dim)
    both = np.moveaxis(planes.astype(cache.elements.dtype), 4, 2)
    padding = [(0, 0)] * (both.ndim - 1) + [(0, dim - both.shape[-1])]
    keys, values = np.pad(both, padding).swapaxes(0, 1)
    heads = keys.shape[:3]
    if size % LANES == 0:
        keys = keys.reshape(*heads, -1, LANES, dim).swapaxes(-1, -2)
    both = np.stack([each.reshape(*heads, -1) for each in (keys, values)], axis=1)
    set_heads(cache.elements, both)
    if scales is not None:
        assert cache.scales is not None
        set_heads(cache.scales, np.moveaxis(scales, 4, 2))


def heads_of(cache: JitCache, array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of regions of a cache as [L, 2, Hkv, N, ...]."""
    heads = np.moveaxis(array, (0, 4), (3, 1))  # L, 2, Hkv, and the places of a block
    heads = heads.reshape(*heads.shape[:3], -1, array.shape[-1])
    return heads[:, :, :, : cache.shape.num_blocks].copy()


def set_heads(array: NDArray[Any], heads: NDArray[Any]) -> None:
    """Overwrite the blocks of a cache with [L, 2, Hkv, N, ...]."""
    for block in range(heads.shape[3]):
        region, place = divmod(block, LANES)
        array[region, :, :, place // 4, :, place % 4] = heads[:, :, :, block].swapaxes(1, 2)


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES
