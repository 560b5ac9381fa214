"""Log lines: their facts, and that no client can forge one."""

import io
import json
import logging
import sys

import pytest
from edge_helpers import asks, client_of

from mie.serve.access_log import JsonFormat, TextFormat, logging_as
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

KEY = "sk-secret-of-alice"
PROMPT = "A prompt that must not leak"


def lines_of(engine, requests, monkeypatch, *, format="text", **options):
    """The log while a client sends requests: (method, path, keywords) each."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    async def ask():
        config = ServeConfig(log_format=format, **options)
        async with client_of(engine, config) as client:
            for method, path, keywords in requests:
                await client.request(method, path, **keywords)

    with logging_as(format):
        asks(ask())
    return stream.getvalue().splitlines()


def completion(prompt=PROMPT, **headers):
    return (
        "POST",
        "/v1/completions",
        {"json": {"prompt": prompt, "max_tokens": 3}, "headers": headers},
    )


def test_a_line_says_what_a_request_took(engine, monkeypatch):
    keys = Keys.of([KEY])
    ask = completion(authorization=f"Bearer {KEY}")
    [line] = lines_of(engine, [ask], monkeypatch, format="json", keys=keys)
    entry = json.loads(line)
    assert entry["logger"] == "mie.access"
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert entry["key"] == "key-1"
    assert entry["num_prompt_tokens"] > 3
    assert entry["num_output_tokens"] == 3
    for name in (
        "num_cached_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "num_copied_blocks",
    ):
        assert isinstance(entry[name], int)
    assert 0 <= entry["queue_seconds"] <= entry["first_token_seconds"] <= entry["seconds"]
    assert KEY not in line


@pytest.mark.parametrize("format", ["text", "json"])
def test_prompts_are_in_the_log_only_if_asked(engine, monkeypatch, format):
    requests = [completion(), ("POST", "/v1/completions", {"content": PROMPT.encode()})]
    lines = lines_of(engine, requests, monkeypatch, format=format)
    assert len(lines) == 2
    assert not any("leak" in line for line in lines)
    lines = lines_of(engine, requests[:1], monkeypatch, format=format, log_prompts=True)
    assert len(lines) == 1
    assert PROMPT in lines[0]


def test_no_client_can_write_a_line_of_its_own(engine, monkeypatch):
    forged = "%0amie: info: method=GET path=/admin status=200%1b[2K%e2%80%ae"
    requests = [
        ("GET", f"/x{forged}", {}),
        completion("a\nmie: error: forged", **{"x-request-id": "x y=1 status=200"}),
        ("POST", "/v1/completions\u2028mie: forged", {"json": {"model": "a\nmie: forged"}}),
    ]
    lines = lines_of(engine, requests, monkeypatch, log_prompts=True)
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("mie: info: method=")
        assert line.isprintable()
    assert "client_request_id='x y=1 status=200'" in lines[1]
    [line, *_] = lines_of(engine, requests, monkeypatch, format="json")
    assert json.loads(line)["path"].startswith("/x\nmie")
    assert line.isascii()


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_is_short_whatever_a_client_sends(engine, monkeypatch, format):
    long = ("GET", f"/{'x' * 10_000}", {"headers": {"x-request-id": "y" * 10_000}})
    [line] = lines_of(engine, [long], monkeypatch, format=format)
    assert len(line) < 1000


def test_probes_and_scrapes_are_quiet_unless_they_fail(engine, monkeypatch):
    requests = [("GET", path, {}) for path in ("/health", "/ping", "/metrics", "/version")]
    assert len(lines_of(engine, requests, monkeypatch)) == 1
    assert len(lines_of(engine, requests, monkeypatch, keys=Keys.of([KEY]))) == 2


async def test_a_request_id_is_the_servers(engine):
    async with client_of(engine) as client:
        ids = set()
        for _ in range(2):
            response = await client.get("/version", headers={"x-request-id": "mine"})
            ids.add(response.headers["x-request-id"])
        assert len(ids) == 2
        assert "mine" not in ids


def record(message, *args, exc_info=None):
    return logging.LogRecord("mie.x", logging.ERROR, __file__, 1, message, args, exc_info)


def test_a_traceback_is_indented_and_escaped():
    try:
        raise ValueError("a\nmie: info: forged\x1b[2K")
    except ValueError:
        failed = record("a step failed: %s", "x\ny", exc_info=sys.exc_info())
    lines = TextFormat().format(failed).splitlines()
    assert lines[0] == "mie: error: a step failed: x"
    assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])
    entry = json.loads(JsonFormat().format(failed))
    assert entry["message"] == "a step failed: x\ny"
    assert "ValueError" in entry["traceback"]
