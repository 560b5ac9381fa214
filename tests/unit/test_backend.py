"""Test the setting that selects the backend, and the settings that belong to one."""

import re

import pytest

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import BACKENDS, SETTINGS, load_backend
from mie.ops.backend import KVCacheShape
from mie.ops_cpu.cpu_backend import CpuBackend


@pytest.mark.parametrize("name", ["numpy", "numpy-plain"])
@pytest.mark.parametrize(
    ("stored", "planes"), [("auto", [4 * 16]), ("int8", [16, 4]), ("fp8", [16, 4])]
)
def test_a_kv_cache_has_the_size_that_its_backend_reports(name, stored, planes) -> None:
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
