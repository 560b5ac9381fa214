"""Test `EngineConfig`: defaults, ranges, and messages of refusals."""

import math
import re
from typing import Any

import numpy as np
import pytest
from tables import table

from mie import EngineConfig
from mie.config.engine import POLICIES
from mie.errors import ConfigError

SEED_RANGE = f"in {-(2**63)} … {2**64 - 1}"
REQUIRED = ("max_num_seqs", "max_num_batched_tokens", "block_size")
OPTIONAL = ("max_model_len", "num_blocks", "kv_cache_memory_bytes", "max_prefill_chunk")


def refuses(message: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *table("engine_config", "refused settings"),
        (
            {"scheduling_policy": "alphabetical"},
            f"must be one of {', '.join(POLICIES)}; got 'alphabetical'",
        ),
        ({"swap_space": 1 << 20}, "swap_space needs preemption_mode='swap'"),
    ],
)
def test_a_setting_without_effect_is_refused_by_name(settings, message):
    refuses(message, **settings)


@pytest.mark.parametrize("name", REQUIRED + OPTIONAL)
def test_sizes_are_integers_from_one(name: str):
    for value in (1, 7, 10**12, np.int64(3)):
        assert getattr(EngineConfig(**{name: value}), name) == value
    for wrong in (0, -1, 1.0, 2.5, True, False, "16", math.nan, math.inf, [1]):
        refuses(f"{name} must be an integer at least 1; got {wrong!r}", **{name: wrong})


def test_the_seed_is_an_integer_of_64_bits():
    for value in (0, -(2**63), 2**64 - 1):
        assert EngineConfig(seed=value).seed == value
    for wrong in (-(2**63) - 1, 2**64, None, True, 1.0, "1"):
        refuses(f"seed must be an integer {SEED_RANGE}; got {wrong!r}", seed=wrong)


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        *table("engine_config", "bad quotas"),
        ({"a": {"weight": float("inf")}}, "weight must be a number in (0, inf); got inf"),
        ({1: {}}, "client_quotas has the client 1; a client is a string"),
    ],
)
def test_a_bad_quota_is_refused_by_name(quotas: Any, message: str) -> None:
    refuses(message, scheduling_policy="fair", client_quotas=quotas)
