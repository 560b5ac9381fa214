"""Test the setting that selects the backend, and the settings that belong to one."""

import re

import numpy as np
import pytest
from emulated import needs_compiler

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import BACKENDS, SETTINGS, load_backend
from mie.ops.backend import Backend, KVCacheShape, StepBatch
from mie.ops_cpu.cpu_backend import CpuBackend


def test_every_backend_setting_is_an_engine_setting() -> None:
    names = {name for own in SETTINGS.values() for name in own}
    assert names <= set(EngineConfig.__dataclass_fields__)


@pytest.mark.parametrize("name", ["numpy", "numpy-plain"])
@pytest.mark.parametrize(
    ("stored", "planes"), [("auto", [4 * 16]), ("int8", [16, 4]), ("fp8", [16, 4])]
)
def test_a_kv_cache_has_the_size_that_its_backend_reports(
    name: str, stored: str, planes: list[int]
) -> None:
    """For each head and token with Dh 16, there are the elements, and a scale if quantised."""
    backend = load_backend(name, config=EngineConfig(kv_cache_dtype=stored))
    shape = KVCacheShape(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=5, head_dim=16)
    cache = backend.new_kv_cache(shape)
    arrays = [cache] if stored == "auto" else [cache.elements, cache.scales]
    heads_and_tokens = 2 * 2 * 3 * 4 * 5
    assert [array.nbytes for array in arrays] == [heads_and_tokens * size for size in planes]
    assert backend.kv_cache_bytes(shape) == heads_and_tokens * sum(planes)


def test_a_setting_reaches_its_backend_and_others_refuse_it() -> None:
    config = EngineConfig(num_threads=3)
    backend = load_backend("numpy", config=config)
    assert backend.workers.num_threads == 3
    for name in BACKENDS:
        if "num_threads" not in SETTINGS[name]:
            with pytest.raises(ConfigError, match=f"num_threads is not a setting of the {name}"):
                load_backend(name, config=config)


def attention_of_the_last(backend: Backend, lengths: list[int]) -> np.ndarray:
    """Return the attention of the last sequence, whose numbers are equal in every batch."""
    generator = np.random.default_rng(len(lengths))
    num_blocks = [-(-length // 16) for length in lengths]
    shape = KVCacheShape(
        num_layers=1, num_blocks=sum(num_blocks), block_size=16, num_kv_heads=1, head_dim=64
    )
    cache, q = backend.new_kv_cache(shape), np.zeros((len(lengths), 2, 64), np.float16)
    cache.layers[0][...] = generator.standard_normal(cache.layers[0].shape)
    same = np.random.default_rng(0)
    cache.layers[0][-num_blocks[-1] :] = same.standard_normal((num_blocks[-1], 2, 1, 16, 64))
    q[-1] = same.standard_normal((2, 64))
    tables = np.zeros((len(lengths), max(num_blocks)), np.int64)
    for row, count in enumerate(num_blocks):
        first = sum(num_blocks[:row])
        tables[row, :count] = np.arange(first, first + count)
    batch = StepBatch(
        token_ids=np.zeros(len(lengths), np.int64),
        positions=np.array(lengths) - 1,
        slot_mapping=np.full(len(lengths), -1),
        cu_seqlens_q=np.arange(len(lengths) + 1),
        seq_lens=np.array(lengths),
        block_tables=tables,
        logits_rows=np.arange(len(lengths)),
    )
    return np.array(backend.paged_attention(q, cache, 0, batch, None)[-1])


@needs_compiler
def test_batch_invariant_attention_does_not_depend_on_the_batch() -> None:
    batches = [[900], [300, 900], [77, 450, 900]]
    for setting in (True, False):
        config = EngineConfig(batch_invariant=setting)
        backend = load_backend("cupy-emulated", "float16", config)
        results = {attention_of_the_last(backend, lengths).tobytes() for lengths in batches}
        assert (len(results) == 1) == (setting is True)


# Batch invariance on the CPU.


@pytest.mark.parametrize(
    "settings", [{"linear_plan": "plain"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}]
)
def test_settings_that_cannot_be_invariant_are_refused(settings: dict[str, str]) -> None:
    got = {"linear_plan": "auto", "kv_cache_dtype": "auto"} | settings
    message = (
        "batch_invariant=True needs linear_plan 'tiled' or 'auto' and kv_cache_dtype 'auto' on the "
        f"numpy backend; got {got['linear_plan']!r} and {got['kv_cache_dtype']!r}"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_backend("numpy", config=EngineConfig(batch_invariant=True, **settings))
    backend = load_backend("numpy", config=EngineConfig(**settings))
    assert isinstance(backend, CpuBackend)
    assert not backend.is_batch_invariant


def test_16_bit_weights_may_be_invariant() -> None:
    config = EngineConfig(batch_invariant=True, weight_dtype="float16")
    backend = load_backend("numpy", "float32", config)
    backend.load_linear((64, 32), [np.ones((64, 32), np.float16)])
    assert isinstance(backend, CpuBackend)
    assert backend.is_batch_invariant


def test_plain_operators_refuse_it() -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        load_backend("numpy-plain", "float32", EngineConfig(batch_invariant=True))
