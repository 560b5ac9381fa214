"""Names of folders that are not UTF-8 or have control characters, and times that no float has."""

import asyncio
import json
import os

import pytest
from edge_helpers import client_of
from models_folder import GOLDEN, NAMES, PROMPT, SETTINGS, serving
from test_numbers import NUMBERS

from mie import AsyncLLM
from mie.serve.keys import Keys

GOOD = ("plain", "café", "esc\x1b[31m", "new\nline", "tab\tquote'\"", "[brackets]")
BAD = (b"caf\xe9", b"\xff\xfe", b"half\xc3", b"\xed\xa0\x80")


def linked(folder, name):
    """Link a model to a name. The name may be bytes."""
    os.symlink(GOLDEN / NAMES[0], os.path.join(os.fsencode(folder), os.fsencode(name)))


@pytest.fixture
def odd(tmp_path):
    for name in (*GOOD, *BAD):
        linked(tmp_path, name)
    return tmp_path


async def test_a_folder_of_models_serves_those_that_can_be_named_and_prints_plain_lines(
    odd, capsys, caplog
):
    async with serving(odd) as served:
        listed = (await served.client.get("/v1/models")).json()["data"]
        assert {each["id"] for each in listed} == set(GOOD)
        tags = (await served.client.get("/api/tags")).json()["models"]
        assert {each["name"].removesuffix(":latest") for each in tags} == set(GOOD)
        for name in GOOD[:4]:
            answer = await served.ask(name)
            assert answer.status_code == 200, (name, answer.text)
        for path in ("/metrics", "/api/ps", "/openapi.json", "/health", "/v1/models"):
            assert (await served.client.get(path)).status_code == 200, path
    lines = capsys.readouterr().err.splitlines()
    assert any("esc\\x1b[31m" in line and "new\\nline" in line for line in lines)
    assert all(line.isprintable() and line.startswith("[") for line in lines)
    left_out = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert len(left_out) == len(BAD), "each name is logged once"
    assert all("rename it" in line and line.isprintable() for line in left_out)


@pytest.mark.parametrize("name", [BAD[0], BAD[3], "esc\x1b[31m\nline"])
async def test_a_model_of_any_folder_is_served_under_a_name_that_clients_can_read(tmp_path, name):
    linked(tmp_path, name)
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), os.fsencode(name)))
    engine = AsyncLLM(path, **SETTINGS)
    try:
        async with client_of(engine) as client:
            for route in ("/v1/models", "/metrics", "/api/tags", "/api/ps", "/load"):
                answer = await client.get(route)
                assert answer.status_code == 200, (route, answer.text)
            [last, _] = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
            assert last == os.fsencode(name).decode("utf-8", "replace")
            for stream in (False, True):
                body = {"model": last, "prompt": PROMPT, "max_tokens": 2, "stream": stream}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
            unknown = await client.post("/v1/completions", json={**body, "model": "none"})
            assert unknown.status_code == 404
    finally:
        engine.shutdown()


async def test_any_number_is_a_time_to_keep_a_model_or_is_refused(tmp_path):
    linked(tmp_path, "a")
    async with serving(tmp_path) as served:
        texts = [json.dumps(each) for each in (*NUMBERS, "9" * 60, "1h" * 30, "-9h", "1e400")]
        for index, number in enumerate((*NUMBERS, *texts)):
            data = f'{{"model": "a", "keep_alive": {number}}}'.encode()
            path = ("/api/chat", "/api/generate")[index % 2]
            answer = await served.client.post(
                path, content=data, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (200, 400), (number, answer.text)
            answer = await served.client.get("/api/ps")
            assert answer.status_code == 200, (number, answer.text)
        metrics = await served.client.get("/metrics")
        assert metrics.status_code == 200


async def test_only_the_admin_says_how_long_a_model_stays_loaded_if_there_is_one(tmp_path):
    linked(tmp_path, "a")
    keys = {"keys": Keys.of(["sk-one"]), "admin_keys": Keys.of_one("admin", "sk-admin")}
    async with serving(tmp_path, **keys) as served:

        async def post(key, path, keep_alive):
            return await served.client.post(
                path,
                json={"model": "a", "keep_alive": keep_alive},
                headers={"authorization": f"Bearer {key}"},
            )

        answer = await post("sk-one", "/api/generate", "5m")
        assert answer.status_code == 200
        assert answer.headers["x-mie-ignored"] == "keep_alive"
        model = await served.edge.models.catalogue.find("a")
        for keep_alive in (0, "0", "0s", -0.0, 0.0):
            for path in ("/api/generate", "/api/chat"):
                answer = await post("sk-one", path, keep_alive)
                assert answer.status_code == 403, (path, keep_alive)
                assert "needs the admin key" in answer.json()["error"]
        assert model.is_ready
        assert model.expires_at is None
        answer = await post("sk-admin", "/api/generate", "5m")
        assert answer.status_code == 200
        assert "x-mie-ignored" not in answer.headers
        assert model.expires_at is not None
        assert (await post("sk-admin", "/api/generate", 0)).json()["done_reason"] == "unload"
        while model.edge is not None:
            await asyncio.sleep(0.005)
