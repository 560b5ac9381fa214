"""llama.cpp's routes: a table of facts of its own server's tests, and what a table cannot say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_tables import at

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

TABLE = yaml.safe_load((Path(__file__).parent / "data" / "llama_cpp.yaml").read_text())
PROMPT = {"prompt": "Once upon a time there was an otter", "temperature": 0, "n_predict": 24}
LONG = {
    "otter * 3000": "otter " * 3000,
    "ids * 1024": [300] * 1024,
    "chat * 300": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}] * 300,
}
"""Values that the table names."""


def ask(server: Any, path: str, body: dict[str, Any] | None) -> Any:
    if body is None:
        return server.get(path)
    seed = {"seed": 1} if "completion" in path else {}  # a free draw may end an answer early
    return server.post(
        path, **seed | {n: LONG[v] if str(v) in LONG else v for n, v in body.items()}
    )


def is_as_told(found: Any, told: Any) -> bool:
    """Return whether a value is as the table says."""
    if not isinstance(told, dict):
        return found == told
    [(how, wanted)] = told.items()
    if how == "matches":
        return bool(re.fullmatch(wanted, found))
    if how == "same":
        return len({*found}) == 1
    if how == "other":
        return found != wanted
    return found > wanted if how == "above" else type(found).__name__ == wanted


def named(rows: list[Any]) -> list[Any]:
    return [pytest.param(*rest, id=name) for name, *rest in rows]


@pytest.mark.parametrize(("asked", "told"), named(TABLE["answered"]))
def test_a_fact_of_llama_cpp(server: Any, asked: list[Any], told: dict[str, Any]):
    answer = ask(server, *asked)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert "x-mie-ignored" not in answer.headers
    for place, value in told.items():
        found = len(body) if place == "#" else body.get(place) if "/" in place else at(body, place)
        assert is_as_told(found, value), (place, found)


@pytest.mark.parametrize(("asked", "told"), named(TABLE["refused"]))
def test_a_refusal_of_llama_cpp(server: Any, asked: list[Any], told: tuple[int, str]):
    answer = ask(server, *asked)
    assert answer.status_code == told[0], answer.text
    assert told[1] in answer.json()["error"]["message"]


def stream(server: Any, **body: Any) -> list[dict[str, Any]]:
    answer = server.post("/completion", **{**PROMPT, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event[6:]) for event in events]


def test_a_stream_has_the_answers_text_and_tokens(server: Any):
    whole = server.ask("/completion", **PROMPT, return_tokens=True)
    *parts, last = stream(server)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in [*parts, last] for token in part["tokens"]] == whole["tokens"]
    assert {part["stop"] for part in parts} == {False}
    assert all(part["tokens"] for part in parts)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")
    assert last["timings"]["predicted_n"] == 24
    assert last["generation_settings"]["stream"] is True


def test_a_stream_of_several_prompts_names_the_prompt_of_each_event(server: Any):
    prompts = [PROMPT["prompt"], "The mill"]
    wholes = server.ask("/completion", **{**PROMPT, "prompt": prompts})
    events = stream(server, prompt=prompts)
    for index, whole in enumerate(wholes):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in own) == whole["content"]
        assert [event["stop"] for event in own] == [False] * (len(own) - 1) + [True]


def test_a_stream_has_the_log_probabilities_of_its_tokens(server: Any):
    events = stream(server, n_probs=3)
    entries = [each for event in events for each in event["completion_probabilities"]]
    assert [entry["id"] for entry in entries] == [t for event in events for t in event["tokens"]]
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(server: Any):
    def text(seed: int, **more: Any) -> str:
        body = {**PROMPT, "temperature": 1.0, "seed": seed, **more}
        return str(server.ask("/completion", **body)["content"])

    assert text(42) == text(42) == text(42, cache_prompt=False)
    assert len({text(seed) for seed in range(4)}) == 4
    assert text(-1) != text(-1)


def test_a_text_and_its_tokens_have_the_same_answer(server: Any):
    tokens = server.ask("/tokenize", content=PROMPT["prompt"], add_special=True)["tokens"]
    of_tokens = server.ask("/completion", **{**PROMPT, "prompt": tokens})
    of_text = server.ask("/completion", **PROMPT)
    assert of_tokens["content"] == of_text["content"]
    assert of_tokens["tokens_evaluated"] == len(tokens)


def test_what_is_tokenized_is_detokenized(server: Any):
    content = "What is the capital of France ?"
    tokens = server.ask("/tokenize", content=content)["tokens"]
    assert server.ask("/detokenize", tokens=tokens)["content"] == content
