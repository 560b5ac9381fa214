"""Check models with windows end to end: the tokens on every backend, and the blocks they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import naive
import numpy as np
import pytest
from audit import check_scheduler, kv_cache_of
from compiled import needs_numba
from emulated import needs_compiler
from engines import Tokens, run_to_end
from tiny_hybrids import LFM2, TinyHybrid
from tiny_models import LLAMA, TinyModel

from mie import EngineConfig, SamplingParams
from mie.engine.engine import Engine
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.memory.layers.states import States
from mie.memory.layers.windows import Windows

WINDOW = 5
MINISTRAL = LLAMA | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
}
SETTINGS = {"block_size": 4, "max_num_batched_tokens": 8, "max_model_len": 96, "max_num_seqs": 4}
SHARED = [(7 * i) % 33 + 4 for i in range(25)]
PROMPTS = [SHARED, [*SHARED[:17], 9, 8], [*SHARED, 5, 6, 7, 8, 9], [30, 31, 32], SHARED[3:]]


@pytest.fixture(scope="module")
def ministral(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("ministral"), MINISTRAL)


def fill_with_nan(cache: Any) -> None:
    """Fill a backend's cache, so that a slot that was not written spoils every token."""
    for plane in getattr(cache, "layers", [getattr(cache, "elements", cache)]):
        plane[...] = np.nan


def answers(
    model: TinyModel | TinyHybrid, backend: str, **settings: object
) -> tuple[list[list[int]], Engine]:
    """Return the greedy tokens of the prompts, each with two choices, and the engine."""
    config = EngineConfig(**{**SETTINGS, "num_blocks": 36, **settings})  # type: ignore[arg-type]
    engine = load_engine(
        model.directory,
        LoadSettings(engine=config, backend=backend, dtype="float32"),
        model=model.parsed,
    )
    fill_with_nan(kv_cache_of(engine))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2)
    tokens: Tokens = {}
    for round_of in (PROMPTS[:2], PROMPTS[2:]):
        for prompt in round_of:
            engine.add_request(prompt, params, str(PROMPTS.index(prompt)))
        tokens |= run_to_end(engine, lambda: check_scheduler(engine.scheduler))
    return [tokens[str(i), choice] for i in range(len(PROMPTS)) for choice in (0, 1)], engine


def check_tokens(model: TinyModel | TinyHybrid, tokens: list[list[int]]) -> None:
    """Compare the tokens of `answers` with the oracle's."""
    for i, prompt in enumerate(PROMPTS):
        expected, _, _ = naive.generate(
            model.config, model.weights, prompt,
            {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "n": 2},
            choice=0, stream=0, eos=[3], limit=96,
        )  # fmt: skip
        assert tokens[2 * i] == tokens[2 * i + 1] == expected


@pytest.mark.few
@pytest.mark.parametrize(
    "backend",
    [
        "numpy",
        pytest.param("jit", marks=needs_numba),
        pytest.param("cupy-emulated", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_tokens_equal_the_oracles_in_a_small_pool(ministral, backend, preemption_mode):
    """There are prefix hits, forks, copies, preemptions and swaps, with four groups of layers."""
    swap = {"swap_space": 1 << 18} if preemption_mode == "swap" else {}
    tokens, engine = answers(ministral, backend, preemption_mode=preemption_mode, **swap)
    check_tokens(ministral, tokens)
    manager = engine.scheduler.manager
    assert manager.part(Windows) is not None
    stats = manager.stats
    assert stats.num_hit_tokens > 0
    assert stats.num_copies > 0
    assert stats.num_evictions > 0
    assert (stats.num_imported > 0) == (preemption_mode == "swap")
    assert manager.num_used == 0


@pytest.fixture(scope="module")
def windowed_hybrid(tmp_path_factory: pytest.TempPathFactory) -> TinyHybrid:
    """Return a model with recurrent layers and windows. No family of config.json has both."""
    attends = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    kinds = ["conv", *attends[:2], "conv", *attends[2:]]
    config = LFM2 | {
        "num_hidden_layers": len(kinds),
        "layer_types": [kind.replace("sliding", "full") for kind in kinds],
    }
    model = TinyHybrid(tmp_path_factory.mktemp("hybrid"), config)
    windows = tuple(WINDOW if kind == "sliding_attention" else None for kind in kinds)
    model.parsed = replace(model.parsed, layer_windows=windows)
    model.config = config | {"sliding_window": WINDOW, "layer_types": kinds}
    return model


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_a_model_with_windows_and_states_gives_the_oracles_tokens(
    windowed_hybrid, backend, preemption_mode
):
    swap = {"swap_space": 1 << 18} if preemption_mode == "swap" else {}
    tokens, engine = answers(
        windowed_hybrid, backend, preemption_mode=preemption_mode, num_blocks=34, **swap
    )
    check_tokens(windowed_hybrid, tokens)
    manager = engine.scheduler.manager
    assert [*map(type, manager.parts)] == [Windows, States]
    assert manager.stats.num_hit_tokens > 0
    assert manager.stats.num_snapshots > 0
    assert engine.stats.num_preemptions > 0
    assert (manager.stats.num_imported > 0) == (preemption_mode == "swap")
    assert manager.num_used == 0


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
def test_a_long_answer_takes_no_more_blocks_than_its_windows_reach(ministral, backend):
    """Blocks behind the windows are freed while the answer grows, and its tokens are right."""
    config = EngineConfig(**SETTINGS, num_blocks=40, enable_prefix_caching=False)  # type: ignore[arg-type]
    engine = load_engine(
        ministral.directory, LoadSettings(engine=config, backend=backend, dtype="float32")
    )
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    [sequence] = engine.add_request(SHARED, params, "0").sequences
    most, manager = 0, engine.scheduler.manager
    windows = manager.part(Windows)
    assert windows is not None
    while engine.has_work:
        engine.step()
        most = max(most, manager.num_used)
        [*running] = engine.scheduler.running
        for seq in running:
            assert len(windows.tables[seq.table].entries) <= 5  # ceil((4 + 8 + 3) / 4) + 1
    tokens = sequence.output_ids
    assert len(tokens) == 70
    assert most <= 24 + 4 * 5
    expected, _, _ = naive.generate(
        ministral.config, ministral.weights, SHARED,
        {"max_tokens": 70, "temperature": 0.0, "ignore_eos": True, "n": 1},
        choice=0, stream=0, eos=[3], limit=96,
    )  # fmt: skip
    assert tokens == expected
