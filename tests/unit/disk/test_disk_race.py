"""Test when blocks are read from a disk, and when computing them is faster."""

from itertools import count
from pathlib import Path

import pytest
from audit import tier_of
from engines import run_to_end

from mie import SamplingParams
from mie.config.engine import EngineConfig
from mie.disk.race import Race
from mie.engine.engine import Engine
from mie.engine.watch.metrics import snapshot_of
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.sched.sequence import Request

MODEL = Path(__file__).parents[2] / "golden" / "models" / "qwen3_tied"
PROMPTS = ([*range(5, 25)], [*range(30, 50)])


def new_engine(folder: Path, num_blocks: int = 40) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks, block_size=4, max_model_len=32, prefix_cache_dir=str(folder)
    )
    return load_engine(MODEL, LoadSettings(engine=config, backend="numpy"), use_tqdm=False)


def ask(engine: Engine, token_ids: list[int]) -> Request:
    request = engine.add_request(token_ids, SamplingParams(max_tokens=1, ignore_eos=True))
    run_to_end(engine)
    return request


def metrics_of(engine: Engine) -> dict[str, float]:
    found = snapshot_of(engine).read("m")
    return {
        each.name + each.labels.get("source", each.labels.get("reason", "")): each.value
        for each in found
        if hasattr(each, "value")
    }


MIB = 1 << 20


def test_reading_wins_until_both_were_measured():
    race = Race()
    assert not race.is_lost(1 << 40, 1)
    race.computed(10, 1.0)
    assert not race.is_lost(64 * MIB, 1)
    race.read(64 * MIB, 64.0)
    assert race.is_lost(64 * MIB, 1)
    assert not race.is_lost(64 * MIB, 1000)


def test_a_small_read_that_had_to_wait_decides_nothing():
    race = Race()
    race.computed(32, 0.2)
    race.read(MIB // 2, 0.5)
    assert not race.is_lost(170 * MIB, 4000)


def test_the_fastest_step_and_the_latest_reads_count():
    race = Race()
    race.computed(10, 10.0)
    race.computed(10, 1.0)
    race.computed(10, 5.0)
    race.read(64 * MIB, 640.0)
    assert race.is_lost(MIB, 1)
    for _ in range(4):
        race.read(64 * MIB, 0.1)
    assert not race.is_lost(MIB, 1)


def test_a_slow_disk_is_tried_again():
    race = Race()
    race.computed(1, 1.0)
    race.read(64 * MIB, 640.0)
    losses = [race.is_lost(MIB, 1) for _ in range(30)]
    assert losses[0]
    assert not losses[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    engine = new_engine(tmp_path)
    for prompt in PROMPTS:
        ask(engine, prompt)
    tier_of(engine).close()
    return tmp_path


def test_a_slow_disk_is_a_miss_with_this_reason(folder: Path):
    engine = new_engine(folder)
    ticks = count()
    tier_of(engine).clock = lambda: 1e9 * next(ticks)
    first, second = (ask(engine, prompt) for prompt in PROMPTS)
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (16, 0)
    assert second.metrics.departure is not None
    assert second.metrics.departure.reason == "slow disk"
    found = metrics_of(engine)
    assert found["mie:prefix_departuresslow disk"] == 1
    assert found["vllm:external_prefix_cache_queries"] == 40
    assert found["vllm:external_prefix_cache_hits"] == 16
    tier_of(engine).close()


def test_metrics_tell_the_disk_from_the_memory(folder: Path):
    engine = new_engine(folder)
    tier_of(engine).clock = lambda: 0.0
    for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1]):
        ask(engine, prompt)
    found = metrics_of(engine)
    sources = {
        name: found[f"vllm:prompt_tokens_by_source{name}"]
        for name in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert sources["external_kv_transfer"] == 32
    assert sum(sources.values()) == 60
    assert found["mie:prompt_tokens_from_disk"] == 32
    assert found["vllm:external_prefix_cache_hits"] == 32
    assert found["mie:disk_blocks_read"] == 8
    assert found["mie:disk_blocks_written"] == 0
    assert found["mie:disk_blocks_damaged"] == found["mie:disk_blocks_dropped"] == 0
    tier_of(engine).close()


def test_a_process_writes_the_blocks_that_it_has_when_the_writer_has_ended(tmp_path: Path):
    writer, reader = new_engine(tmp_path), new_engine(tmp_path)
    ask(reader, PROMPTS[0])
    tier_of(writer).close()
    ask(reader, PROMPTS[1])
    tier_of(reader).close()
    last = new_engine(tmp_path)
    tier_of(last).clock = lambda: 0.0
    assert [ask(last, prompt).metrics.num_cached_tokens for prompt in PROMPTS] == [16, 16]
    tier_of(last).close()


def test_a_process_that_takes_over_forgets_evicted_blocks(tmp_path: Path):
    writer, reader = new_engine(tmp_path), new_engine(tmp_path, num_blocks=8)
    for start in range(5, 45, 10):
        ask(reader, [*range(start, start + 22)])
    tier_of(writer).close()
    last = [*range(20, 42)]
    ask(reader, last)
    tier_of(reader).close()
    assert tier_of(reader).store.stats.num_written >= 5
    engine = new_engine(tmp_path)
    assert ask(engine, last).metrics.num_cached_tokens == 20
    tier_of(engine).close()
