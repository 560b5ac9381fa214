"""Requests that cannot be served get a 400 that names the parameter and the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    ),
    "tokenize": ("/tokenize", {}),
    "detokenize": ("/detokenize", {}),
    "apply-template": ("/apply-template", {}),
}
"""The least that a request needs."""


def cases() -> list[Any]:
    table = yaml.safe_load((Path(__file__).parent / "data/refused.yaml").read_text())
    del table["shared"]
    return [
        pytest.param(name, *row, *[""] * (3 - len(row)), id=f"{name} {row[0]}"[:60])
        for names, rows in table.items()
        for name in names.split(", ")
        for row in rows
    ]


def spelled(value: Any) -> Any:
    """The value with its long texts, which the table abbreviates as ``x * 5``."""
    if isinstance(value, dict):
        return {name: spelled(each) for name, each in value.items()}
    if isinstance(value, list):
        return [spelled(each) for each in value]
    found = re.fullmatch(r"x \* (\d+)", value) if isinstance(value, str) else None
    return "x" * int(found[1]) if found else value


@pytest.mark.parametrize(("name", "change", "param", "words"), cases())
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
