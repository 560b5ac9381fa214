"""Health: a watchdog on the engine, draining, and the routes that tell."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from edge_helpers import asks, client_of, held, load, server_of

from mie.errors import EngineDeadError
from mie.frontend.async_llm import Pulse
from mie.serve.health import Health


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def watched(timeout=10.0):
    """A watchdog, the engine that it looks at, and the clock."""
    clock = Clock()
    engine = SimpleNamespace(
        pulse=Pulse(num_turns=0, has_work=False, num_running=0, num_waiting=0), dead_error=None
    )
    return Health(engine, timeout, clock), engine, clock


def test_an_engine_that_stops_stepping_is_noticed_and_so_is_one_that_goes_on():
    health, engine, clock = watched()
    clock.now = 100
    assert health.status == "ok", "it idles"
    engine.pulse = engine.pulse._replace(has_work=True)
    clock.now = 105
    assert health.status == "ok", "it has work, and may take its time"
    clock.now = 111
    assert health.status == "stalled"
    engine.pulse = engine.pulse._replace(num_turns=1)
    assert health.status == "ok", "it stepped"
    clock.now = 130
    assert health.status == "stalled"
    engine.pulse = engine.pulse._replace(has_work=False)
    assert health.status == "ok"


def test_the_watchdog_can_be_turned_off():
    health, engine, clock = watched(timeout=0)
    engine.pulse = engine.pulse._replace(has_work=True)
    health.sample()
    clock.now = 1e9
    assert health.status == "ok"


def test_a_dead_engine_and_a_server_that_ends_are_told_apart():
    health, engine, _ = watched()
    engine.dead_error = EngineDeadError("gone")
    assert health.status == "dead"
    health.is_draining = True
    assert health.status == "draining", "it was shut down"
    engine.dead_error = None
    assert health.status == "draining"


PROBES = (("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping"))


@pytest.mark.parametrize("state", ["ok", "draining", "stalled"])
async def test_the_routes_answer_503_unless_all_is_well(engine, state):
    async with client_of(engine) as client:
        health = client.app.state.edge.health
        if state == "draining":
            health.is_draining = True
        if state == "stalled":
            stalled, stuck, clock = watched()
            stuck.pulse = stuck.pulse._replace(has_work=True)
            stalled.sample()
            clock.now = 61
            client.app.state.edge.health = stalled
        for method, path in PROBES:
            response = await client.request(method, path)
            assert response.status_code == (200 if state == "ok" else 503)
            assert response.json() == {"status": state}


def test_a_hanging_engine_is_seen_from_outside_and_so_is_its_return(caplog):
    caplog.set_level(logging.CRITICAL + 1)
    engine = load()

    async def status(client, wanted):
        while True:
            found = (await client.get("/health")).json()["status"]
            if found == wanted:
                return
            await asyncio.sleep(0.01)

    async def ask(hold):
        async with server_of(engine, watchdog_timeout=0.1) as running:
            await status(running.client, "ok")
            events = await running.stream(max_tokens=50)
            await anext(events)
            await status(running.client, "stalled")
            first = (await running.client.get("/metrics")).text
            assert "vllm:admission_rejections_total" in first
            hold.release()
            assert [event async for event in events][-1] == "[DONE]"
            await status(running.client, "ok")

    with pytest.MonkeyPatch.context() as patch, held(engine) as hold:
        patch.setattr("mie.serve.metrics.SNAPSHOT_SECONDS", 0.1)
        asks(ask(hold))


async def test_a_server_that_drains_refuses_new_requests_only(engine):
    async with client_of(engine) as client:
        client.app.state.edge.health.is_draining = True
        body = {"prompt": "Once", "max_tokens": 1}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "60"
        assert response.json()["error"]["type"] == "service_unavailable"
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/version")).status_code == 200


async def test_load_counts_what_is_served(engine):
    async with client_of(engine) as client:
        health = client.app.state.edge.health
        assert (await client.get("/load")).json() == {"server_load": 0}
        health.num_requests = 3
        assert (await client.get("/load")).json() == {"server_load": 3}
        health.num_requests = 0
        await client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1})
        await client.post(
            "/v1/completions", content=b"{", headers={"content-type": "application/json"}
        )
        assert health.num_requests == 0, "it is counted down after errors, too"
