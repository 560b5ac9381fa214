"""Test the engine: its refusals, its recoveries and its reports."""

import dataclasses
import errno
import io
import re

import pytest
from engines import run_to_end

from mie import EngineConfig, SamplingParams
from mie.engine.watch.metrics import snapshot_of
from mie.errors import ConfigError, RequestError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings


@pytest.fixture
def engine(tiny):
    return load_engine(
        tiny["llama"].directory, LoadSettings(engine=EngineConfig(num_blocks=16, block_size=4))
    )


def greedy(**params):
    return SamplingParams(temperature=0, ignore_eos=True, **params)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty; it needs at least one token"),
        ([1, 40], {}, "prompt has token id 40; the vocabulary has ids 0 … 39"),
        ([-1], {}, "prompt has token id -1"),
        ([1.5], {}, "prompt has token id 1.5"),
        ([1] * 256, {}, "prompt has 256 tokens; the context holds 256"),
        ([1] * 65, {}, "prompt has 65 tokens; the KV cache holds 64 .raise num_blocks to at least"),
        ([1], {"logit_bias": {40: 1}}, "logit_bias has token id 40"),
        ([1], {"allowed_token_ids": [99]}, "allowed_token_ids has token id 99"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids has token id 99"),
        ([1], {"trace_decode_token_ids": [99]}, "trace_decode_token_ids has token id 99"),
        (
            [1],
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
            "all end the sequence, but min_tokens=1 forbids it",
        ),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing(engine, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, SamplingParams(**params))
    assert not engine.has_work
    engine.add_request([1], greedy())
    assert len(run_to_end(engine)["auto-0", 0]) == 16


def test_a_request_may_skip_reading_the_prefix_cache_and_still_fills_it(engine):
    def num_cached(**params):
        request = engine.add_request(list(range(4, 16)), greedy(max_tokens=1, **params))
        engine.step()
        return request.metrics.num_cached_tokens

    assert num_cached(skip_reading_prefix_cache=True) == 0
    assert num_cached() == 11
    assert num_cached(skip_reading_prefix_cache=True) == 0
    assert num_cached(skip_reading_prefix_cache=False) == 11


def test_stats_reach_the_observers(engine):
    seen = []
    engine.observers.append(seen.append)
    engine.add_request([1, 2, 3, 4, 5], greedy(n=2, max_tokens=3))
    run_to_end(engine)
    assert [(s.num_prefill_tokens, s.num_decode_tokens) for s in seen] == [(5, 0), (0, 2), (0, 2)]
    assert [s.num_blocks_used for s in seen] == [2, 3, 3]
    assert engine.stats.peak_blocks == 3
    assert engine.stats.num_generated_tokens == 6
    assert all(s.seconds > 0 for s in seen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "max_model_len is 257; the model's context is 256"),
        ({"kv_cache_memory_bytes": 1}, r"kv_cache_memory_bytes is 1; one block of 16 tokens takes"),
        ({"num_blocks": 10**12}, r"(?s)not enough memory.*\(num_blocks=[0-9]+"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(tiny, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_engine(tiny["llama"].directory, LoadSettings(engine=EngineConfig(**settings)))


class FullDisk(io.StringIO):
    """A file that accepts a number of writes and then fails."""

    def __init__(self, num_writes):
        super().__init__()
        self.num_left = num_writes

    def write(self, text):
        if self.num_left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.num_left -= 1
        return super().write(text)


def test_a_full_disk_ends_the_event_log_and_not_the_requests(tiny, caplog):
    file = FullDisk(3)
    config = EngineConfig(num_blocks=16, block_size=4)
    engine = load_engine(tiny["llama"].directory, LoadSettings(engine=config), trace=file)
    engine.add_request([5, 6, 7], greedy(max_tokens=6))
    assert len(run_to_end(engine)["auto-0", 0]) == 6
    assert re.search("the event log ends at step 3: .*No space left", caplog.text)
    assert engine.log_error.errno == errno.ENOSPC
    assert file.getvalue().count('"event":"step"') == 2
    assert engine.scheduler.manager.num_used == 0


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_no_request_without_a_seed_draws_what_one_with_a_seed_draws(tiny, seed):
    """A user's seed may be the engine's, and may be any number near it or near a request's."""
    config = EngineConfig(num_blocks=64, seed=seed, enable_prefix_caching=False)
    engine = load_engine(tiny["llama"].directory, LoadSettings(engine=config, backend="numpy"))
    params = SamplingParams(temperature=1000.0, max_tokens=12, ignore_eos=True)
    for user_seed in [*[None] * 4, *{0, 1, 2, 3, seed, seed + 1, seed + 2}]:
        engine.add_request([5, 6, 7], dataclasses.replace(params, seed=user_seed))
    tokens = run_to_end(engine)
    texts = {tuple(each) for each in tokens.values()}
    assert len(texts) == len(tokens)


@pytest.mark.parametrize("forced", [["end"], ["end", 7], [7, "end", "end", 8], [9, "stop"]])
def test_a_forced_token_or_a_token_of_the_prompt_ends_nothing(tiny, forced):
    engine = load_engine(
        tiny["llama"].directory, LoadSettings(engine=EngineConfig(num_blocks=16), backend="numpy")
    )
    end = engine.eos_token_ids[0]
    forced = [{"end": end, "stop": 30}.get(token, token) for token in forced]
    more = {"trace_decode_token_ids": forced, "stop_token_ids": [30], "logit_bias": {end: 100.0}}
    params = SamplingParams(temperature=0, max_tokens=len(forced) + 5, **more)
    [sequence] = engine.add_request([5, end, 30, end], params).sequences
    run_to_end(engine)
    assert (sequence.output_ids, sequence.finish_reason) == ([*forced, end], "stop")


def test_an_observer_that_raises_is_removed_and_the_others_go_on(engine, caplog):
    seen, calls = [], []

    def fail(stats):
        calls.append(stats)
        raise ValueError("no more")

    engine.observers += [fail, seen.append]
    engine.add_request([5, 6, 7], greedy(max_tokens=4))
    run_to_end(engine)
    assert len(calls) == 1
    assert len(seen) == engine.stats.num_steps == 4
    assert fail not in engine.observers
    assert "an observer of the engine raised, and is removed" in caplog.text


def test_metrics_of_many_requests_lose_none(engine):
    """Records of ended requests are added up now and then."""
    for count in range(1, 200):
        engine.add_request([5, 6, 7], greedy(max_tokens=1 + count % 2))
        run_to_end(engine)
        if count % 33 and count not in (64, 65, 128, 129):
            continue
        found = {}
        for metric in snapshot_of(engine).read("model"):
            found.setdefault(metric.name, []).append(metric)
        ended = {m.labels["finished_reason"]: m.value for m in found["vllm:request_success"]}
        assert ended == {"stop": 0, "length": count, "abort": 0, "error": 0}
        assert found["vllm:prompt_tokens"][0].value == 3 * count
        assert found["vllm:generation_tokens"][0].value == count + (count + 1) // 2
        assert found["vllm:time_to_first_token_seconds"][0].count == count
