"""Test that `get_metrics` describes the run under vLLM's names."""

import asyncio

import pytest

from mie import LLM, AsyncLLM, SamplingParams
from mie.base.stats import metric as metric_module
from mie.base.stats.metric import Counter, Gauge, Histogram, Tally
from mie.base.stats.request import RequestMetrics
from mie.errors import EngineDeadError, RequestFailedError

PROMPT = [5, 9, 12, 30, 7, 21, 14, 8, 11]


def load(model, kind=LLM, **settings):
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, **settings}
    return kind(model.directory, skip_tokenizer_init=True, **settings)


@pytest.fixture
def llm(tiny):
    return load(tiny["llama"])


def params(max_tokens=6, **more):
    return SamplingParams(temperature=1, seed=1, max_tokens=max_tokens, ignore_eos=True, **more)


def read(metrics):
    """Return each metric by its name, and finish reasons by theirs."""
    ended = {m.labels["finished_reason"]: m.value for m in metrics if "success" in m.name}
    return {m.name.removeprefix("vllm:"): m for m in metrics} | {"ended": ended}


def test_the_counts_match_the_run(llm):
    found = read(llm.get_metrics())
    assert found["ended"] == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    llm.generate([PROMPT, PROMPT[:5]], [params(), params(3, n=2)], use_tqdm=False)
    llm.generate([PROMPT], params(4), use_tqdm=False)
    found = read(llm.get_metrics())
    assert found["ended"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    cache = llm.engine.runner._kv_cache
    num_kv_bytes = getattr(cache, "elements", cache).nbytes
    num_weight_bytes = found["mie:weights_bytes"].value
    assert num_weight_bytes > 1000
    values = {name: m.value for name, m in found.items() if isinstance(m, (Counter, Gauge))}
    assert values == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "num_requests_waiting_by_reason": 0,
        "mie:kv_blocks": 0,
        "mie:weights_bytes": num_weight_bytes,
        "mie:kv_bytes": num_kv_bytes,
        "mie:answer_bytes": found["mie:answer_bytes"].value,
        "mie:cow_copies": llm.engine.stats.memory.num_copies,
        "mie:blocks_evicted": 0,
        "mie:blocks_swapped_out": 0,
        "mie:blocks_swapped_in": 0,
        "mie:snapshots_taken": 0,
        "mie:snapshots_evicted": 0,
        "external_prefix_cache_queries": 0,
        "external_prefix_cache_hits": 0,
        "mie:prompt_tokens_from_disk": 0,
        "mie:tokens_recomputed": 0,
        "mie:tokens_forced": 0,
        "mie:prefix_departures": 2,  # the last reason is "new"
        "prompt_tokens_by_source": 0,
        "kv_cache_usage_perc": 0,
        "prefix_cache_queries": 2 * len(PROMPT) + 5,
        "prefix_cache_hits": len(PROMPT) - 1,
        "num_preemptions": 0,
        "prompt_tokens": 2 * len(PROMPT) + 5,
        "prompt_tokens_cached": len(PROMPT) - 1,
        "generation_tokens": 6 + 2 * 3 + 4,
        "request_success": 0,
        "cache_config_info": 1,
    }
    counts = {name: m.count for name, m in found.items() if isinstance(m, Histogram)}
    assert counts.pop("iteration_tokens_total") == llm.engine.stats.num_steps
    assert counts.pop("mie:step_seconds") == llm.engine.stats.num_steps
    assert counts.pop("mie:batch_rows") == llm.engine.stats.num_steps
    assert counts.pop("inter_token_latency_seconds") == 5 + 2 * 2 + 3
    assert set(counts.values()) == {3}
    sums = {name: m.sum for name, m in found.items() if isinstance(m, Histogram)}
    assert sums["request_prompt_tokens"] == 2 * len(PROMPT) + 5
    assert sums["request_generation_tokens"] == 16
    assert sums["request_prefill_kv_computed_tokens"] == len(PROMPT) + 5 + 1
    assert sums["request_max_num_generation_tokens"] == 6 + 3 + 4
    assert sums["request_params_n"] == 4
    assert sums["request_params_max_tokens"] == 13
    parts = sums["request_prefill_time_seconds"] + sums["request_decode_time_seconds"]
    assert sums["request_inference_time_seconds"] == pytest.approx(parts)
    total = parts + sums["request_queue_time_seconds"]
    assert sums["e2e_request_latency_seconds"] == pytest.approx(total)


def test_names_labels_and_buckets_are_vllms(llm):
    found = read(llm.get_metrics())
    labels = {"model_name": str(llm.engine_args.model), "engine": "0"}
    assert found["num_requests_running"].labels == labels
    info = found["cache_config_info"].labels
    assert info["block_size"] == "4"
    assert info["num_gpu_blocks"] == "64"
    assert info["enable_prefix_caching"] == "True"
    assert list(found["request_params_n"].buckets) == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]
    assert list(found["time_to_first_token_seconds"].buckets)[:3] == ["0.001", "0.005", "0.01"]
    assert list(found["inter_token_latency_seconds"].buckets)[-2:] == ["80.0", "+Inf"]
    assert list(found["e2e_request_latency_seconds"].buckets)[-2:] == ["7680.0", "+Inf"]
    assert list(found["iteration_tokens_total"].buckets)[:3] == ["1.0", "8.0", "16.0"]
    assert list(found["iteration_tokens_total"].buckets)[-2:] == ["16384.0", "+Inf"]
    limits = list(found["request_prompt_tokens"].buckets)
    assert limits == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]


def test_labels_divide_a_number(llm):
    llm.generate([PROMPT], params(), use_tqdm=False)
    llm.generate([PROMPT], params(), use_tqdm=False)
    metrics = llm.get_metrics()

    def values(name, label):
        return {m.labels[label]: m.value for m in metrics if m.name == name}

    assert values("vllm:prompt_tokens_by_source", "source") == {
        "local_compute": len(PROMPT) + 1,
        "local_cache_hit": len(PROMPT) - 1,
        "external_kv_transfer": 0,
    }
    assert values("vllm:num_requests_waiting_by_reason", "reason") == {"capacity": 0, "deferred": 0}
    blocks = values("mie:kv_blocks", "state")
    assert blocks["cached"] > 0
    assert blocks["free"] + blocks["cached"] + blocks["used"] == 64


def test_a_bucket_counts_values_up_to_its_limit():
    tally = Tally((1.0, 5.0))
    for value in (0, 1, 1.5, 5, 6, None):
        tally.observe(value)
    histogram = tally.read("name", {})
    assert histogram.buckets == {"1.0": 2, "5.0": 4, "+Inf": 5}
    assert (histogram.count, histogram.sum) == (5, 13.5)


def test_every_request_ends_in_one_reason(llm, monkeypatch):
    llm.generate([PROMPT], params(), use_tqdm=False)
    [output] = llm.generate([PROMPT], params(), use_tqdm=False)
    stop = params(stop_token_ids=[output.outputs[0].token_ids[2]])
    llm.generate([PROMPT], stop, use_tqdm=False)
    llm.abort(llm.add_request(PROMPT, params()))
    running = llm.add_request(PROMPT, params(n=2))
    llm.step()
    llm.abort(running)
    llm.abort(running)

    def fail(*args):
        raise ValueError("no log-probabilities")

    monkeypatch.setattr(llm.engine.runner.backend, "top_logprobs", fail)
    with pytest.raises(RequestFailedError):
        llm.generate([PROMPT], params(logprobs=1), use_tqdm=False)
    ended = read(llm.get_metrics())["ended"]
    assert ended == {"stop": 1, "length": 2, "abort": 2, "error": 1}


def test_a_dead_async_engine_still_has_metrics(tiny):
    async def main():
        llm = load(tiny["llama"], AsyncLLM)
        async for _ in llm.generate(PROMPT, params()):
            assert read(await llm.get_metrics())["generation_tokens"].value >= 1
        before = read(await llm.get_metrics())
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        return before, read(await llm.get_metrics())

    before, after = asyncio.run(main())
    assert before == after
    assert after["ended"]["length"] == 1


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (RequestMetrics, "decode_time", "vllm:request_decode_time_seconds"),
        (RequestMetrics, "queue_time", "vllm:request_queue_time_seconds"),
        (RequestMetrics, "total_time", "vllm:e2e_request_latency_seconds"),
        (metric_module, "bisect_left", "vllm:request_prompt_tokens"),
    ],
)
def test_a_number_that_cannot_be_counted_costs_itself_and_a_line_of_the_log(
    llm, monkeypatch, caplog, owner, name, lost
):
    def fails(*values):
        raise OverflowError("a number that is too large")

    value = property(fails) if owner is RequestMetrics else fails
    monkeypatch.setattr(owner, name, value)
    for _ in range(3):
        outputs = llm.generate([PROMPT] * 30, params(1), use_tqdm=False)
        assert [len(each.outputs[0].token_ids) for each in outputs] == [1] * 30
    found = read(llm.get_metrics())
    assert found["ended"]["length"] == 90
    assert found["generation_tokens"].value == 90
    assert found[lost.removeprefix("vllm:")].count == 0
    if owner is RequestMetrics:
        assert found["request_prompt_tokens"].count == 90
    lines = [each.getMessage() for each in caplog.records if lost in each.getMessage()]
    assert len(lines) == 1
    assert "OverflowError" in lines[0]


@pytest.mark.parametrize("value", [10**400, "x", complex(1, 1)])
def test_a_tally_that_cannot_take_a_value_stays_as_it_was(value):
    tally = Tally((1.0, 2.0))
    tally.observe(1.5)
    with pytest.raises((OverflowError, TypeError, ValueError)):
        tally.observe(value)
    found = tally.read("x", {})
    assert (found.count, found.sum) == (1, 1.5)
