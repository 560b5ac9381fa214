"""Check that scheduling changes nothing with a quantised KV cache either.

Stored values differ from computed ones. So tokens are compared with those of each request alone in
a roomy engine, instead of the oracle's. NumPy computes in float64, so that rounding elsewhere
changes nothing. `test_batch_invariance.py` compares the bits of the jit backend.
"""

import itertools

import numpy as np
import pytest
from engines import run_to_end

from mie import EngineConfig, SamplingParams
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

VOCAB = 40

STRESSES = {
    "chunks": {"num_blocks": 40, "max_num_batched_tokens": 5, "enable_prefix_caching": False},
    "prefix hits": {"num_blocks": 40, "max_num_batched_tokens": 16},
    "recompute": {"num_blocks": 12, "max_num_batched_tokens": 32},
    "swap": {
        "num_blocks": 12,
        "max_num_batched_tokens": 32,
        "preemption_mode": "swap",
        "swap_space": 1 << 18,
    },
}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts that begin alike, some of them forked."""
    rng = np.random.default_rng(0)
    shared = rng.integers(4, VOCAB, 10).tolist()
    return [
        (
            shared[: 10 - i] + rng.integers(4, VOCAB, 2 + i).tolist(),
            SamplingParams(
                temperature=i % 2 * 1.0, seed=i, n=1 + i % 3, max_tokens=12, ignore_eos=True
            ),
        )
        for i in range(6)
    ]


def run(engine, asked: list[tuple[list[int], SamplingParams]]) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each choice."""
    for prompt, params in asked:
        engine.add_request(prompt, params, str(prompt))
    tokens = run_to_end(engine)
    assert engine.scheduler.manager.num_used == 0
    return tokens


@pytest.mark.few
@pytest.mark.parametrize("stress", STRESSES)
@pytest.mark.parametrize(
    ("model", "stored"),
    [
        *itertools.product(["llama", "mistral_window"], ["int8", "fp8"]),
        ("llama", "int4"),
        pytest.param("mistral_window", "int4", marks=pytest.mark.slow),
    ],
)
def test_scheduling_does_not_change_the_tokens(tiny, model: str, stress: str, stored: str):
    def new_engine(backend: str, **settings):
        config = EngineConfig(block_size=3, kv_cache_dtype=stored, **settings)
        return load_engine(
            tiny[model].directory, LoadSettings(engine=config, backend=backend, dtype="float64")
        )

    asked = requests()
    wanted: dict[tuple[str, int], list[int]] = {}
    for request in asked:
        wanted |= run(new_engine("numpy", num_blocks=40), [request])
    engine = new_engine("numpy", **STRESSES[stress])
    assert run(engine, asked) == wanted

    stats, manager = engine.stats, engine.scheduler.manager.stats
    happened = {
        "chunks": stats.num_steps > 15,
        "prefix hits": manager.num_hit_tokens > 0 and manager.num_copies > 0,
        "recompute": stats.num_preemptions > 0,
        "swap": manager.num_imported > 0,
    }
    assert happened[stress]
