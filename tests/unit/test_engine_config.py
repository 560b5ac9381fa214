"""Test `EngineConfig`: defaults, ranges, and messages of refusals."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

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
        ({"scheduling_policy": "lifo"}, f"must be one of {', '.join(POLICIES)}; got 'lifo'"),
        ({"batching": "dynamic"}, "must be one of continuous, static; got 'dynamic'"),
        ({"preemption_mode": "drop"}, "must be one of recompute, swap; got 'drop'"),
        ({"preemption_mode": None}, "preemption_mode must be one of"),
        ({"async_scheduling": "yes"}, "async_scheduling must be True or False; got 'yes'"),
        ({"kv_cache_dtype": "int4"}, "must be one of auto, int8, fp8; got 'int4'"),
        ({"linear_plan": "fast"}, "must be one of auto, plain, tiled; got 'fast'"),
        ({"weight_dtype": "int4"}, "must be one of auto, float32, bfloat16, float16; got 'int4'"),
        (
            {"weight_dtype": "float16", "linear_plan": "plain"},
            "weight_dtype='float16' needs linear_plan='tiled' or 'auto'; got 'plain'",
        ),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be a number in (0, 1]; got 0"),
        ({"watermark": 1.5}, "watermark must be a number in [0, 1]; got 1.5"),
        ({"max_cached_blocks": -1}, "max_cached_blocks must be an integer at least 0; got -1"),
        ({"event_log_steps": -1}, "event_log_steps must be an integer at least 0; got -1"),
        ({"swap_space": 1 << 20}, "swap_space needs preemption_mode='swap'"),
        ({"sjf_ageing": 2}, "sjf_ageing needs scheduling_policy='sjf'; got 'fcfs'"),
        ({"sjf_ageing": 0, "scheduling_policy": "sjf"}, "sjf_ageing must be an integer at least 1"),
        ({"fair_turn": 4}, "fair_turn needs scheduling_policy='fair'; got 'fcfs'"),
        ({"client_quotas": {}}, "client_quotas needs scheduling_policy='fair'; got 'fcfs'"),
        (
            {"admit_after_preemption": True, "batching": "static"},
            "admit_after_preemption needs batching='continuous'; got 'static'",
        ),
        (
            {"max_cached_blocks": 4, "enable_prefix_caching": False},
            "max_cached_blocks needs enable_prefix_caching=True",
        ),
        (
            {"max_prefill_chunk": 4, "enable_chunked_prefill": False},
            "max_prefill_chunk needs enable_chunked_prefill=True",
        ),
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
        ({"a": {"weight": 0}}, "client_quotas of 'a': weight must be a number above 0; got 0"),
        ({"a": {"weight": float("inf")}}, "weight must be a number above 0; got inf"),
        ({"a": {"weight": True}}, "weight must be a number above 0; got True"),
        ({"a": {"max_num_seqs": 0}}, "max_num_seqs must be an integer at least 1; got 0"),
        ({"a": {"max_num_seqs": 1.5}}, "max_num_seqs must be an integer at least 1; got 1.5"),
        ({"a": {"wieght": 2}}, "client_quotas of 'a' has no 'wieght'; it may have weight and max"),
        ({"a": 2}, "client_quotas of 'a' must be an object of weight and max_num_seqs; got 2"),
        ({1: {}}, "client_quotas has the client 1; a client is a string"),
        ([], "client_quotas must map clients to quotas; got []"),
    ],
)
def test_a_bad_quota_is_refused_by_name(quotas: Any, message: str) -> None:
    refuses(message, scheduling_policy="fair", client_quotas=quotas)
