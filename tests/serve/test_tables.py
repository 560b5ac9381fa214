"""Requests of two tables: those that get an answer, and those that get a 400.

Many are from the tests of vLLM's and llama.cpp's servers, retold in our own words.
"""

import re
from typing import Any

import pytest
from tables import yaml_table

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

MESSAGES = [{"role": "user", "content": "Tell me a story about an otter."}]
PROMPT = "Once upon a time there was an otter"
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "temperature": 0}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
    "apply-template": ("/apply-template", {}),
}
"""The least that a request needs."""


def rows(file: str) -> list[Any]:
    """Return the rows of a table with the route of each."""
    table = yaml_table(file)
    table.pop("shared", None)
    return [
        pytest.param(name, *row, *[""] * (3 - len(row) if file == "refused" else 0))
        for names, rows in table.items()
        for name in names.split(", ")
        for row in rows
    ]


def at(answer: Any, place: str) -> Any:
    """Return the value at a place of an answer."""
    if place.startswith("#"):
        found = at(answer, place[1:])
        return [*map(len, found)] if "*" in place else len(found)
    key, _, rest = place.partition(".")
    if key == "*":
        return [at(each, rest) if rest else each for each in answer]
    found = answer[int(key) if isinstance(answer, list) else key]
    return at(found, rest) if rest else found


@pytest.mark.parametrize(("name", "change", "expected"), rows("answered"))
def test_a_request_is_answered(server, name, change, expected):
    path, body = ROUTES[name]
    answer = server.ask(path, **{**body, **change})
    assert {place: at(answer, place) for place in expected} == expected


def spelled(value: Any) -> Any:
    """Return the value with its long texts, which the table abbreviates as ``x * 5``."""
    if isinstance(value, dict):
        return {name: spelled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spelled(each) for each in value]
    found = re.fullmatch(r"x \* (\d+)", value) if isinstance(value, str) else None
    return "x" * int(found[1]) if found else value


@pytest.mark.parametrize(("name", "change", "param", "words"), rows("refused"))
def test_a_request_that_cannot_be_served_is_a_400_that_names_the_reason(
    server, name, change, param, words
):
    path, body = ROUTES[name]
    answer = server.post(path, **{**body, **spelled(change)})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    if name == "messages":
        assert answer.json().keys() == {"type", "error"}  # Anthropic's shape names no parameter
    else:
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["param"] == param
