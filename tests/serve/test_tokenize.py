"""Tokens, templates, models and the routes that control the server."""

import pytest
from live_server import live

from mie.serve.config import ServeConfig

TEXT = "Zoë's 🦊 ran  home,\n<|eos|>"


@pytest.fixture(scope="module")
def tokenizer(llm):
    return llm.get_tokenizer()


def test_tokens_of_a_text_in_vllms_shape(server, tokenizer):
    answer = server.ask("/tokenize", prompt=TEXT, return_token_strs=True)
    ids = tokenizer.encode(TEXT)
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == 1024
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert ids[-1] == tokenizer.eos_token_id  # special tokens in a text are parsed
    plain = server.ask("/tokenize", prompt=TEXT, add_special_tokens=False)
    assert plain["tokens"] == ids[1:]
    assert plain["token_strs"] is None


def test_tokens_of_a_conversation(server):
    messages = [{"role": "user", "content": "hi"}]
    answer = server.ask("/tokenize", messages=messages)
    prompt = server.ask("/apply-template", messages=messages)["prompt"]
    plain = server.ask("/tokenize", prompt=prompt, add_special_tokens=False)
    assert answer["tokens"] == plain["tokens"]
    bare = server.ask("/apply-template", messages=messages, add_generation_prompt=False)["prompt"]
    assert prompt.startswith(bare)
    assert prompt != bare


def test_text_of_tokens(server, tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert server.ask("/detokenize", tokens=ids) == {"prompt": TEXT}
    assert server.ask("/detokenize", tokens=[])["prompt"] == ""


def test_facts_of_the_tokenizer(server, tokenizer):
    facts = server.get("/tokenizer_info").json()
    assert facts["vocab_size"] == len(tokenizer)
    assert facts["eos_token"] == tokenizer.eos_token
    assert facts["bos_token"] == tokenizer.bos_token
    assert facts["chat_template"] == tokenizer.chat_template
    [eos] = server.ask("/tokenize", prompt=facts["eos_token"], add_special_tokens=False)["tokens"]
    assert eos == tokenizer.eos_token_id


def test_models(server):
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("bundled", "model", 1024)
    assert model["default_sampling_params"]["temperature"] == 1
    assert server.get("/v1/models/bundled").json() == model
    answer = server.get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_names_of_the_server_own_choice(server):
    with live(server.engine, ServeConfig(served_model_name=["tiny", "org/small"])) as url:
        listed = server.client.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "org/small"]
        assert server.client.get(f"{url}/v1/models/org/small").status_code == 200
        for name, answered in (("org/small", "org/small"), (None, "tiny")):
            body = {"prompt": "a", "model": name, "max_tokens": 1}
            answer = server.client.post(f"{url}/v1/completions", json=body)
            assert answer.json()["model"] == answered
        body = {"prompt": "a", "model": "bundled"}
        assert server.client.post(f"{url}/v1/completions", json=body).status_code == 404


def test_the_prefix_cache_can_be_emptied(server):
    asked = {"prompt": list(range(500, 596)), "max_tokens": 1}
    server.ask("/v1/completions", **asked)
    details = server.ask("/v1/completions", **asked)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 95
    assert server.ask("/reset_prefix_cache") == {"reset": True}
    details = server.ask("/v1/completions", **asked)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0
