"""The names of a served model: a path gives way to the name of its file or folder."""

import os
import shutil
from pathlib import Path

import pytest
from edge_helpers import client_of

from mie import AsyncLLM
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.serve.config import ServeConfig
from mie.serve.serving import names_of


@pytest.mark.parametrize("form", ["{}", "{}/", "./{}", "sub/../{}", "{folder}/{}", "{folder}//{}/"])
@pytest.mark.parametrize("name", ["SmolLM2.Q4_1.gguf", "a folder", "x:8b", "größe"])
def test_the_first_name_of_a_path_is_that_of_the_file_and_the_path_stays_one(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / "sub").mkdir()
    path = form.format(name, folder=tmp_path)
    assert names_of(path) == list(dict.fromkeys([name, path]))


def test_a_folder_without_a_name_and_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_of(".") == [tmp_path.name, "."]
    assert names_of("..") == [tmp_path.parent.name, ".."]
    assert names_of("bundled") == ["bundled"]
    assert names_of("Qwen/Qwen3-0.6B") == ["Qwen/Qwen3-0.6B", "Qwen3-0.6B"]


async def test_the_page_and_answers_name_the_file_and_clients_may_give_its_path(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "Small-8M"
    shutil.copytree(BUNDLED_DIRECTORY, folder)
    engine = AsyncLLM(folder, num_blocks=64, max_num_seqs=2)
    try:
        async with client_of(engine) as client:
            models = (await client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in models] == ["Small-8M", os.fspath(folder)]
            page = await client.get("/mie/config", headers={"host": "localhost"})
            assert page.json()["model"] == "Small-8M"
            for given in ({}, {"model": "Small-8M"}, {"model": os.fspath(folder)}):
                body = {"prompt": "Once", "max_tokens": 1, **given}
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["model"] == given.get("model", "Small-8M")
        async with client_of(engine, ServeConfig(served_model_name=["mine"])) as client:
            page = await client.get("/mie/config", headers={"host": "localhost"})
            assert page.json()["model"] == "mine"
    finally:
        engine.shutdown()
