"""The server has adapters as models, and loads and unloads them beside running requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from adapter_files import random_adapter, write_peft
from deadlines import PATIENCE
from live_server import live

from mie import AsyncLLM, LoRARequest, SamplingParams
from mie.errors import ConfigError
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.serving import Serving

SHAPES = {
    f"model.layers.{layer}.self_attn.{name}.weight": np.zeros((rows, 256), np.float32)
    for layer in range(4)
    for name, rows in (("q_proj", 256), ("v_proj", 128))
}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("poet", "pirate", "clerk")):
        write_peft(folder / name, random_adapter(SHAPES, number, size=2.0), lora_alpha=16)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        "bundled",
        num_blocks=256,
        max_num_seqs=4,
        enable_lora=True,
        max_loras=3,
        lora_modules={"poet": str(folder / "poet")},
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[httpx2.Client]:
    config = ServeConfig(allow_runtime_lora_updating=True, served_model_name=["base"])
    with live(engine, config) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


def text_of(client: httpx2.Client, model: str, **body: Any) -> str:
    answer = client.post("/v1/completions", json={**BODY, "model": model, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def ids(client: httpx2.Client) -> list[str]:
    return [each["id"] for each in client.get("/v1/models").json()["data"]]


def test_an_adapter_is_a_model_with_a_parent(client: httpx2.Client) -> None:
    models = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert models.keys() == {"base", "poet"}
    assert models["base"]["parent"] is None
    assert (models["poet"]["parent"], models["poet"]["root"]) == ("base", "poet")
    assert client.get("/v1/models/poet").json() == models["poet"]


def test_the_model_of_a_request_chooses_the_adapter(
    client: httpx2.Client, engine: AsyncLLM, folder: Path
) -> None:
    assert text_of(client, "poet") != text_of(client, "base") == text_of(client, "base")
    llm = engine._llm  # the same engine, without HTTP
    params = SamplingParams(max_tokens=8, temperature=0)
    own = LoRARequest("poet", 1, str(folder / "poet"))
    [output] = llm.generate(BODY["prompt"], params, use_tqdm=False, lora_request=own)
    assert text_of(client, "poet") == output.outputs[0].text
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        answer = client.post(path, json={**chat, "model": "poet", "stream": False})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "poet"


def fingerprint(client: httpx2.Client, model: str) -> str:
    answer = client.post("/v1/completions", json={**BODY, "model": model, "max_tokens": 1})
    return str(answer.json()["system_fingerprint"])


def test_the_fingerprint_is_of_the_adapter_that_answered(
    client: httpx2.Client, folder: Path
) -> None:
    """Equal numbers under another name give an equal fingerprint."""
    base, poet = fingerprint(client, "base"), fingerprint(client, "poet")
    assert base != poet
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    answer = client.post("/v1/chat/completions", json={**body, "model": "poet"})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert {json.loads(line)["system_fingerprint"] for line in lines} == {poet}
    for name, path in (("twin", "poet"), ("clerk", "clerk")):
        loaded = client.post(LOAD, json={"lora_name": name, "lora_path": f"{folder}/{path}"})
        assert loaded.status_code == 200, loaded.text
    twin, clerk = fingerprint(client, "twin"), fingerprint(client, "clerk")
    for name in ("twin", "clerk"):
        assert client.post(UNLOAD, json={"lora_name": name}).status_code == 200
    assert twin == poet
    assert clerk not in (base, poet)


def test_ollama_lists_adapters_as_models(client: httpx2.Client) -> None:
    models = client.get("/api/tags").json()["models"]
    parents = {each["name"]: each["details"]["parent_model"] for each in models}
    assert parents == {"base:latest": "", "poet:latest": "base"}
    assert len({each["digest"] for each in models}) == 2
    running = client.get("/api/ps").json()["models"]
    assert [each["digest"] for each in running] == [each["digest"] for each in models]
    for name, parent in parents.items():
        shown = client.post("/api/show", json={"model": name}).json()
        assert shown["details"]["parent_model"] == parent


def test_an_unknown_model_names_the_adapters_that_are_there(client: httpx2.Client) -> None:
    answer = client.post("/v1/completions", json={**BODY, "model": "pirate"})
    assert answer.status_code == 404
    assert "this server has base, poet" in answer.json()["error"]["message"]


def test_an_adapter_is_loaded_and_unloaded_beside_a_stream(
    client: httpx2.Client, folder: Path
) -> None:
    plain = text_of(client, "base", max_tokens=60, ignore_eos=True)
    body = {**BODY, "model": "base", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        pieces = stream.iter_text()
        first = next(pieces)
        answer = client.post(LOAD, json={"lora_name": "pirate", "lora_path": f"{folder}/pirate"})
        assert answer.status_code == 200, answer.text
        pirate = text_of(client, "pirate")
        assert client.post(UNLOAD, json={"lora_name": "pirate"}).status_code == 200
        rest = first + "".join(pieces)
    assert "[DONE]" in rest
    assert text_of(client, "base", max_tokens=60, ignore_eos=True) == plain
    assert pirate not in (plain[: len(pirate)], text_of(client, "poet"))
    assert ids(client) == ["base", "poet"]
    assert client.post("/v1/completions", json={**BODY, "model": "pirate"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "poet", "lora_path": "x"}, 400, "lora_name 'poet' is in use"),
        (LOAD, {"lora_name": "base", "lora_path": "x"}, 400, "lora_name 'base' is in use"),
        (LOAD, {"lora_name": "x", "lora_path": "/nothing/here"}, 400, "does not exist; an adapter"),
        (LOAD, {"lora_name": "", "lora_path": "x"}, 400, "lora_name must be a string"),
        (LOAD, {"lora_path": "x"}, 400, "lora_name"),
        (UNLOAD, {"lora_name": "nobody"}, 404, "'nobody' does not exist"),
    ],
)
def test_a_wrong_load_or_unload_is_refused(
    client: httpx2.Client, path: str, body: dict[str, str], status: int, message: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert ids(client) == ["base", "poet"]


def test_a_full_engine_refuses_another_adapter(client: httpx2.Client, folder: Path) -> None:
    names = ["one", "two", "three"]
    answers = [
        client.post(LOAD, json={"lora_name": name, "lora_path": f"{folder}/clerk"})
        for name in names
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert "max_loras is 3" in answers[-1].json()["error"]["message"]
    for name in names[:2]:
        assert client.post(UNLOAD, json={"lora_name": name}).status_code == 200


def test_adapters_change_at_run_time_only_with_the_option(engine: AsyncLLM, folder: Path) -> None:
    body = {"lora_name": "pirate", "lora_path": f"{folder}/pirate"}
    with live(engine, ServeConfig(served_model_name=["base"])) as url:
        for path in (LOAD, UNLOAD):
            answer = httpx2.post(url + path, json=body)
            assert answer.status_code == 403
            assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_adapters_change_only_with_the_admin_key_if_there_is_one(
    engine: AsyncLLM, folder: Path
) -> None:
    keys, admin = Keys.of(["client"], None), Keys.of(["admin"], None)
    config = ServeConfig(allow_runtime_lora_updating=True, keys=keys, admin_keys=admin)
    body = {"lora_name": "pirate", "lora_path": f"{folder}/pirate"}
    with live(engine, config) as url:
        statuses = [
            httpx2.post(url + path, json=body, headers={"authorization": f"Bearer {key}"})
            for path in (LOAD, UNLOAD)
            for key in ("client", "admin")
        ]
    assert [answer.status_code for answer in statuses] == [403, 200, 403, 200]


async def test_an_adapter_with_a_name_of_the_model_is_refused(engine: AsyncLLM) -> None:
    config = ServeConfig(served_model_name=["poet"])
    with pytest.raises(ConfigError, match="lora_modules has 'poet', a name of the model"):
        await Serving.of(engine, config, queue_limit=None)  # type: ignore[arg-type]
