"""Check that answers with a prefix cache on a disk equal answers without a cache.

A scenario has several lifetimes of an engine on one folder. Between two lifetimes files are
damaged, removed and added.
"""

import random
from collections import Counter
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from audit import check_scheduler, tier_of
from compiled import needs_numba

from mie import SamplingParams
from mie.config.engine import EngineConfig
from mie.disk.segment import SUFFIX
from mie.engine.engine import Engine
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.events.replay import State
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
MODELS = ("qwen3_tied", "gemma3_two_ropes", "mistral_window", "qwen35_delta", "granite4_mamba")
Ask = tuple[list[int], SamplingParams, str | None]
FAULTS = ("none", "none", "flip", "cut", "remove", "foreign")


def new_engine(model: str, backend: str, **settings: Any) -> Engine:
    dtype = "float64" if backend == "numpy" else "float32"
    return load_engine(
        GOLDEN / model,
        LoadSettings(engine=EngineConfig(**settings), backend=backend, dtype=dtype),
        use_tqdm=False,
    )


def settings_of(rng: random.Random) -> dict[str, Any]:
    return {
        "block_size": rng.choice([2, 4]),
        "num_blocks": rng.choice([60, 120]),
        "max_model_len": 40,
        "max_num_seqs": rng.choice([1, 3, 6]),
        "max_num_batched_tokens": rng.choice([8, 64]),
        **rng.choice([{"preemption_mode": "swap", "swap_space": 1 << 18}, {}]),
    }


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 70) for _ in range(count)]


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Return prompts that begin alike, so that they share blocks."""
    stem = token_ids(rng, 20)
    lengths = [rng.choice([6, 12, 20]) for _ in range(4)]
    return [stem[:length] + token_ids(rng, rng.randrange(1, 8)) for length in lengths]


def requests_of(rng: random.Random, prompts: list[list[int]]) -> list[Ask]:
    return [
        (
            rng.choice(prompts),
            SamplingParams(
                max_tokens=rng.randrange(1, 10),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(100),
                n=rng.choice([1, 1, 2]),
                logprobs=rng.choice([None, 2]),
                ignore_eos=True,
            ),
            rng.choice([None, "a"]),
        )
        for _ in range(rng.randrange(2, 7))
    ]


def answers(engine: Engine, asks: list[Ask], aborted: Mapping[int, int]) -> list[list[object]]:
    """Return the tokens of each choice, and with exact products the log-probabilities.

    ``aborted`` has the requests that are aborted before a step. They have no answer.
    """
    added = [engine.add_request(ids, params, cache_salt=salt) for ids, params, salt in asks]
    for step in count():
        if step in aborted:
            engine.abort(added[aborted[step]].request_id)
        if not engine.has_work:
            break
        engine.step()
        check_scheduler(engine.scheduler)
    is_exact = engine.backend == "jit"
    return [
        [
            (seq.output_ids, seq.finish_reason, [row.logprobs for row in seq.logprobs] * is_exact)
            for seq in request.sequences
        ]
        for request in added
    ]


def check_log(engine: Engine) -> None:
    """Check that the log leads to the state of the engine."""
    *_, segment = engine.log.segments()
    state = State.from_snapshot(segment.snapshot, segment.after)
    for step in segment.steps:
        state.apply_step(step)
    for record in segment.rest:
        state.apply(record)
    assert state.snapshot() == scheduler_snapshot(engine.scheduler)


def break_files(folder: Path, rng: random.Random) -> str:
    """Damage the files as a bad disk, another program or a user may."""
    fault = rng.choice(FAULTS)
    segments = sorted(folder.rglob(f"*{SUFFIX}"))
    for path in segments:
        data = bytearray(path.read_bytes())
        if fault == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif fault == "cut":
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        if fault == "remove":
            path.unlink()
    if fault == "foreign" and segments:
        segments[0].with_name(f"foreign{SUFFIX}").write_bytes(rng.randbytes(500))
    return fault


def check_scenario(model: str, backend: str, seed: int, folder: Path) -> Counter[str]:
    """Compare three lifetimes with engines without a cache, and return the events."""
    rng, seen = random.Random(f"{model} {seed}"), Counter[str]()
    settings, prompts = settings_of(rng), prompts_of(rng)
    for _ in range(3):
        asks = requests_of(rng, prompts)
        aborted = {rng.randrange(1, 6): rng.randrange(len(asks)) for _ in range(rng.choice([0, 2]))}
        plain = new_engine(model, backend, enable_prefix_caching=False, **settings)
        engine = new_engine(model, backend, prefix_cache_dir=str(folder), **settings)
        expected, found = answers(plain, asks, {}), answers(engine, asks, aborted)
        for number in {*range(len(asks))} - {*aborted.values()}:
            assert found[number] == expected[number]
        check_log(engine)
        tier = tier_of(engine)
        tier.close()
        stats = tier.store.stats
        seen += Counter(hits=tier.num_hits, damaged=stats.num_damaged, dropped=stats.num_dropped)
        seen[break_files(folder, rng)] += 1
    return seen


@pytest.mark.parametrize("model", MODELS)
def test_answers_with_a_cache_on_a_disk_equal_answers_without_one(model: str, tmp_path: Path):
    seen = Counter[str]()
    for seed in range(3):
        seen += check_scenario(model, "numpy", seed, tmp_path / str(seed))
    assert seen["hits"]
    assert not seen["dropped"]


@needs_numba
def test_log_probabilities_with_a_cache_on_a_disk_have_equal_bits(tmp_path: Path):
    assert check_scenario("qwen3_tied", "jit", 1, tmp_path)["hits"]


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_scenarios(model: str, tmp_path: Path):
    seen = Counter[str]()
    for seed in range(200):
        seen += check_scenario(model, "jit", seed, tmp_path / str(seed))
    assert {"hits", "damaged", *FAULTS} <= seen.keys()
