"""The errors that clients get."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, IncompleteRead

import pytest
from audit import engine_of
from deadlines import PATIENCE
from stepped import eventually

from mie.serve import body as bodies
from mie.serve.errors import ApiError, api_error
from mie.serve.openai.chunks import ChunkWriter
from mie.serve.routes import OPERATIONS

KEYS = {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} more',
    ],
    ids=range(12),
)
def test_a_body_that_is_no_request_is_a_400(server, body):
    answer = server.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"].keys() == KEYS


@pytest.mark.parametrize("cls", dict.fromkeys(each.body for each in OPERATIONS if each.body))
def test_a_body_full_of_errors_is_checked_up_to_the_first(monkeypatch, cls):
    """An error of pydantic takes a thousand times the bytes that cause it."""
    counts = []

    def count(error, values):
        counts.append(error.error_count())
        return answer_of(error, values)

    answer_of = bodies.validation_error
    monkeypatch.setattr(bodies, "validation_error", count)
    for wrong in ([None] * 1000, {str(i): None for i in range(1000)}):
        for name in cls.model_fields:
            for value in (wrong, [{"role": "user", "content": wrong}]):
                with suppress(ApiError):
                    bodies.parse(json.dumps({name: value}).encode(), cls)
    assert 0 < max(counts) < 10


def test_a_long_name_of_a_model_is_not_repeated(server):
    for answer in (
        server.post("/v1/completions", prompt="a", model="m" * 10_000),
        server.get(f"/v1/models/{'m' * 10_000}"),
        server.get(f"/{'m' * 10_000}"),
    ):
        assert answer.status_code == 404
        assert len(answer.text) < 500


def test_a_slash_at_the_end_is_another_route_and_no_redirect(server):
    """A redirect would name the host that the client named, and http behind a proxy with TLS."""
    answer = server.post("/v1/completions/", prompt="a")
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(server):
    answer = server.get("/v1/nowhere")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = server.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/files/x",
        "/v1/responses/resp_0/cancel",
        "/rerank",
    ],
)
def test_routes_that_are_not_here_are_501_by_name(server, path):
    answer = server.post(path, input="a")
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["type"] == "not_supported_error"
    assert error["message"].startswith(f"{path} is not supported: ")


def test_a_bug_shows_no_more_than_its_type():
    error = api_error(KeyError("/home/somebody/secret"))
    assert error.status == 500
    assert "secret" not in json.dumps(error.body())
    assert "KeyError" in error.message


def test_half_of_a_surrogate_pair_reaches_the_client_as_a_question_mark():
    answer = ApiError(400, "got \ud800").response()
    assert json.loads(answer.body)["error"]["message"] == "got ?"


def test_a_request_that_fails_alone_is_a_500_and_the_engine_lives(server, monkeypatch):
    """The detokenizer of one request raises in the engine's thread."""
    from mie.text.stream import TextStream

    original = TextStream.add

    def add(self, token_ids, armed=True):
        if self._searches:
            raise ValueError("a broken tokenizer")
        return original(self, token_ids, armed)

    monkeypatch.setattr(TextStream, "add", add)
    for stream in (False, True):
        answer = server.post("/v1/completions", prompt="A mill", stop="never", stream=stream)
        assert answer.status_code == 500, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert error["message"].endswith("failed: ValueError: a broken tokenizer")
    assert server.ask("/v1/completions", prompt="A mill")["choices"]


def test_a_stream_that_fails_later_ends_with_the_error_and_no_reason(server, monkeypatch):
    from mie.text.stream import TextStream

    original, has_begun = TextStream.add, threading.Event()

    def add(self, token_ids, armed=True):
        self.count = getattr(self, "count", 0) + 1
        if self._searches and self.count > 5:
            if has_begun.is_set():
                raise ValueError("a broken tokenizer")
            time.sleep(0.01)  # the engine goes on, so that the client gets a chunk
        return original(self, token_ids, armed)

    monkeypatch.setattr(TextStream, "add", add)
    asked = {
        "prompt": "A mill",
        "stop": "never",
        "stream": True,
        "max_tokens": 900,
        "ignore_eos": True,
    }
    with server.client.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_text()
        text = next(pieces)
        has_begun.set()
        text += "".join(pieces)
    *chunks, error, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    assert json.loads(error[6:])["error"]["code"] == "request_failed"
    assert chunks
    assert all(json.loads(c[6:])["choices"][0]["finish_reason"] is None for c in chunks)


@pytest.mark.parametrize(
    "where",
    ["openai.completions.CompletionWriter.run", "openai.chunks.time", "writer.refuse_failed"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_costs_one_request_and_no_blocks(server, monkeypatch, where, stream):
    """In each case the client gets a 500 without details, and the request ends."""

    def is_quiet():
        return not engine_of(server.engine).requests

    with monkeypatch.context() as patch:
        patch.setattr(f"mie.serve.{where}", broken)
        asked = {"prompt": "A mill", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        answer = server.post("/v1/completions", **asked)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in error["message"]
    eventually(is_quiet)
    assert server.ask("/v1/completions", prompt="A mill", max_tokens=1)["choices"]


@pytest.fixture
def connection(server) -> Iterator[HTTPConnection]:
    """One connection, which is opened again only if an answer has said that it closes."""
    one = HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    yield one
    one.close()


def ask_on(connection: HTTPConnection, **body) -> HTTPResponse:
    data, kind = json.dumps({"prompt": "A mill", **body}), {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", data, kind)
    return connection.getresponse()


def broken(*args, **options):
    raise KeyError("a secret")


@pytest.mark.parametrize("num_bytes", [1, 2**20], ids=["short", "long"])
@pytest.mark.parametrize(
    ("where", "has_id"),
    [
        ("mie.serve.openai.completions.set_params", True),
        ("mie.serve.asgi._read_body", True),
        ("mie.serve.health.route_of", True),
        ("mie.serve.access_log.facts_of", False),
    ],
    ids=["a route", "the body", "a middleware", "the access log"],
)
def test_a_connection_that_had_a_500_takes_the_next_request(
    server, connection, monkeypatch, caplog, where, has_id, num_bytes
):
    """A route raises, or a layer before or after the body was read."""
    with monkeypatch.context() as patch:
        patch.setattr(where, broken)
        answer = ask_on(connection, prompt="A" * num_bytes)
        error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"]) == (500, "internal_error")
    assert not answer.will_close
    assert ask_on(connection, max_tokens=1).status == 200
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info
    if has_id:
        assert answer.headers["x-request-id"] in record.getMessage()


def test_a_bug_after_a_whole_answer_does_not_cost_the_next_request(server, connection, monkeypatch):
    original, num_raised = ChunkWriter.close, 0

    def close(self):
        nonlocal num_raised
        original(self)
        num_raised += 1
        raise KeyError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkWriter, "close", close)
        answer = ask_on(connection, max_tokens=3, stream=True)
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert not answer.will_close
        eventually(lambda: num_raised == 1)
    assert ask_on(connection, max_tokens=1).status == 200


def test_a_bug_in_the_middle_of_an_answer_is_seen_as_its_cut(server, connection, monkeypatch):
    async def events(self):
        yield b"data: {}\n\n"
        broken()

    with monkeypatch.context() as patch:
        patch.setattr(ChunkWriter, "events", events)
        answer = ask_on(connection, max_tokens=3, stream=True)
        assert answer.status == 200
        with pytest.raises(IncompleteRead) as cut:
            answer.read()
    assert cut.value.partial == b"data: {}\n\n"
    connection.close()
    assert ask_on(connection, max_tokens=1).status == 200
