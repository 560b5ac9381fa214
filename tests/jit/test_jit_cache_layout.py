"""Test which memory of the cache a step writes, and the order of a block's bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from compiled import fill_cache, jit_backend, needs_numba, planes_of, scales_of

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.memory.pool import REGION
from mie.ops.arrays import HUGE_PAGE
from mie.ops.backend import KVCacheShape

pytestmark = needs_numba

SHAPE = KVCacheShape(num_layers=3, num_blocks=40, block_size=4, num_kv_heads=2, head_dim=8)


def test_a_region_of_the_pool_is_a_region_of_the_cache():
    from mie.ops_jit import layout

    assert layout.REGION == REGION
    assert layout.REGION % layout.RUN == 0


def filled(stored: str, seed: int) -> Any:
    """Return a cache with other numbers in each place."""
    from compiled import CACHES

    from mie.ops_jit.memory import JitCache

    cache, rng = JitCache.new(SHAPE, CACHES[stored]), np.random.default_rng(seed)
    planes = rng.integers(-99, 99, (3, 2, 40, 4, 2, 8))
    scales = None if cache.scales is None else rng.random(planes.shape[:-1]).astype(np.float32)
    fill_cache(cache, planes, scales)
    return cache


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_an_exported_block_is_keys_and_values_of_each_layer_head_by_head(stored: str):
    """Files of a disk cache keep this order."""
    cache, backend = filled(stored, 0), jit_backend()
    for block in (0, 5, 15, 16, 39):
        (data,) = backend.export_blocks(cache, [block])
        elements = np.zeros((3, 2, 2, 4, 16), cache.elements.dtype)  # L, 2, Hkv, B, padded Dh
        elements[..., :8] = planes_of(cache)[:, :, block].swapaxes(2, 3)
        wanted = elements.tobytes()
        if stored == "int8":
            wanted += scales_of(cache)[:, :, block].swapaxes(2, 3).tobytes()
        assert data == wanted


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_blocks_that_move_keep_their_contents_and_others_stay(stored: str):
    backend, source, target = jit_backend(), filled(stored, 1), filled(stored, 2)
    parts = [planes_of, *[scales_of] * (stored == "int8")]
    src, dst, wanted = [3, 17, 39, 4], [17, 3, 0, 33], [part(target) for part in parts]
    for part, numbers in zip(parts, wanted, strict=True):
        numbers[:, :, dst] = part(source)[:, :, src]
    backend.move_blocks(source, target, src, dst)
    for part, numbers in zip(parts, wanted, strict=True):
        np.testing.assert_array_equal(part(target), numbers)
    other = filled(stored, 3)
    for block, data in enumerate(backend.export_blocks(target, range(40))):
        backend.import_block(other, block, data)
    for part, numbers in zip(parts, wanted, strict=True):
        np.testing.assert_array_equal(part(other), numbers)
    # All are read before any is written.
    backend.move_blocks(other, other, [7, 8], [8, 7])
    for part, numbers in zip(parts, wanted, strict=True):
        numbers[:, :, [8, 7]] = numbers[:, :, [7, 8]]
        np.testing.assert_array_equal(part(other), numbers)


def test_short_answers_touch_one_region_each_of_a_large_cache(tmp_path: Path):
    """The memory is at most the regions in use, and a huge page at each end of a region."""
    config = tiny_models.LLAMA | {"num_hidden_layers": 6, "head_dim": 64}
    directory = tiny_models.write_model(
        tmp_path / "model", config, tiny_models.random_weights(config)
    )
    caches: list[Any] = []

    def watched(backend: Any) -> Any:
        new = backend.new_kv_cache
        backend.new_kv_cache = lambda shape: caches.append(new(shape)) or caches[-1]
        return backend

    settings = EngineConfig(num_blocks=1024, max_model_len=64)
    settings = LoadSettings(engine=settings, backend="jit")
    engine = load_engine(directory, settings, wrap=watched, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [engine.add_request([5 + row, 6, 7], params) for row in range(2)]
    while engine.has_work:
        engine.step()
    assert [len(each.sequences[0].output_ids) for each in requests] == [20, 20]
    elements = caches[0].elements
    memory = elements.reshape(-1).view(np.uint8)
    touched = [memory[at : at + HUGE_PAGE].any() for at in range(0, memory.size, HUGE_PAGE)]
    used = len(requests) * elements[0].nbytes
    assert elements.nbytes > 30 * used
    assert 0 < sum(touched) * HUGE_PAGE <= used + (len(requests) + 1) * HUGE_PAGE
