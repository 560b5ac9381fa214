"""Test ``batch_invariant`` on the CPU: refusals, and the option."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mie import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.ops_cpu.cpu_backend import CpuBackend


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
