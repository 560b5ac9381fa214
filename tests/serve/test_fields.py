"""No field is silently ignored: it has an effect, is refused by name, or is reported."""

import json
import logging
from collections.abc import Iterator

import pytest
from live_server import live
from tables import yaml_table

from mie.serve import body as bodies
from mie.serve.body import parse
from mie.serve.config import ServeConfig
from mie.serve.fields import Unsupported
from mie.serve.openai.protocol import ChatCompletionRequest, CompletionRequest, OtherFields

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {
    COMPLETIONS: {"prompt": "The mill", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}
INSIDE = (*("echo", "add_special_tokens"), *("tools", "tool_choice", "include_reasoning"))
INSIDE = (*INSIDE, "reasoning_effort")
"""Fields of one route only."""
MARKS = {
    name: [mark for mark in field.metadata if isinstance(mark, Unsupported)]
    for name, field in OtherFields.model_fields.items()
}
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def is_refused(name: str, marks: list[Unsupported]) -> bool:
    """Whether both routes refuse a field with an unknown value."""
    return bool(marks) and name not in INSIDE and marks[0].hints is not None


@BOTH
@pytest.mark.parametrize("name", [n for n, marks in MARKS.items() if is_refused(n, marks)])
def test_an_unsupported_field_is_refused_by_name(server, path, name):
    error = server.refused(path, **BODY[path], **{name: "something else"})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not supported: ")


@BOTH
def test_an_unsupported_field_is_accepted_where_it_changes_nothing(server, path):
    marks = {name: mark for name, (mark,) in ((n, m) for n, m in MARKS.items() if m)}
    for neutral in (
        {name: mark.neutral[-1] if mark.neutral else None for name, mark in marks.items()},
        dict.fromkeys(marks),
    ):
        answer = server.post(path, **BODY[path], **neutral)
        assert answer.status_code == 200, answer.text
        assert "x-mie-ignored" not in answer.headers


def test_a_number_is_no_switch(server):
    """0 equals False in Python, but not in JSON."""
    for name, value in (("store", 0), ("best_of", True)):
        assert server.refused(COMPLETIONS, **BODY[COMPLETIONS], **{name: value})["param"] == name


@BOTH
def test_unknown_fields_are_named_in_a_header(server, path):
    for stream in (False, True):
        answer = server.post(path, **BODY[path], temprature=0, stream=stream, **{"a,b\n": 1})
        assert answer.status_code == 200
        assert answer.headers["x-mie-ignored"] == "temprature,'a_b\\n'"


def test_unknown_fields_are_logged_once_and_a_flood_of_them_is_refused(server, caplog):
    caplog.set_level(logging.WARNING, "mie.serve")
    for name in ("shimmer", "shimmer", "glitter"):
        assert server.post(COMPLETIONS, **BODY[COMPLETIONS], **{name: 1}).status_code == 200
    lines = [each.message for each in caplog.records if "ignored" in each.message]
    assert len(lines) == 2
    assert "shimmer" in lines[0]
    flood = {f"x{i}": i for i in range(1001)}
    message = server.refused(COMPLETIONS, **BODY[COMPLETIONS], **flood)["message"]
    assert message == f"the body has {1001 + len(BODY[COMPLETIONS])} fields; the limit is 1000"


def test_unknown_fields_are_refused_by_a_strict_server(server):
    with live(server.engine, ServeConfig(strict=True)) as url:
        body = {**BODY[COMPLETIONS], "temprature": 0}
        answer = server.client.post(f"{url}{COMPLETIONS}", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
        del body["temprature"]
        assert server.client.post(f"{url}{COMPLETIONS}", json=body).status_code == 200
        inside = {"messages": [{**MESSAGE, "tool": "saw"}], "max_tokens": 1}
        error = server.client.post(f"{url}{CHAT}", json=inside).json()["error"]
    assert (error["param"], error["code"]) == ("messages.0.tool", "unknown_parameter")


def test_the_model_is_demanded_by_strict_openai(server):
    with live(server.engine, ServeConfig(strict_openai=True)) as url:
        answer = server.client.post(f"{url}{COMPLETIONS}", json=BODY[COMPLETIONS])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"


def test_the_limit_of_logprobs_can_be_raised(server):
    with live(server.engine, ServeConfig(max_logprobs=-1)) as url:
        body = {**BODY[COMPLETIONS], "logprobs": -1}
        answer = server.client.post(f"{url}{COMPLETIONS}", json=body).json()
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) > 1000


@BOTH
def test_null_stands_for_the_default(server, path):
    cls = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
    nulls = {name: None for name in cls.model_fields if name not in ("prompt", "messages")}
    asked = {**BODY[path], "seed": 3}
    expected = server.ask(path, **asked)["choices"]
    assert server.ask(path, **{**nulls, **asked})["choices"] == expected


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_every_declared_field_is_read(server, monkeypatch, path, stream):
    """A field that no code reads would be silently ignored."""
    cls = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
    read = set()

    class Recorded(cls):  # type: ignore[valid-type]
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(bodies, "parse", lambda data, _, serving: parse(data, Recorded, serving))
    body = {**BODY[path], "stream": stream, "logprobs": 1 if path == COMPLETIONS else True}
    server.post(path, **body).raise_for_status()
    unread = cls.model_fields.keys() - OtherFields.model_fields.keys() - read
    assert unread <= (set() if stream else {"stream_options"})


def test_fields_inside_stream_options_are_judged(server):
    body = {**BODY[COMPLETIONS], "stream": True}
    answer = server.post(COMPLETIONS, **body, stream_options={"include_usge": True})
    assert answer.headers["x-mie-ignored"] == "stream_options.include_usge"
    error = server.refused(COMPLETIONS, **body, stream_options={"include_obfuscation": "much"})
    assert error["param"] == "stream_options.include_obfuscation"


def test_fields_of_the_other_route_are_refused(server):
    for name in ("echo", "add_special_tokens"):
        assert server.refused(CHAT, **BODY[CHAT], **{name: True})["param"] == name
    tool = {"type": "function", "function": {"name": "f"}}
    for name, value in (
        ("tools", [tool]),
        ("tool_choice", "required"),
        ("include_reasoning", False),
    ):
        error = server.refused(COMPLETIONS, **BODY[COMPLETIONS], **{name: value})
        assert error["message"].startswith(f"{name} is not supported: it belongs to /v1/chat")


MESSAGE = {"role": "user", "content": "hi"}
NESTED = yaml_table("nested")
FREE = ("schema", "parameters", "input_schema", "input", "any", "metadata", "arguments")
"""Objects whose keys are the client's own."""


def objects(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all objects in a body whose fields a schema declares."""
    if isinstance(value, dict) and not (value.keys() & {"any"}):
        yield place
        for name, each in value.items():
            if name not in FREE or isinstance(each, list):
                yield from objects(each, (*place, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from objects(each, (*place, index))


PLACES = [
    (name, place)
    for name, (path, body) in NESTED.items()
    for place in objects({**BODY.get(path, {}), **body})
]


@pytest.mark.parametrize(("name", "place"), PLACES, ids=str)
def test_an_unknown_field_is_named_at_every_depth(server, name, place):
    path, change = NESTED[name]
    body = json.loads(json.dumps({**BODY.get(path, {}), **change}))
    assert "x-mie-ignored" not in (answer := server.post(path, **body)).headers, answer.headers
    found = body
    for part in place:
        found = found[part]
    found["sparkle"] = 1
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mie-ignored"] == ".".join(map(str, [*place, "sparkle"]))


def test_an_unknown_field_of_a_message_still_reaches_the_template(server):
    template = "{% for m in messages %}{{ m.content }}{{ m.mood }}{% endfor %}"
    with live(server.engine, ServeConfig(chat_template=template)) as url:
        body = {"messages": [{**MESSAGE, "mood": "!"}]}
        answer = server.client.post(f"{url}/apply-template", json=body)
    assert answer.json()["prompt"] == "hi!"
    assert answer.headers["x-mie-ignored"] == "messages.0.mood"


def test_too_many_log_probabilities_are_refused_under_the_name_that_the_client_used(server):
    logprobs = ["message.output_text.logprobs"]
    for path, body, name in (
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (CHAT, {**BODY[CHAT], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/responses", {"input": "a", "include": logprobs, "top_logprobs": 21}, "top_logprobs"),
    ):
        error = server.refused(path, **body)
        assert error["param"] == name
        assert error["message"] == f"{name} asks for 21; the limit is 20 (--max-logprobs)"
