"""Several models behind one server: loaded on demand, and unloaded in turn."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from audit import engine_of, loop_of
from models_folder import GOLDEN, NAMES, PROMPT, SETTINGS, budget_for, new_folder, serving

from mie import LLM, SamplingParams
from mie.serve.keys import Keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """The tokens of each model alone."""
    found = {}
    for name in NAMES:
        llm = LLM(str(GOLDEN / name), **SETTINGS)
        params = SamplingParams(temperature=0, max_tokens=6)
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        found[name] = output.outputs[0].token_ids
    return found


async def test_twenty_requests_to_four_models_within_a_budget_for_two(folder, expected):
    budget = budget_for(folder, 2)
    most = 0
    async with serving(folder, budget) as served:
        free = served.edge.models._free

        async def watch() -> None:
            nonlocal most
            while True:
                catalogue = served.edge.models.catalogue
                most = max(most, sum(each.num_bytes for each in catalogue.loaded))
                await asyncio.sleep(0.001)

        async def free_and_check(model: Any) -> None:
            assert model.num_users == 0, "a model with running requests leaves"
            await free(model)

        served.edge.models._free = free_and_check  # type: ignore[method-assign]
        watching = asyncio.ensure_future(watch())
        asked = [NAMES[number % 4] for number in range(20)]
        served.loader.gate.clear()
        asking = asyncio.gather(*map(served.tokens, asked))
        await served.until(lambda: served.num_waiting == 20)
        served.loader.gate.set()
        answers = await asking
        watching.cancel()
        assert len(served.loader.engines) == 4, "each model is loaded once"
        assert len(await served.loaded()) >= 2
    assert [expected[name] for name in asked] == answers
    assert 0 < most <= budget


async def test_the_least_recently_used_model_leaves(folder):
    a, b, c, d = NAMES
    async with serving(folder, models_max=2) as served:
        for name, stay in ((a, {a}), (b, {a, b}), (a, {a, b}), (c, {a, c}), (d, {c, d})):
            assert (await served.ask(name)).status_code == 200
            assert await served.loaded() == stay
        async with served.streaming(c):  # the least recently used one is busy
            assert (await served.ask(a)).status_code == 200
            assert await served.loaded() == {c, a}


async def test_a_busy_model_stays_until_its_requests_end_and_new_ones_wait(folder, expected):
    a, b = NAMES[:2]
    async with serving(folder, models_max=1) as served:
        async with served.streaming(a):
            waiting = asyncio.ensure_future(served.tokens(b))
            models = served.edge.models
            model = await models.catalogue.find(a)
            await served.until(lambda: model.is_leaving)
            again = asyncio.ensure_future(served.tokens(a))  # it does not overtake
            await served.until(lambda: len(model.waiters) == 1)
            assert served.loader.names == [a]
        assert await waiting == expected[b]
        assert await again == expected[a]
        assert served.loader.names == [a, b, a]


def engine_threads():
    """Return the threads of all engines, of which earlier tests may have some too."""
    return {each for each in threading.enumerate() if each.name == "mie-engine"}


async def test_an_unloaded_model_leaves_no_thread_and_no_object(folder):
    before = engine_threads()
    async with serving(folder) as served:
        await served.ask(NAMES[0])
        [engine] = served.loader.engines
        parts = [weakref.ref(each) for each in (engine_of(engine()), loop_of(engine()))]
        assert engine_threads() > before
        answer = await served.client.post("/models/unload", json={"model": NAMES[0]})
        assert answer.json() == {"success": True}
        await served.until(lambda: engine() is None)
        assert [each() for each in parts] == [None, None]
        assert engine_threads() == before
        assert (await served.states())[NAMES[0]] == "unloaded"


async def test_requests_that_wait_for_a_load_can_leave_and_count(folder, expected):
    a, b = NAMES[:2]
    async with serving(folder, max_num_queued_reqs=1) as served:  # and 4 seats
        served.loader.gate.clear()
        first = [asyncio.ensure_future(served.ask(a)) for _ in range(3)]
        await served.until(lambda: served.loader.names == [a])
        second = [asyncio.ensure_future(served.ask(b)) for _ in range(2)]
        catalogue = served.edge.models.catalogue
        await served.until(lambda: served.num_waiting == 5)
        assert await served.states() == {
            **dict.fromkeys(NAMES, "unloaded"),
            "broken": "unloaded",
        } | {a: "loading", b: "loading"}
        full = await served.ask(a)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) > 0
        metrics = (await served.client.get("/metrics")).text
        assert (
            'vllm:admission_rejections_total{model_name="",reason="max_num_queued_reqs"} 1.0'
            in metrics
        )
        for each in (first[0], *second):
            each.cancel()
        await served.until(lambda: served.num_waiting == 2)
        served.loader.gate.set()
        answers = [await each for each in first[1:]]
        assert [x.json()["choices"][0]["token_ids"] for x in answers] == [expected[a]] * 2
        coming = await catalogue.all()
        await served.until(lambda: not any(model.is_coming for model in coming))
        assert served.loader.names == [a], "nothing waited for the other one any more"
        assert served.num_waiting == 0


async def test_a_broken_model_fails_alone(folder, expected, caplog):
    async with serving(folder) as served:
        asked = ["broken", NAMES[0], "broken", NAMES[1]]
        answers = await asyncio.gather(*map(served.ask, asked))
        assert [each.status_code for each in answers] == [500, 200, 500, 200]
        error = answers[0].json()["error"]
        assert error["code"] == "model_load_failed"
        assert error["message"].startswith("the model broken cannot be loaded: config.json:")
        assert str(folder) not in answers[0].text
        assert any(str(folder) in each.getMessage() for each in caplog.records)
        [listed] = [
            each
            for each in (await served.client.get("/v1/models")).json()["data"]
            if each["id"] == "broken"
        ]
        assert listed["status"] == {"value": "unloaded", "failed": True}
        assert await served.tokens(NAMES[0]) == expected[NAMES[0]]


async def test_a_model_whose_files_defeat_the_reader_hides_no_other(folder):
    async with serving(folder) as served:
        directory = served.edge.models.catalogue.directory
        describe = directory.describe

        def describe_or_fail(path: Path) -> Any:
            if path.name == NAMES[0]:
                raise RecursionError("a bug")
            return describe(path)

        directory.describe = describe_or_fail  # type: ignore[method-assign]
        assert set(await served.states()) == {*NAMES, "broken"}
        tags = (await served.client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == [f"{name}:latest" for name in NAMES[1:]]


async def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(folder):
    async with serving(folder, budget=1 << 10) as served:
        answer = await served.ask(NAMES[0])
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_too_large", "model")
        assert "all models may take 1.0 KiB together (raise --models-memory" in error["message"]
        assert served.loader.names == []


async def test_an_unknown_model_is_a_404_and_a_missing_one_a_400_unless_one_is_loaded(folder):
    async with serving(folder) as served:
        answer = await served.ask("gpt-9")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "this server has broken, gemma_gelu" in answer.json()["error"]["message"]
        answer = await served.ask(None)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("model is missing; this server has")
        assert (await served.ask(f"{NAMES[1]}:latest")).status_code == 200
        assert (await served.ask(None)).json()["model"] == NAMES[1]
        for body in (b"[]", b"{", b'{"model": 5}'):
            kind = {"content-type": "application/json"}
            answer = await served.client.post("/v1/completions", content=body, headers=kind)
            assert answer.status_code == 400


async def test_ollama_lists_loads_and_unloads(folder):
    a, b = NAMES[:2]
    async with serving(folder) as served:
        client = served.client
        tags = (await client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == [f"{name}:latest" for name in NAMES]
        assert all(len(each["digest"]) == 64 and each["size"] > 0 for each in tags)
        shown = (await client.post("/api/show", json={"model": a})).json()
        assert shown["model_info"]["general.architecture"] == "gemma"
        assert shown["capabilities"] == ["completion"]
        assert served.loader.names == [], "lists and descriptions load nothing"
        start = time.time()
        for name, keep_alive in ((a, -1), (b, "1h30m")):
            body = {"model": name, "keep_alive": keep_alive}
            answer = await client.post("/api/generate", json=body)
            assert answer.json()["done_reason"] == "load"
        running = {each["name"]: each for each in (await client.get("/api/ps")).json()["models"]}
        assert running[f"{a}:latest"]["expires_at"].startswith("9999")
        left = running[f"{b}:latest"]["expires_at"]
        days = {
            time.strftime("%Y-%m-%d", time.gmtime(each + 5400)) for each in (start, time.time())
        }
        assert left[:10] in days
        answer = await client.post("/api/generate", json={"model": a, "keep_alive": 0})
        assert answer.json()["done_reason"] == "unload"
        await client.post("/api/generate", json={"model": b, "keep_alive": "1ms"})
        while await served.loaded():
            await asyncio.sleep(0.005)
        bad = await client.post("/api/generate", json={"model": b, "keep_alive": "soon"})
        assert bad.status_code == 400
        assert bad.json()["error"].startswith("keep_alive must be seconds")


async def test_the_page_and_the_numbers_are_those_of_a_loaded_model(folder):
    a, b = NAMES[:2]
    async with serving(folder) as served:
        client = served.client
        assert (await client.get("/")).status_code == 200
        answer = await client.get("/mie/config", params={"model": a})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_not_loaded")
        assert served.loader.names == []
        await served.ask(a)
        assert (await client.get("/mie/config")).json()["model"] == a
        async with client.stream("GET", "/mie/events") as response:
            lines = response.aiter_lines()
            assert "head" in await anext(lines)
            await client.post("/models/unload", json={"model": a})  # a page keeps no model
            while "event: end" not in await anext(lines):
                pass
        await asyncio.gather(served.ask(a), served.ask(b))
        assert (await client.get("/mie/config", params={"model": b})).json()["model"] == b
        metrics = (await client.get("/metrics")).text
        for name in (a, b):
            assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 0.0' in metrics
        assert (await client.post(f"/reset_prefix_cache?model={b}")).json() == {"reset": True}
        assert (await client.get("/health")).json() == {"status": "ok"}
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/models/load", "/models/unload", "/v1/chat/completions"} <= paths.keys()


async def test_a_request_is_cancelled_by_its_id(folder):
    async with serving(folder) as served, served.streaming(NAMES[0]) as stream:
        response_id = stream.first["id"]
        answer = await served.client.post(f"/v1/requests/{response_id}/cancel")
        assert answer.json() == {"id": response_id, "cancelled": True}
        answer = await served.client.post("/v1/requests/cmpl-0/cancel")
        assert answer.status_code == 404


async def test_a_dead_engine_is_replaced(folder, expected):
    a = NAMES[0]
    async with serving(folder) as served:
        await served.ask(a)
        [engine] = served.loader.engines
        engine().shutdown()
        assert (await served.states())[a] == "unloaded"
        assert (await served.client.get("/health")).status_code == 200
        assert await served.tokens(a) == expected[a]
        assert engine() is None


async def test_keys_and_the_admins_routes(folder):
    keys = {"keys": Keys.of(["sk-one"], None), "admin_keys": Keys.of_one("admin", "sk-admin")}
    async with serving(folder, **keys) as served:
        assert (await served.ask(NAMES[0])).status_code == 401
        assert served.loader.names == []
        for key, status in (("sk-one", 403), ("sk-admin", 200)):
            answer = await served.client.post(
                "/models/load", json={"model": NAMES[0]}, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == status, answer.text


async def test_a_drain_lets_requests_of_all_models_end_and_ends_all_engines(folder, expected):
    before = engine_threads()
    a, b, c = NAMES[:3]
    async with serving(folder) as served:
        await asyncio.gather(served.ask(a), served.ask(b))
        async with served.streaming(a) as stream:
            served.loader.gate.clear()
            waiting = asyncio.ensure_future(served.tokens(c))  # it came before the signal
            await served.until(lambda: served.loader.names[-1] == c)
            served.running.server.stop("test")
            await served.until(lambda: served.edge.health.is_draining)
            assert (await served.ask(b)).status_code == 503
            assert (await served.client.get("/health")).json() == {"status": "draining"}
            served.loader.gate.set()
            assert await waiting == expected[c]
            stream.release()
            assert [each async for each in stream.events][-1] == "[DONE]"
        assert await served.running.task == 0
    assert engine_threads() == before


async def test_the_end_refuses_what_still_waits_for_a_model(folder):
    async with serving(folder, shutdown_timeout=0.0) as served:
        served.loader.gate.clear()
        waiting = asyncio.ensure_future(served.ask(NAMES[0]))
        await served.until(lambda: served.loader.names == [NAMES[0]])
        served.running.server.stop("test")
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        served.loader.gate.set()
        assert await served.running.task == 0
