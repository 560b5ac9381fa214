"""Sampling parameters that a request leaves out are those of the model's generation_config.json."""

from __future__ import annotations

import json
import shutil

import pytest
from edge_helpers import client_of, server_of

from mie import AsyncLLM
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.cli import new_parser
from mie.cli.serve import engine_settings

RECOMMENDED = {"temperature": 1.7, "top_k": 7, "max_new_tokens": 12, "top_p": None}
MESSAGES = [{"role": "user", "content": "Who is Mia?"}]
DIALECTS = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 12},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12},
    "/v1/responses": {"input": "Who is Mia?", "max_output_tokens": 12},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "Who is Mia?", "stream": False},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The bundled model, with other recommendations."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(BUNDLED_DIRECTORY, folder)
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return folder


def engine_of(*words):
    """The engine of ``mie serve`` with these words on its command line."""
    args = new_parser().parse_args(["serve", *words, "--num-blocks", "64", "--max-num-seqs", "2"])
    return AsyncLLM(**engine_settings(args))


@pytest.fixture(scope="module")
def engines(directory):
    """The server's engine with its default, and one that ignores the file."""
    found = [engine_of(str(directory)), engine_of(str(directory), "--generation-config", "vllm")]
    yield found
    for engine in found:
        engine.shutdown()


def text_of(answer):
    """The text of an answer in any dialect."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" in body:
        choice = body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if "done" in body:
        return body["response"] if "response" in body else body["message"]["content"]
    if "output" in body:
        return body["output"][-1]["content"][0]["text"]
    return body["content"][0]["text"]


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_request_gets_what_the_model_recommends_unless_it_says_otherwise(engines, path):
    """A seed makes answers comparable: equal parameters draw equal tokens."""

    async def ask(engine, **given):
        async with client_of(engine) as client:
            given = {"seed": 5, **given}
            given = {"options": {"num_predict": 12, **given}} if "/api/" in path else given
            return text_of(await client.post(path, json={**DIALECTS[path], **given}))

    default, neutral = engines
    left_out = await ask(default)
    has_top_k = path != "/v1/responses"  # which has no such field
    spelled_out = {"temperature": 1.7, **({"top_k": 7} if has_top_k else {})}
    if has_top_k:
        assert left_out == await ask(neutral, **spelled_out)
    assert left_out == await ask(default, **spelled_out)
    assert left_out != await ask(neutral)
    assert left_out != await ask(default, temperature=0)
    assert await ask(default, temperature=0) == await ask(neutral, temperature=0)


CONVERSATION = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory):
    """The engine of the bundled model without its recommendations."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(BUNDLED_DIRECTORY, folder)
    (folder / "generation_config.json").unlink()
    engine = engine_of(str(folder))
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("is_page", [False, True], ids=["elsewhere", "page"])
@pytest.mark.parametrize("path", DIALECTS)
async def test_conversations_have_defaults_where_the_model_recommends_none(
    plain_engine, path, is_page
):
    """Ollama's routes and the page's chat are conversations. Other routes under /v1 are neutral."""

    async def ask(**given):
        async with client_of(plain_engine) as client:
            given = {"seed": 5, **given}
            given = {"options": {"num_predict": 12, **given}} if "/api/" in path else given
            headers = {"x-mie-page": "1"} if is_page else {}
            return text_of(
                await client.post(path, json={**DIALECTS[path], **given}, headers=headers)
            )

    neutral = {"temperature": 1, "top_p": 1}
    is_conversation = "/api/" in path or (is_page and path == "/v1/chat/completions")
    if path not in ("/v1/responses", "/v1/messages"):  # these lack a field of the four
        spelled_out = await ask(**CONVERSATION)
        assert spelled_out != await ask(**neutral, top_k=-1, min_p=0)
        assert (await ask() == spelled_out) == is_conversation
    if not is_conversation:
        assert await ask() == await ask(**neutral)


async def test_the_server_says_which_defaults_conversations_have(plain_engine, capsys):
    async with server_of(plain_engine), client_of(plain_engine) as client:
        shown = (await client.post("/api/show", json={})).json()
    values = "temperature=0.8, top_k=40, top_p=0.95, min_p=0.05"
    note = "the model recommends none; --generation-config vllm ignores them"
    where = "in conversations on /chat and Ollama's routes"
    [said] = [line for line in capsys.readouterr().err.splitlines() if "sampling" in line]
    assert said == f"[sampling defaults: neutral; {where}: {values} ({note})]"
    assert shown["parameters"] == "temperature 0.8\ntop_p 0.95\ntop_k 40\nmin_p 0.05"


async def test_a_recommended_length_holds_where_a_request_names_none(engines):
    async def ask(engine, **given):
        body = {"messages": MESSAGES, "ignore_eos": True, **given}
        async with client_of(engine) as client:
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.json()["usage"]["completion_tokens"]

    default, _ = engines
    assert await ask(default) == RECOMMENDED["max_new_tokens"]
    assert await ask(default, max_tokens=20) == 20


@pytest.mark.parametrize("words", [[], ["--generation-config", "vllm"]], ids=["auto", "vllm"])
async def test_the_server_says_which_values_come_from_the_file(directory, words, capsys):
    async with server_of(engine_of(str(directory), *words)):
        pass
    file = directory / "generation_config.json"
    values = "temperature=1.7, top_k=7, max_tokens=12"
    note = "--generation-config vllm ignores the file"
    [said] = [line for line in capsys.readouterr().err.splitlines() if "sampling" in line]
    defaults = "neutral" if words else f"of {file}: {values} ({note})"
    assert said == f"[sampling defaults{':' if words else ''} {defaults}]"


async def test_the_server_says_which_data_type_auto_is(directory, capsys):
    async with server_of(engine_of(str(directory))):
        pass
    first = capsys.readouterr().err.splitlines()[0]
    assert " · float32 · context of " in first
