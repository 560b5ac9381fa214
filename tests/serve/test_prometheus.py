"""`/metrics` has the names of vLLM's dashboards, and one app's counts are its own."""

import asyncio
from pathlib import Path

import pytest
from edge_helpers import client_of, load, server_of, without_steps
from prometheus_client.parser import text_string_to_metric_families

from mie.serve.config import ServeConfig

BOARD = Path(__file__).parent / "data/vllm_metrics.txt"
NAMES = [line for line in BOARD.read_text().splitlines() if not line.startswith("#")]
# In vLLM these have no label "engine".
WITHOUT_ENGINE = {"vllm:admission_rejections_total"}


@pytest.fixture(scope="module")
def engine():
    with_engine = load()
    yield with_engine
    with_engine.shutdown()


async def ten_requests(client):
    for number in range(10):
        body = {"prompt": "Once upon a time", "max_tokens": 4 + number, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def scraped(client):
    """All samples of a scrape: {name: [(labels, value)]}."""
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_every_name_of_vllms_board_resolves_after_ten_requests(engine):
    async with client_of(engine, ServeConfig(served_model_name=["the-model"])) as client:
        await ten_requests(client)
        found = await scraped(client)
    assert [name for name in NAMES if name not in found] == []
    for name in NAMES:
        for labels, _ in found[name]:
            assert labels["model_name"] == "the-model"
            assert labels.get("engine", "0") == "0"
            assert ("engine" in labels) == (name not in WITHOUT_ENGINE), name
    assert not [name for name in found if name.endswith("_created")]

    def total(name):
        return sum(value for _, value in found[name])

    assert total("vllm:request_success_total") == 10
    assert total("vllm:e2e_request_latency_seconds_count") == 10
    assert total("vllm:generation_tokens_total") == sum(range(4, 14))
    assert total("mie:request_latency_seconds_count") == 10
    by_source = {
        labels["source"]: value for labels, value in found["vllm:prompt_tokens_by_source_total"]
    }
    assert sum(by_source.values()) == total("vllm:prompt_tokens_total")
    assert by_source["local_cache_hit"] == total("vllm:prompt_tokens_cached_total") > 0


async def test_the_counts_of_two_apps_do_not_mix(engine):
    async with client_of(engine) as one, client_of(engine) as other:
        await one.get("/version")
        await one.get("/version")
        one, other = await scraped(one), await scraped(other)
    key = {"handler": "/version", "method": "GET", "status": "2xx"}
    assert (key, 2.0) in one["http_requests_total"]
    assert "http_requests_total" not in other


async def test_clients_cannot_make_labels(engine):
    async with client_of(engine) as client:
        for number in range(50):
            await client.get(f"/path-{number}")
            await client.request(f"VERB{number}", "/version")
        found = await scraped(client)
    labels = [labels for labels, _ in found["http_requests_total"]]
    assert labels == [
        {"handler": "other", "method": "GET", "status": "4xx"},
        {"handler": "/version", "method": "other", "status": "4xx"},
    ]


async def test_a_scrape_in_the_middle_counts_what_runs_and_delays_nothing():
    async with server_of(load()) as running:
        with without_steps(running.edge.engine):
            events = await running.stream(max_tokens=300)
            await anext(events)
            found = await scraped(running.client)
            assert found["vllm:num_requests_running"][0][1] == 1
            assert found["vllm:generation_tokens_total"][0][1] >= 1
            blocks = {labels["state"]: value for labels, value in found["mie:kv_blocks"]}
            assert blocks["used"] > 0
            assert blocks["used"] + blocks["cached"] + blocks["free"] == 256
            await events.aclose()
        while running.edge.engine.pulse.has_work:
            await asyncio.sleep(0.01)
        found = await scraped(running.client)
        left = found["mie:http_clients_disconnected_total"][0][1]
        assert left == 1
        aborted = {
            labels["finished_reason"]: v for labels, v in found["vllm:request_success_total"]
        }
        assert aborted["abort"] == 1


async def test_a_dead_engine_leaves_the_servers_own_counts():
    engine = load()
    async with client_of(engine) as client:
        engine.shutdown()
        found = await scraped(client)
        assert "vllm:admission_rejections_total" in found
        assert "vllm:num_requests_running" not in found
