"""Requests of the tests of vLLM's and llama.cpp's servers, retold in our own words.

`data/answered.yaml` has requests that get an answer, and `data/refused.yaml`, for
`test_refusals.py`, those that get an error.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

MESSAGES = [{"role": "user", "content": "Tell me a story about an otter."}]
PROMPT = "Once upon a time there was an otter"
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "temperature": 0}),
}
TABLE = yaml.safe_load((Path(__file__).parent / "data/answered.yaml").read_text())


def at(answer: Any, place: str) -> Any:
    """The value at a place of an answer."""
    if place.startswith("#"):
        found = at(answer, place[1:])
        return [*map(len, found)] if "*" in place else len(found)
    key, _, rest = place.partition(".")
    if key == "*":
        return [at(each, rest) if rest else each for each in answer]
    found = answer[int(key) if isinstance(answer, list) else key]
    return at(found, rest) if rest else found


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [pytest.param(name, *row, id=f"{name} {row[0]}"[:60]) for name in TABLE for row in TABLE[name]],
)
def test_a_request_is_answered(server, name, change, expected):
    path, body = ROUTES[name]
    answer = server.ask(path, **{**body, **change})
    assert {place: at(answer, place) for place in expected} == expected


@pytest.mark.parametrize("options", [{}, {"include_usage": False, "continuous_usage_stats": True}])
def test_v_a_stream_has_no_usage_unless_asked(server, options):
    path, body = ROUTES["completions"]
    chunks = server.stream(path, **body, stream_options=options)
    assert all(chunk.get("usage") is None for chunk in chunks)


def test_v_a_stop_string_may_stay_and_never_shows_in_a_stream(server):
    path, body = ROUTES["completions"]
    asked = {**body, "max_tokens": 60, "stop": [".", " the"]}
    answer = server.ask(path, **asked, include_stop_str_in_output=True)
    assert answer["choices"][0]["text"].endswith((".", " the"))
    text = "".join(chunk["choices"][0]["text"] for chunk in server.stream(path, **asked))
    assert "." not in text
    assert " the" not in text


@pytest.mark.parametrize("count", [6, 30])
def test_l_requests_at_once_get_what_each_gets_alone(server, count):
    path, body = ROUTES["completions"]
    bodies = [
        {**body, "prompt": f"{PROMPT} {i % 7}", "max_tokens": 10 + i % 5} for i in range(count)
    ]

    def text_of(asked: dict[str, Any]) -> str:
        text: str = server.ask(path, **asked)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(count) as pool:
        together = [*pool.map(text_of, bodies)]
    alone = {key: text_of(json.loads(key)) for key in {*map(json.dumps, bodies)}}
    assert together == [alone[json.dumps(asked)] for asked in bodies]


def test_l_the_template_writes_the_prompt(server):
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    prompt = server.ask("/apply-template", messages=messages)["prompt"]
    for message in messages:
        assert message["content"] in prompt
    path, body = ROUTES["completions"]
    text = server.ask(path, **{**body, "prompt": prompt, "add_special_tokens": False})
    path, body = ROUTES["chat"]
    chat = server.ask(path, **{**body, "messages": messages})
    assert text["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
