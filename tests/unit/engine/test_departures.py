"""Test where and why a prompt departs from the prefix cache."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
from engines import run_to_end

from mie import SamplingParams
from mie.base.stats.departure import REASONS, Departure
from mie.config.engine import EngineConfig
from mie.disk.race import Race
from mie.engine.engine import Engine
from mie.engine.watch.metrics import snapshot_of
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
PROMPT = [*range(5, 25)]


def new_engine(model: str = "qwen3_tied", num_blocks: int = 40, **settings: Any) -> Engine:
    config = EngineConfig(num_blocks=num_blocks, block_size=4, max_model_len=32, **settings)
    return load_engine(GOLDEN / model, LoadSettings(engine=config, backend="numpy"), use_tqdm=False)


def departure(engine: Engine, tokens: list[int], salt: str | None = None) -> Departure | None:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    request = engine.add_request(tokens, params, cache_salt=salt)
    run_to_end(engine)
    return request.metrics.departure


def test_a_prompt_departs_at_the_first_other_token():
    engine = new_engine()
    assert departure(engine, PROMPT) == Departure(0, 20, "new", (), tuple(PROMPT[:8]))
    assert departure(engine, PROMPT) is None
    changed = [*PROMPT[:10], 60, *PROMPT[11:]]
    assert departure(engine, changed) == Departure(
        10, 20, "other tokens", (15, 16), (60, *PROMPT[11:18]), 2
    )
    assert departure(engine, [60, *PROMPT[1:]]) == Departure(
        0, 20, "other tokens", tuple(PROMPT[:4]), (60, *PROMPT[1:8]), 0
    )
    longer = departure(engine, [*PROMPT, *range(40, 48)])
    assert longer == Departure(20, 28, "new", (), tuple(range(40, 48)))


@pytest.mark.parametrize("other", [9, 3])
def test_the_nearest_of_several_cached_prompts_is_shown(other: int):
    engine = new_engine()
    for start in ([5, 6, 7, 8], [5, other, 9, 9]):
        departure(engine, [*start, *PROMPT])
    found = departure(engine, [5, 6, 50, 51, *PROMPT])
    assert found is not None
    assert (found.position, found.cached) == (2, (7, 8))


def test_another_salt_and_evicted_blocks_are_reasons():
    engine = new_engine(num_blocks=8)
    departure(engine, PROMPT, "a")
    found = departure(engine, PROMPT, "b")
    assert found is not None
    assert (found.position, found.reason, found.cached) == (0, "other salt", ())
    departure(engine, [*range(30, 50)], "b")
    found = departure(engine, PROMPT, "a")
    assert found is not None
    assert found.reason == "evicted"


def test_a_state_that_was_not_kept_is_a_reason():
    engine = new_engine("qwen35_delta")
    departure(engine, PROMPT)
    found = departure(engine, [*PROMPT[:14], *range(40, 46)])
    assert found is not None
    assert (found.position, found.reason) == (0, "no snapshot")


def test_a_path_on_a_disk_is_not_compared_with_a_shorter_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Race, "is_lost", lambda *_: False)
    engine = new_engine(prefix_cache_dir=str(tmp_path / "cache"))
    departure(engine, PROMPT)
    del engine
    gc.collect()  # it writes its blocks
    engine = new_engine(prefix_cache_dir=str(tmp_path / "cache"))
    found = departure(engine, [*PROMPT[:4], *range(50, 60)])
    assert found == Departure(4, 14, "new", (), tuple(range(50, 58)))
    longer = departure(engine, [*PROMPT, *range(40, 48)])
    assert longer == Departure(20, 28, "new", (), tuple(range(40, 48)))
    assert departure(engine, [*PROMPT, *range(40, 48)]) is None


def test_a_prompt_without_a_cache_does_not_depart():
    assert departure(new_engine(enable_prefix_caching=False), PROMPT) is None


def test_metrics_count_departures_by_reason():
    engine = new_engine()
    departure(engine, PROMPT)
    departure(engine, [*PROMPT[:10], 60, *PROMPT[11:]])
    counts = {
        metric.labels["reason"]: metric.value
        for metric in snapshot_of(engine).read("m")
        if metric.name == "mie:prefix_departures"
    }
    assert counts == {**dict.fromkeys(REASONS, 0), "new": 1, "other tokens": 1}


def test_early_departures_in_one_block_are_logged_once_for_a_client(
    caplog: pytest.LogCaptureFixture,
):
    engine = new_engine(scheduling_policy="fair")
    with caplog.at_level(logging.WARNING, "mie.engine.watch.departures"):
        for token in range(50, 56):
            depart_early(engine, token, "alice")
        assert [each.message.partition(" on,")[0] for each in caplog.records] == [
            "3 prompts of alice were computed again from token 1 of 22"
        ]
        depart_early(engine, 56, "bob")
        depart_early(engine, 57, "bob")
        assert len(caplog.records) == 1
        depart_early(engine, 58, "bob")
    assert "3 prompts of bob" in caplog.messages[-1]
    assert "ignore_prompt_lines" in caplog.messages[-1]


def depart_early(engine: Engine, token: int, client: str) -> None:
    """Run a prompt whose first block ends in other tokens, from the second or third on."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    first = [5, token] if token % 2 else [5, 50, token]
    tokens = [*first, *range(5, 27 - len(first))]
    engine.add_request(tokens[:22], params, client=client)
    run_to_end(engine)


def test_late_departures_and_new_prompts_are_not_logged(caplog: pytest.LogCaptureFixture):
    engine = new_engine(num_blocks=80)
    with caplog.at_level(logging.WARNING, "mie.engine.watch.departures"):
        for token in range(50, 56):
            departure(engine, [*PROMPT[:8], token, *PROMPT])
            departure(engine, [token, *PROMPT], str(token))
    assert not caplog.records


def test_prompts_with_nothing_in_common_but_the_beginning_are_not_logged(
    caplog: pytest.LogCaptureFixture,
):
    engine = new_engine(num_blocks=80)
    with caplog.at_level(logging.WARNING, "mie.engine.watch.departures"):
        for token in range(50, 56):
            found = departure(engine, [5, 6, *[token] * 20])
            assert found is None or found.reason == ("new" if token == 50 else "other tokens")
    assert not caplog.records
