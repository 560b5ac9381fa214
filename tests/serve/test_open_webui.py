"""Open WebUI's calls to its two kinds of backends, replayed: `data/open_webui.yaml`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from tables import yaml_table

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

CALLS = yaml_table("open_webui")
HEADERS = {
    "content-type": "application/json",  # also without a body
    "authorization": "Bearer sk-unused",
    "accept": "*/*",
    "accept-encoding": "gzip, deflate, br",
    "user-agent": "Python/3.12 aiohttp/3.13.3",
    "x-openwebui-user-name": "Ada",
    "x-openwebui-user-role": "admin",
}


def at(answer: Any, path: str) -> Any:
    """What stands at a path such as "models.0.name"."""
    for key in path.split("."):
        answer = answer[int(key) if isinstance(answer, list) else key]
    return answer


def named(value: Any, name: str) -> Any:
    return json.loads(json.dumps(value).replace("{N}", name))


def read_lines(text: str) -> None:
    """Read a stream as Open WebUI makes chunks of OpenAI of it."""
    *lines, last = [json.loads(line) for line in text.splitlines()]
    assert all(line["done"] is False and line["model"] for line in lines)
    parts = [line.get("message", {}).get("content", line.get("response")) for line in lines]
    assert all(isinstance(part, str) for part in parts)
    assert last["done"] is True
    assert last["eval_count"] > 0
    for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(last[name], int)
    assert last["prompt_eval_count"] + last["eval_count"] > 0


def read_events(text: str) -> None:
    """Read a stream as Open WebUI's middleware does."""
    events = [each.removeprefix("data: ") for each in text.split("\n\n") if each.startswith("data")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(each) for each in events]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert all(isinstance(delta.get("content", ""), str) for delta in deltas)
    assert chunks[-1]["usage"]["completion_tokens"] > 0


READERS = {"lines": read_lines, "events": read_events}


@pytest.mark.parametrize("backend", CALLS)
def test_every_call_is_answered_as_the_program_reads_it(server: Any, backend: str):
    name = "no list came before"
    for call in CALLS[backend]:
        why, path = f"{backend}: {call['why']}", call.get("get") or call["post"]
        if "get" in call:
            answer = server.client.get(path, headers=HEADERS)
        else:
            content = json.dumps(named(call["body"], name))
            answer = server.client.post(path, content=content, headers=HEADERS)
        assert answer.status_code == call.get("status", 200), (why, answer.text)
        ignored = answer.headers.get("x-mie-ignored")
        assert ignored == call.get("ignored"), (why, ignored)
        if "read" in call:
            READERS[call["read"]](answer.text)
            continue
        # aiohttp reads no JSON of another type
        assert answer.headers["content-type"].startswith("application/json"), why
        found = answer.json()
        for key in call.get("keys", ()):
            assert at(found, key) not in (None, ""), (why, key)
        for key, value in call.get("is", {}).items():
            assert at(found, key) == value, (why, key)
        if "json" in call:
            json.loads(at(found, call["json"]))
        if path == "/api/ps":
            moment = found["models"][0]["expires_at"].replace("Z", "+00:00")  # before Python 3.11
            assert int(datetime.fromisoformat(moment).timestamp()) > 0
        if path in ("/api/tags", "/v1/models"):
            name = at(found, "models.0.model" if path == "/api/tags" else "data.0.id")
