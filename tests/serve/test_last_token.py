"""An error in the text of the last token, after the engine has forgotten the request."""

import json
import os
from contextlib import contextmanager

import pytest
from audit import engine_of, num_open_requests
from edge_helpers import DIALECTS, MESSAGES, asks, client_of

from mie.frontend.answer import Answer
from mie.frontend.conversation import AnswerState
from mie.serve.openai.logprobs import LogprobWriter
from mie.serve.parts import Parts
from mie.serve.writer import Writer
from mie.text.detokenizer import Detokenizer
from mie.text.stream import StopStrings, TextStream
from mie.text.tools.parser import AnswerParser

PLACES = [
    (Detokenizer, "add"),
    (Detokenizer, "finish"),
    (TextStream, "add"),
    (TextStream, "finish"),
    (StopStrings, "add"),
    (StopStrings, "flush"),
    (AnswerState, "add"),
    (AnswerState, "calls"),
    (AnswerParser, "add"),
    (AnswerParser, "finish"),
    (Answer, "_count_calls"),
    (Answer, "_completion"),
    (LogprobWriter, "chat"),
    (LogprobWriter, "completion"),
    (LogprobWriter, "spelled"),
    (Parts, "add"),
    (Parts, "end"),
    (Writer, "_noted"),
]

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
STOP = ["no such text"]
MORE = {
    "/v1/completions": {"max_tokens": 4, "n": 2, "logprobs": 2, "stop": STOP},
    "/v1/chat/completions": {
        "max_tokens": 4,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": STOP,
        **CHAT_TOOLS,
    },
    "/v1/messages": {
        "max_tokens": 4,
        "stop_sequences": STOP,
        "tools": [{"name": "add", "input_schema": TOOL["parameters"]}],
    },
    "/v1/responses": {
        "max_output_tokens": 4,
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", **TOOL}],
    },
    "/api/chat": {
        "options": {"num_predict": 4, "stop": STOP},
        "logprobs": True,
        **CHAT_TOOLS,
        "messages": MESSAGES,
    },
    "/api/generate": {"options": {"num_predict": 4, "stop": STOP}, "logprobs": True},
}


@contextmanager
def raising(engine, monkeypatch, cls, name):
    """Let a method raise when no request is in the engine any more; count how often it did."""
    original, struck = getattr(cls, name), []

    def method(self, *args, **options):
        if not engine_of(engine).requests:
            struck.append(name)
            raise ZeroDivisionError("injected")
        return original(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cls, name, method)
        yield struck


def endings(text):
    """Return the JSON values of a stream's events that mark an answer as complete."""
    found = []
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            value = json.loads(data)
            choices = value.get("choices") or []
            is_end = bool(value.get("done"))
            is_end |= value.get("type") in ("message_stop", "response.completed")
            if is_end or any(choice["finish_reason"] == "length" for choice in choices):
                found.append(value)
    return found


def streams(number):
    """Return whether to stream: both in the long run, and either of them in a short one."""
    return (False, True) if os.environ.get("MIE_HYPOTHESIS") == "far" else (number % 2 == 0,)


@pytest.mark.parametrize("route", DIALECTS)
def test_an_error_in_the_text_of_the_last_token_is_told_to_the_client(engine, monkeypatch, route):
    body = DIALECTS[route] | MORE[route]

    async def ask():
        num_struck = 0
        async with client_of(engine) as client:
            for number, (cls, name) in enumerate(PLACES):
                for stream in streams(number):
                    where = (route, cls.__name__, name, stream)
                    with raising(engine, monkeypatch, cls, name) as struck:
                        answer = await client.post(route, json={**body, "stream": stream})
                    num_struck += bool(struck)
                    if not struck:
                        assert answer.status_code == 200, where
                    elif not stream:
                        assert answer.status_code == 500, (where, answer.text)
                        assert "ZeroDivisionError" in answer.text, where
                    elif answer.status_code == 200:  # its first tokens were sent before
                        assert "ZeroDivisionError" in answer.text, (where, answer.text)
                    else:
                        assert answer.status_code == 500, (where, answer.text)
                    if struck and stream and body.get("n") is None:
                        assert not endings(answer.text), (where, answer.text)
                    await engine.metrics_snapshot()  # the clean-up comes before it
                    assert not num_open_requests(engine), where
                    assert not client.app.state.serving.running, where
                    assert client.app.state.edge.health.num_requests == 0, where
            answer = await client.post(route, json={**body, "stream": False})
            assert answer.status_code == 200
        assert engine_of(engine).scheduler.manager.num_used == 0
        return num_struck

    assert asks(ask()) >= 5
