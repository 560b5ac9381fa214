"""Where a prompt departs from the prefix cache: the header and the usage of every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_helpers import DIALECTS, client_of, load

from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

HEADER = "x-mie-prefix-departs"
STORY = "Tell me a story about Mia the otter, the {} and a bell. " * 3
DETAILS = {"x-mie-usage-details": "1"}


def body_of(path: str, word: str, *, stream: bool) -> dict[str, Any]:
    """A request for one token, or for the fewest that the dialect allows."""
    text = STORY.format(word, word, word)
    key = next(name for name in ("prompt", "messages", "input") if name in DIALECTS[path])
    given: Any = [{"role": "user", "content": text}] if key == "messages" else text
    limit = {"max_output_tokens": 1} if "responses" in path else {"max_tokens": 1}
    if path.startswith("/api"):
        limit = {"options": {"num_predict": 1}}
    if stream and "completions" in path:
        limit["stream_options"] = {"include_usage": True}
    return {key: given, **limit, "stream": stream}


def usages_of(path: str, text: str, *, stream: bool) -> list[dict[str, Any]]:
    """The objects of an answer that have the usage; on Ollama's routes, the last line."""
    lines = text.splitlines() if stream else [text]
    events = [json.loads(each.removeprefix("data: ")) for each in lines if each[-1:] == "}"]
    if path.startswith("/api"):
        return events[-1:]
    places = [each.get("message") or each.get("response") or each for each in events]
    return [place["usage"] for place in places if place.get("usage")]


@pytest.fixture(scope="module")
def engine() -> Any:
    engine = load()
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
async def test_header_and_usage_name_the_token_and_both_texts(engine: Any, path: str, stream: bool):
    async with client_of(engine) as client:
        await client.post("/reset_prefix_cache")
        answers = [
            await client.post(path, json=body_of(path, word, stream=stream), headers=headers)
            for word, headers in (("mill", {}), ("mill", DETAILS), ("lake", DETAILS), ("inn", {}))
        ]
    texts = [answer.text for answer in answers]
    assert {answer.status_code for answer in answers} == {200}, texts
    first, cached, changed, other = (usages_of(path, text, stream=stream) for text in texts)
    assert first
    assert all("prefix_departs" not in usage for usage in (*first, *other))
    assert answers[0].headers[HEADER].startswith("token 0 of ")
    assert HEADER not in answers[1].headers
    assert [usage["prefix_departs"] for usage in cached] == [None] * len(cached)
    departure = changed[-1]["prefix_departs"]
    assert changed == [usage | {"prefix_departs": departure} for usage in changed]
    assert departure["reason"] == "other tokens"
    assert departure["cached"].startswith(" mill and a")
    assert departure["got"].startswith(" lake and a")
    token, of = departure["token"], departure["of"]
    said = answers[2].headers[HEADER]
    assert said.startswith(f'token {token} of {of}: other tokens; cached " mill and a')
    assert ', got " lake and a' in said
    assert answers[3].headers[HEADER].startswith(f"token {token} of ")


async def test_the_first_prompt_of_several_that_departs_is_named(engine: Any):
    async with client_of(engine) as client:
        await client.post("/reset_prefix_cache")
        prompts = [[*range(100, 150)], [*range(200, 250)]]
        await client.post("/v1/completions", json={"prompt": prompts[0], "max_tokens": 1})
        asked = {"prompt": prompts, "max_tokens": 1, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=asked, headers=DETAILS)
    assert answer.headers[HEADER].startswith("token 0 of 50: other tokens; ")
    assert answer.json()["usage"]["prefix_departs"]["token"] == 0


@pytest.mark.parametrize("shares", [False, True])
async def test_a_key_sees_the_words_of_no_other_key(shares: bool):
    engine = load()
    config = ServeConfig(keys=Keys.of(["a" * 32, "b" * 32]), share_prefix_cache=shares)
    said = []
    try:
        async with client_of(engine, config) as client:
            for key, word in (("a", "mill"), ("a", "lake"), ("b", "inn")):
                body = body_of("/v1/completions", word, stream=False)
                headers = {**DETAILS, "authorization": f"Bearer {key * 32}"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                said.append(answer.headers[HEADER] + json.dumps(answer.json()["usage"]))
    finally:
        engine.shutdown()
    _, own, others = said
    assert ("mill" in own) == (not shares)
    assert "mill" not in others
    assert "lake" not in others


async def test_an_answer_without_a_tokenizer_has_the_place_only():
    engine = load(skip_tokenizer_init=True)
    try:
        async with client_of(engine) as client:
            for last in (7, 8):
                prompt = [*range(100, 140), last]
                asked = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
                answer = await client.post("/v1/completions", json=asked, headers=DETAILS)
                prompt = asked["prompt"]
            changed = {**asked, "prompt": [*prompt[:9], 9, *prompt[10:]]}
            answer = await client.post("/v1/completions", json=changed, headers=DETAILS)
    finally:
        engine.shutdown()
    assert answer.headers[HEADER] == "token 9 of 41: other tokens"
    departure = {"token": 9, "of": 41, "reason": "other tokens"}
    assert answer.json()["usage"]["prefix_departs"] == departure
