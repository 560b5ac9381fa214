"""What the tests of vLLM's and llama.cpp's servers ask of a server, retold in our own words.

`REFUSED` are requests that get an error, `ANSWERED` those that get an answer with some property.
The names say where a scenario is from: v is vLLM, l is llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from live_server import live_bundled

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "Once upon a time there was an otter"
MESSAGES = [{"role": "user", "content": "Tell me a story about an otter."}]
SYSTEM = {"role": "system", "content": "Be brief."}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
LONG = "the otter and the mill " * 2000


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    with live_bundled() as url, httpx2.Client(base_url=url, timeout=120) as client:
        yield client


def post(client: httpx2.Client, path: str, **body: Any) -> Any:
    """The answer to a greedy request of few tokens, unless the body says otherwise."""
    defaults: dict[str, Any] = {"model": "bundled"}
    if path == COMPLETIONS:
        defaults |= {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    if path == CHAT:
        defaults |= {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    if path == RESPONSES:
        defaults |= {"input": MESSAGES, "max_output_tokens": 6, "temperature": 0}
    response = client.post(path, json={**defaults, **body})
    assert response.status_code == 200, response.text
    if body.get("stream"):
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]
    return response.json()


# Requests that are refused: path, what is wrong, words of the message, and the parameter.

Refused = tuple[str, dict[str, Any], str, str | None]

REFUSED: dict[str, Refused] = {
    "v: an empty prompt": (COMPLETIONS, {"prompt": ""}, "empty", "prompt"),
    "v: an empty list of prompts": (COMPLETIONS, {"prompt": []}, "empty", "prompt"),
    "v: an empty prompt among others": (COMPLETIONS, {"prompt": ["x", ""]}, "empty", "prompt"),
    "v: no prompt": (COMPLETIONS, {"prompt": None}, "prompt", "prompt"),
    "v: a token outside the vocabulary": (COMPLETIONS, {"prompt": [999999]}, "999999", None),
    "v: a negative token": (COMPLETIONS, {"prompt": [-1]}, "-1", None),
    "l: text and tokens in one prompt": (COMPLETIONS, {"prompt": [1, "x"]}, "prompt", "prompt"),
    "v: a prompt of booleans": (COMPLETIONS, {"prompt": [True]}, "prompt", "prompt"),
    "l: a prompt longer than the context": (COMPLETIONS, {"prompt": LONG}, "context", "prompt"),
    "v: an answer longer than the context": (
        COMPLETIONS,
        {"max_tokens": 10**6},
        "max_tokens asks for 1000000",
        "max_tokens",
    ),
    "v: a chat longer than the context": (
        CHAT,
        {"messages": [{"role": "user", "content": LONG}]},
        "context",
        None,
    ),
    "v: negative max_tokens": (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "max_tokens"),
    "v: no tokens for a chat": (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens"),
    "v: max_tokens as text": (COMPLETIONS, {"max_tokens": "5"}, "max_tokens", "max_tokens"),
    "v: max_tokens as a fraction": (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens", "max_tokens"),
    "v: a negative temperature": (CHAT, {"temperature": -0.1}, "temperature", "temperature"),
    "v: temperature as text": (CHAT, {"temperature": "hot"}, "temperature", "temperature"),
    "v: top_p of zero": (CHAT, {"top_p": 0}, "top_p", "top_p"),
    "v: top_p above one": (CHAT, {"top_p": 1.1}, "top_p", "top_p"),
    "v: top_k below -1": (CHAT, {"top_k": -2}, "top_k", "top_k"),
    "v: min_p above one": (CHAT, {"min_p": 1.1}, "min_p", "min_p"),
    "v: no choices": (COMPLETIONS, {"n": 0}, "n", "n"),
    "v: more choices than may run": (COMPLETIONS, {"n": 1000}, "n is 1000", "n"),
    "v: best_of": (COMPLETIONS, {"best_of": 2}, "best_of is not supported", "best_of"),
    "v: beam search": (COMPLETIONS, {"use_beam_search": True}, "offline", "use_beam_search"),
    "v: a suffix": (COMPLETIONS, {"suffix": "the end"}, "suffix", "suffix"),
    "v: too many log-probabilities": (COMPLETIONS, {"logprobs": 21}, "limit is 20", "logprobs"),
    "v: too many top_logprobs": (
        CHAT,
        {"logprobs": True, "top_logprobs": 21},
        "limit is 20",
        None,
    ),
    "v: too many streamed log-probabilities": (
        COMPLETIONS,
        {"logprobs": 30, "stream": True},
        "limit is 20",
        "logprobs",
    ),
    "v: top_logprobs without logprobs": (CHAT, {"top_logprobs": 2}, "logprobs", "top_logprobs"),
    "v: logprobs of a completion as a switch": (
        COMPLETIONS,
        {"logprobs": True},
        "logprobs",
        "logprobs",
    ),
    "v: logprobs of a chat as a number": (CHAT, {"logprobs": 2}, "logprobs", "logprobs"),
    "v: all prompt log-probabilities": (
        COMPLETIONS,
        {"prompt_logprobs": -1},
        "limit is 20",
        "prompt_logprobs",
    ),
    "v: streamed prompt log-probabilities": (
        COMPLETIONS,
        {"prompt_logprobs": 1, "stream": True},
        "stream",
        "prompt_logprobs",
    ),
    "v: stream_options without a stream": (
        CHAT,
        {"stream_options": {"include_usage": True}},
        "stream",
        "stream_options",
    ),
    "v: empty stream_options without a stream": (
        COMPLETIONS,
        {"stream_options": {"include_usage": None}},
        "stream",
        "stream_options",
    ),
    "v: stream_options as text": (
        CHAT,
        {"stream": True, "stream_options": "usage"},
        "stream_options",
        "stream_options",
    ),
    "v: a bias for no token id": (CHAT, {"logit_bias": {"hello": 1}}, "hello", "logit_bias"),
    "v: a bias outside the vocabulary": (CHAT, {"logit_bias": {"99999": 1}}, "99999", "logit_bias"),
    "v: a bias that is no number": (
        CHAT,
        {"logit_bias": {"1": "much"}},
        "logit_bias",
        "logit_bias",
    ),
    "v: a bias above 100": (CHAT, {"logit_bias": {"1": 101}}, "logit_bias", "logit_bias"),
    "v: biases as a list": (CHAT, {"logit_bias": [[1, 5]]}, "logit_bias", "logit_bias"),
    "v: an empty stop string": (COMPLETIONS, {"stop": ""}, "stop", "stop"),
    "v: a stop token outside the vocabulary": (
        COMPLETIONS,
        {"stop_token_ids": [10**6]},
        "1000000",
        None,
    ),
    "v: a penalty above two": (
        CHAT,
        {"presence_penalty": 2.1},
        "presence_penalty",
        "presence_penalty",
    ),
    "v: a repetition penalty of zero": (
        CHAT,
        {"repetition_penalty": 0},
        "repetition_penalty",
        "repetition_penalty",
    ),
    "v: more min_tokens than max_tokens": (
        COMPLETIONS,
        {"min_tokens": 9},
        "min_tokens",
        "min_tokens",
    ),
    "v: an empty cache_salt": (CHAT, {"cache_salt": ""}, "cache_salt", "cache_salt"),
    "v: both ways to end a prompt": (
        CHAT,
        {"add_generation_prompt": True, "continue_final_message": True},
        "exclude each other",
        "continue_final_message",
    ),
    "v: a template of the client's": (
        CHAT,
        {"chat_template": "{{ 1 }}"},
        "chat_template",
        "chat_template",
    ),
    "v: tool_choice without tools": (
        CHAT,
        {"tool_choice": "required"},
        "tool_choice",
        "tool_choice",
    ),
    "v: an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "'text'",
        "messages",
    ),
    "v: a JSON schema": (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"not": {}}},
            }
        },
        "response_format",
        "response_format",
    ),
    "v: a guided choice": (
        CHAT,
        {"structured_outputs": {"choice": []}},
        "must not be empty",
        "structured_outputs",
    ),
    "l: an unknown response format": (
        CHAT,
        {"response_format": {"type": "sound"}},
        "response_format",
        "response_format",
    ),
    "l: a grammar": (CHAT, {"grammar": 'root ::= "a"'}, "grammar", "grammar"),
    "l: a JSON schema of its own": (
        CHAT,
        {"json_schema": {"const": "42"}},
        "response_format",
        "json_schema",
    ),
    "l: no messages": (CHAT, {"messages": None}, "messages", "messages"),
    "l: an empty list of messages": (CHAT, {"messages": []}, "messages", "messages"),
    "l: messages as text": (CHAT, {"messages": "hello"}, "messages", "messages"),
    "l: a number as a message": (CHAT, {"messages": [123]}, "messages", "messages"),
    "l: a message without a role": (CHAT, {"messages": [{}]}, "role", None),
    "l: a number as a role": (CHAT, {"messages": [{"role": 123}]}, "role", "messages"),
    "l: a number as a content": (
        CHAT,
        {"messages": [{"role": "system", "content": 123}]},
        "content",
        "messages",
    ),
    "l: an empty message after another": (CHAT, {"messages": [*MESSAGES, {}]}, "role", None),
    "l: a response in JSON": (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "test"}}},
        "text",
        "text",
    ),
    "l: an adapter": (COMPLETIONS, {"lora": [{"id": 0, "scale": 1.0}]}, "lora", "lora"),
    "l: timings of every token": (
        CHAT,
        {"timings_per_token": True},
        "timings_per_token",
        "timings_per_token",
    ),
    "v: a priority without that policy": (COMPLETIONS, {"priority": 5}, "fcfs", "priority"),
    "l: n_probs": (COMPLETIONS, {"n_probs": 10}, "n_probs", "n_probs"),
}


@pytest.mark.parametrize(("path", "body", "words", "param"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_served_is_a_400_that_names_the_reason(
    client: httpx2.Client, path: str, body: dict[str, Any], words: str, param: str | None
):
    defaults: dict[str, Any] = {
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 6},
        CHAT: {"messages": MESSAGES, "max_tokens": 6},
        RESPONSES: {"input": "x"},
    }[path]
    response = client.post(path, json={"model": "bundled", **defaults, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    "content",
    [b"", b"{{{", b'"text"', b'["not", "an", "object"]', b"42", b"null", b"\xff", b"NaN"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, "/tokenize"])
def test_v_a_body_that_is_no_object_is_a_400(client: httpx2.Client, path: str, content: bytes):
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/v1/models/another", 404, "model_not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 501, "not_supported"),
        ("POST", "/infill", 501, "not_supported"),
    ],
)
def test_an_unknown_route_or_model_has_its_own_status(
    client: httpx2.Client, method: str, path: str, status: int, code: str
):
    response = client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_v_an_unknown_model_is_a_404(client: httpx2.Client, path: str):
    body = {"prompt": "x", "messages": MESSAGES, "input": "x"}
    response = client.post(path, json={"model": "another", **body})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


# Requests that are answered: path, body, and what must be true of the answer.

Check = Callable[[Any], bool]
Answered = tuple[str, dict[str, Any], Check]


def choice(answer: Any) -> Any:
    """The first choice."""
    return answer["choices"][0]


def text_of(events: Any) -> str:
    """The joined text of a stream's first choice."""
    parts = [each for event in events for each in event["choices"] if each["index"] == 0]
    return "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)


def has_only_last_reason(events: Any) -> bool:
    """Whether only the last chunk with choices says why the answer ended."""
    reasons = [choice(event)["finish_reason"] for event in events if event["choices"]]
    # On a busy machine, several tokens may come in one chunk.
    return reasons[-1] is not None and set(reasons[:-1]) <= {None}


def totals(usage: Any) -> bool:
    """Whether the counts of a usage are positive and sum up."""
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"] > 0 and usage["total_tokens"] == total


USAGE = {"include_usage": True}
PARTS = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]

ANSWERED: dict[str, Answered] = {
    "v: a completion": (
        COMPLETIONS,
        {"max_tokens": 5},
        lambda a: (
            choice(a)["finish_reason"] == "length"
            and a["usage"]["completion_tokens"] == 5
            and totals(a["usage"])
        ),
    ),
    "v: a prompt of tokens": (
        COMPLETIONS,
        {"prompt": [5, 5, 5, 5, 5]},
        lambda a: a["usage"]["prompt_tokens"] == 5,
    ),
    "v: a model may be left out": (COMPLETIONS, {"model": None}, lambda a: a["model"] == "bundled"),
    "v: no log-probabilities unless asked": (
        COMPLETIONS,
        {"logprobs": None},
        lambda a: choice(a)["logprobs"] is None,
    ),
    "v: log-probabilities of the chosen tokens": (
        COMPLETIONS,
        {"logprobs": 0},
        lambda a: [len(row) for row in choice(a)["logprobs"]["top_logprobs"]] == [1] * 6,
    ),
    "v: five log-probabilities": (
        COMPLETIONS,
        {"logprobs": 5},
        lambda a: all(5 <= len(row) <= 6 for row in choice(a)["logprobs"]["top_logprobs"]),
    ),
    "v: log-probabilities are at most zero": (
        COMPLETIONS,
        {"logprobs": 5},
        lambda a: all(value <= 0 for value in choice(a)["logprobs"]["token_logprobs"]),
    ),
    "v: text offsets grow": (
        COMPLETIONS,
        {"logprobs": 0, "max_tokens": 12},
        lambda a: (
            sorted(offsets := choice(a)["logprobs"]["text_offset"]) == offsets and offsets[0] == 0
        ),
    ),
    "v: a chat without log-probabilities": (
        CHAT,
        {"logprobs": False},
        lambda a: choice(a)["logprobs"] is None,
    ),
    "v: a chat with log-probabilities but no alternatives": (
        CHAT,
        {"logprobs": True, "top_logprobs": 0},
        lambda a: [each["top_logprobs"] for each in choice(a)["logprobs"]["content"]] == [[]] * 6,
    ),
    "v: a chat with five alternatives": (
        CHAT,
        {"logprobs": True, "top_logprobs": 5},
        lambda a: all(len(e["top_logprobs"]) == 5 for e in choice(a)["logprobs"]["content"]),
    ),
    "l: log-probabilities of a chat spell the answer": (
        CHAT,
        {"logprobs": True, "top_logprobs": 10},
        lambda a: (
            "".join(each["token"] for each in choice(a)["logprobs"]["content"])
            == choice(a)["message"]["content"]
        ),
    ),
    "l: log-probabilities of a stream spell the answer": (
        CHAT,
        {"logprobs": True, "top_logprobs": 2, "stream": True},
        lambda events: (
            "".join(
                each["token"]
                for event in events
                for each in (choice(event)["logprobs"] or {"content": []})["content"]
            )
            == text_of(events)
        ),
    ),
    "v: prompt log-probabilities of each prompt": (
        COMPLETIONS,
        {"prompt": [PROMPT, "Hello"], "prompt_logprobs": 0},
        lambda a: all(len(each["prompt_logprobs"]) > 0 for each in a["choices"]),
    ),
    "v: prompt log-probabilities of a chat": (
        CHAT,
        {"prompt_logprobs": 1},
        lambda a: (
            a["prompt_logprobs"][0] is None
            and all(1 <= len(row) <= 2 for row in a["prompt_logprobs"][1:])
        ),
    ),
    "v: the prompt is echoed": (
        COMPLETIONS,
        {"echo": True},
        lambda a: choice(a)["text"].startswith(PROMPT) and len(choice(a)["text"]) > len(PROMPT),
    ),
    "v: the prompt is echoed alone": (
        COMPLETIONS,
        {"echo": True, "max_tokens": 0},
        lambda a: choice(a)["text"] == PROMPT,
    ),
    "v: an echo with log-probabilities": (
        COMPLETIONS,
        {"echo": True, "logprobs": 1, "max_tokens": 1},
        lambda a: (
            choice(a)["logprobs"]["token_logprobs"][0] is None
            and len(choice(a)["logprobs"]["tokens"]) == a["usage"]["prompt_tokens"] + 1
        ),
    ),
    "v: an echo of several prompts": (
        COMPLETIONS,
        {"prompt": [PROMPT, "Hello"], "echo": True},
        lambda a: (
            a["choices"][0]["text"].startswith(PROMPT)
            and a["choices"][1]["text"].startswith("Hello")
        ),
    ),
    "v: no new tokens": (
        COMPLETIONS,
        {"max_tokens": 0},
        lambda a: choice(a)["text"] == "" and choice(a)["finish_reason"] == "length",
    ),
    "v: a streamed completion": (COMPLETIONS, {"stream": True}, has_only_last_reason),
    "v: a streamed chat": (CHAT, {"stream": True}, has_only_last_reason),
    "v: no usage in a stream unless asked": (
        COMPLETIONS,
        {"stream": True, "stream_options": {"include_usage": False}},
        lambda events: all(event.get("usage") is None for event in events),
    ),
    "v: continuous usage needs usage": (
        COMPLETIONS,
        {
            "stream": True,
            "stream_options": {"include_usage": False, "continuous_usage_stats": True},
        },
        lambda events: all(event.get("usage") is None for event in events),
    ),
    "v: empty stream_options": (
        CHAT,
        {"stream": True, "stream_options": {}},
        lambda events: all(event.get("usage") is None for event in events),
    ),
    "v: the usage at the end of a stream": (
        CHAT,
        {"stream": True, "stream_options": USAGE},
        lambda events: (
            events[-1]["choices"] == []
            and totals(events[-1]["usage"])
            and all(event["usage"] is None for event in events[:-1])
        ),
    ),
    "v: the usage in every chunk grows": (
        CHAT,
        {"stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}},
        lambda events: (
            sorted(counts := [e["usage"]["completion_tokens"] for e in events]) == counts
            and counts[-1] == 6
        ),
    ),
    "l: one id for all chunks": (
        CHAT,
        {"stream": True},
        lambda events: (
            len({(event["id"], event["created"]) for event in events}) == 1
            and "cmpl" in events[0]["id"]
        ),
    ),
    "l: the role is in the first chunk only": (
        CHAT,
        {"stream": True},
        lambda events: (
            choice(events[0])["delta"]["role"] == "assistant"
            and not any("role" in choice(event)["delta"] for event in events[1:])
        ),
    ),
    "l: the last chunk of a chat has no content": (
        CHAT,
        {"stream": True},
        lambda events: choice(events[-1])["delta"] == {},
    ),
    "v: three choices": (
        COMPLETIONS,
        {"n": 3, "temperature": 1.0, "seed": 42, "max_tokens": 20},
        lambda a: (
            [each["index"] for each in a["choices"]] == [0, 1, 2]
            and len({each["text"] for each in a["choices"]}) == 3
        ),
    ),
    "v: three streamed choices": (
        COMPLETIONS,
        {"n": 3, "temperature": 1.0, "seed": 42, "max_tokens": 20, "stream": True},
        lambda events: (
            sorted(choice(event)["index"] for event in events if choice(event)["finish_reason"])
            == [0, 1, 2]
        ),
    ),
    "v: choices of several prompts are in order": (
        COMPLETIONS,
        {"prompt": [PROMPT, "Hello"], "n": 2, "temperature": 1.0, "seed": 1},
        lambda a: [each["index"] for each in a["choices"]] == [0, 1, 2, 3],
    ),
    "v: usage counts every choice": (
        COMPLETIONS,
        {"n": 3, "max_tokens": 4, "ignore_eos": True, "temperature": 1.0},
        lambda a: a["usage"]["completion_tokens"] == 12,
    ),
    "v: equal prompts in one request": (
        COMPLETIONS,
        {"prompt": [PROMPT] * 3},
        lambda a: len({each["text"] for each in a["choices"]}) == 1,
    ),
    "v: a bias forces a token": (
        COMPLETIONS,
        {"logit_bias": {"300": 100}, "return_token_ids": True},
        lambda a: set(choice(a)["token_ids"]) == {300},
    ),
    "v: a bias bans a token": (
        COMPLETIONS,
        {"logit_bias": {"300": -100}, "temperature": 2.0, "return_token_ids": True},
        lambda a: 300 not in choice(a)["token_ids"],
    ),
    "v: only allowed tokens": (
        COMPLETIONS,
        {"allowed_token_ids": [300, 301], "temperature": 2.0, "return_token_ids": True},
        lambda a: set(choice(a)["token_ids"]) <= {300, 301},
    ),
    "v: token ids of prompt and answer": (
        COMPLETIONS,
        {"return_token_ids": True},
        lambda a: (
            len(choice(a)["token_ids"]) == 6
            and len(choice(a)["prompt_token_ids"]) == a["usage"]["prompt_tokens"]
        ),
    ),
    "v: token ids of a stream": (
        COMPLETIONS,
        {"return_token_ids": True, "stream": True},
        lambda events: sum(len(choice(event)["token_ids"]) for event in events) == 6,
    ),
    "v: log-probabilities spelled as ids": (
        COMPLETIONS,
        {"logprobs": 1, "return_tokens_as_token_ids": True},
        lambda a: all(token.startswith("token_id:") for token in choice(a)["logprobs"]["tokens"]),
    ),
    "v: the last tokens of a prompt": (
        COMPLETIONS,
        {"prompt": [*range(10, 20)], "truncate_prompt_tokens": 4, "return_token_ids": True},
        lambda a: choice(a)["prompt_token_ids"] == [16, 17, 18, 19],
    ),
    "v: min_tokens outlasts the end": (
        CHAT,
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "min_tokens": 60},
        lambda a: a["usage"]["completion_tokens"] == 60,
    ),
    "v: a stop string is left out": (
        COMPLETIONS,
        {"max_tokens": 60, "stop": ["."]},
        lambda a: (
            choice(a)["finish_reason"] == "stop"
            and choice(a)["stop_reason"] == "."
            and "." not in choice(a)["text"]
        ),
    ),
    "v: a stop string is kept": (
        COMPLETIONS,
        {"max_tokens": 60, "stop": ".", "include_stop_str_in_output": True},
        lambda a: choice(a)["text"].count(".") == 1 and choice(a)["text"].endswith("."),
    ),
    "l: a stop string never shows in a stream": (
        COMPLETIONS,
        {"max_tokens": 60, "stop": [" the", " a "], "stream": True},
        lambda events: " the" not in text_of(events) and " a " not in text_of(events),
    ),
    "v: a chat ends by itself": (
        CHAT,
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": None},
        lambda a: choice(a)["finish_reason"] == "stop" and choice(a)["stop_reason"] is None,
    ),
    "v: null stands for the default": (
        CHAT,
        dict.fromkeys(("top_p", "n", "stop", "seed", "logit_bias", "stream", "user", "tools")),
        lambda a: len(a["choices"]) == 1,
    ),
    "v: a chat of several turns": (
        CHAT,
        {"messages": [SYSTEM, *MESSAGES, {"role": "assistant", "content": "No."}, *MESSAGES]},
        lambda a: choice(a)["message"]["role"] == "assistant",
    ),
    "v: a message in parts": (
        CHAT,
        {"messages": [{"role": "user", "content": PARTS}]},
        lambda a: bool(choice(a)["message"]["content"]),
    ),
    "v: max_completion_tokens": (
        CHAT,
        {"max_tokens": None, "max_completion_tokens": 3},
        lambda a: a["usage"]["completion_tokens"] == 3,
    ),
    "v: the assistant's last message goes on": (
        CHAT,
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "Once there was an"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        lambda a: bool(choice(a)["message"]["content"]),
    ),
    "v: harmless fields are accepted": (
        CHAT,
        {
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "best_of": 1,
            "parallel_tool_calls": True,
            "tool_choice": "none",
            "response_format": {"type": "text"},
        },
        lambda a: len(a["choices"]) == 1,
    ),
    "v: cached tokens are counted": (
        COMPLETIONS,
        {"prompt": [PROMPT * 4] * 2},
        lambda a: a["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0,
    ),
    "v: a fingerprint": (CHAT, {}, lambda a: isinstance(a["system_fingerprint"], str)),
    "v: a salt": (COMPLETIONS, {"cache_salt": "mine"}, lambda a: len(a["choices"]) == 1),
    "v: special tokens stay": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 200,
            "skip_special_tokens": False,
        },
        lambda a: choice(a)["finish_reason"] == "stop",
    ),
    "l: an id and a message of a response": (
        RESPONSES,
        {"input": [SYSTEM, *MESSAGES]},
        lambda a: a["id"].startswith("resp_") and a["output"][0]["id"].startswith("msg_"),
    ),
    "l: a response in text": (
        RESPONSES,
        {"text": {"format": {"type": "text"}}},
        lambda a: a["output"][0]["content"][0]["type"] == "output_text",
    ),
}


@pytest.mark.parametrize(("path", "body", "check"), ANSWERED.values(), ids=ANSWERED)
def test_a_request_is_answered(
    client: httpx2.Client, path: str, body: dict[str, Any], check: Check
):
    answer = post(client, path, **body)
    assert check(answer), answer


# Scenarios of several requests.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body", [{}, {"seed": 3, "temperature": 1.3}, {"n": 2, "seed": 3, "temperature": 1.3}]
)
def test_v_a_stream_has_the_text_of_the_whole_answer(
    client: httpx2.Client, path: str, body: dict[str, Any]
):
    whole = choice(post(client, path, max_tokens=20, **body))
    events = post(client, path, max_tokens=20, stream=True, **body)
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert text_of(events) == text


def test_l_the_same_seed_gives_the_same_text_and_others_do_not(client: httpx2.Client):
    texts = [
        choice(post(client, COMPLETIONS, seed=seed, temperature=1, max_tokens=20))["text"]
        for seed in (0, 1, 2, 3, 0, 1, 2, 3)
    ]
    assert texts[:4] == texts[4:]
    assert len(set(texts)) == 4


def test_l_a_seed_gives_the_same_text_with_and_without_the_cache(client: httpx2.Client):
    cold = post(client, COMPLETIONS, seed=7, temperature=1, max_tokens=20, cache_salt="cold")
    warm = [
        post(client, COMPLETIONS, seed=7, temperature=1, max_tokens=20, cache_salt="warm")
        for _ in range(2)
    ]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert {choice(each)["text"] for each in (cold, *warm)} == {choice(cold)["text"]}


@pytest.mark.parametrize("count", [2, 6, 80])
def test_l_requests_at_once_get_what_each_gets_alone(client: httpx2.Client, count: int):
    bodies = [{"prompt": f"{PROMPT} {i % 7}", "max_tokens": 10 + i % 5} for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        together = [*pool.map(lambda body: choice(post(client, COMPLETIONS, **body)), bodies)]
    different = {json.dumps(body): body for body in bodies}
    alone = {
        key: choice(post(client, COMPLETIONS, **body))["text"] for key, body in different.items()
    }
    assert [each["text"] for each in together] == [alone[json.dumps(body)] for body in bodies]


def test_v_texts_and_their_tokens_get_the_same_answers(client: httpx2.Client):
    tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    prompts = [PROMPT, tokens, [PROMPT, PROMPT], [tokens, tokens]]
    texts = {
        each["text"]
        for prompt in prompts
        for each in post(client, COMPLETIONS, prompt=prompt)["choices"]
    }
    assert len(texts) == 1


def test_v_the_server_works_after_refusing(client: httpx2.Client):
    for body in ({"logprobs": 30}, {"logprobs": 30, "stream": True}, {"n": 10**6}):
        refused = client.post(COMPLETIONS, json={"prompt": PROMPT, **body})
        assert refused.status_code == 400
    assert choice(post(client, COMPLETIONS))["text"]


def test_l_text_survives_tokens_and_back(client: httpx2.Client):
    text = "What is the capital of France ? 媽 🤗"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert len(tokens) > 5
    back = client.post("/detokenize", json={"tokens": tokens}).json()
    assert back["content"] == back["prompt"] == text


def test_l_special_tokens_are_added_when_asked(client: httpx2.Client):
    plain, special = (
        client.post("/tokenize", json={"content": "Hello", "add_special": adds}).json()["tokens"]
        for adds in (False, True)
    )
    assert special[1:] == plain


def test_l_pieces_spell_the_text(client: httpx2.Client):
    body = {"content": "unicode 媽 and emoji 🤗", "with_pieces": True}
    pieces = [each["piece"] for each in client.post("/tokenize", json=body).json()["tokens"]]
    data = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces)
    assert data.decode() == body["content"]


def test_v_messages_are_tokenized_as_the_chat_has_them(client: httpx2.Client):
    answer = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["count"] == post(client, CHAT)["usage"]["prompt_tokens"]


def test_l_the_template_writes_the_prompt(client: httpx2.Client):
    prompt = client.post("/apply-template", json={"messages": [SYSTEM, *MESSAGES]}).json()["prompt"]
    assert SYSTEM["content"] in prompt
    assert MESSAGES[0]["content"] in prompt
    body = {"prompt": prompt, "add_special_tokens": False}
    text = choice(post(client, COMPLETIONS, **body))["text"]
    chat = choice(post(client, CHAT, messages=[SYSTEM, *MESSAGES]))
    assert text == chat["message"]["content"]


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/version", "/load", "/metrics", "/v1/models"]
)
def test_l_plain_routes_answer(client: httpx2.Client, path: str):
    assert client.get(path).status_code == 200
