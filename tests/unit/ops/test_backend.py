"""Test the setting that selects the backend, and the settings that belong to one."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from step_batches import step_batch

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import BACKENDS, SETTINGS, load_backend
from mie.ops import numpy_backend
from mie.ops.backend import KVCacheShape
from mie.ops.numpy_backend import NumpyBackend


@pytest.mark.parametrize(
    ("stored", "planes"),
    [("auto", [4 * 16]), ("int8", [16, 4]), ("fp8", [16, 4]), ("int4", [8, 4])],
)
def test_a_kv_cache_has_the_size_that_its_backend_reports(stored, planes) -> None:
    """For each head and token with Dh 16, there are the elements, and factors if quantised."""
    backend = load_backend("numpy", config=EngineConfig(kv_cache_dtype=stored))
    shape = KVCacheShape(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=5, head_dim=16)
    cache = backend.new_kv_cache(shape)
    arrays = [cache] if stored == "auto" else [*vars(cache).values()]
    heads_and_tokens = 2 * 2 * 3 * 4 * 5
    assert [array.nbytes for array in arrays] == [heads_and_tokens * size for size in planes]
    assert backend.kv_cache_bytes(shape) == heads_and_tokens * sum(planes)


def test_a_setting_reaches_its_backend_and_others_refuse_it() -> None:
    config = EngineConfig(num_threads=3)
    backend = load_backend("numpy", config=config)
    assert isinstance(backend, NumpyBackend)
    assert backend.num_threads == 3
    for name in BACKENDS:
        if "num_threads" not in SETTINGS[name]:
            with pytest.raises(ConfigError, match=f"num_threads is not a setting of the {name}"):
                load_backend(name, config=config)


# The threads of the BLAS.


class _Limits:
    """Note the limits that the backend sets."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def limit(self, number: int) -> nullcontext[None]:
        self.numbers.append(number)
        return nullcontext()


@pytest.mark.parametrize(
    ("num_tokens", "is_invariant", "num_threads"), [(4, False, 1), (128, False, 3), (128, True, 1)]
)
def test_large_steps_have_several_threads_of_blas(
    num_tokens: int, is_invariant: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = _Limits()
    monkeypatch.setattr(numpy_backend, "Blas", lambda: limits)
    backend = NumpyBackend(num_threads=3, batch_invariant=is_invariant)
    backend.load_linear((1024, 512), [np.zeros((1024, 512), np.float32)])
    batch = replace(step_batch([(1, 1)], 4, 1), token_ids=np.zeros(num_tokens, np.int64))
    backend.run_step(lambda batch: np.zeros(1), batch)
    assert limits.numbers == [num_threads]
