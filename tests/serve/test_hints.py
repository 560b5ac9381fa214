"""A hint that cannot change a token is accepted and named, and a broken demand is refused.

The generator makes requests of every field of the table, with values of each kind, on every route
that takes the field. Whole and streamed requests take turns.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from edge_helpers import answer_of
from live_server import live
from tables import yaml_table

from mie import AsyncLLM
from mie.serve.config import ServeConfig
from mie.serve.fields import FIELDS, mark_of

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

ROOT = Path(__file__).parents[2]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA = ("/api/chat", "/api/generate")
USER: list[Any] = [{"role": "user", "content": "Tell me a story about an otter."}]
REASONED = [{"type": "reasoning", "summary": []}, *USER]
TOOL = {"name": "weather", "input_schema": {}}
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once", "max_tokens": 3, "temperature": 0},
    CHAT: {"messages": USER, "max_tokens": 3, "temperature": 0},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3, "temperature": 0},
    MESSAGES: {"messages": USER, "max_tokens": 3, "temperature": 0},
    COUNT: {"messages": USER},
    "/api/chat": {"messages": USER, "options": {"num_predict": 3, "temperature": 0}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 3, "temperature": 0}},
}
"""The least that a request for a short greedy answer needs."""
PLACES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str | int, ...]]] = {
    "openai": ((COMPLETIONS, CHAT), {}, ()),
    "stream_options": ((COMPLETIONS, CHAT), {"stream_options": {}}, ("stream_options",)),
    "responses": ((RESPONSES,), {}, ()),
    "responses.reasoning": ((RESPONSES,), {"reasoning": {}}, ("reasoning",)),
    "responses.text": ((RESPONSES,), {"text": {}}, ("text",)),
    "responses.input.reasoning": ((RESPONSES,), {"input": REASONED}, ("input", 0)),
    "responses.stream_options": ((RESPONSES,), {"stream_options": {}}, ("stream_options",)),
    "messages": ((MESSAGES, COUNT), {}, ()),
    "messages.thinking": ((MESSAGES, COUNT), {"thinking": {"type": "adaptive"}}, ("thinking",)),
    "messages.output_config": ((MESSAGES, COUNT), {"output_config": {}}, ("output_config",)),
    "messages.tools": ((MESSAGES, COUNT), {"tools": [TOOL]}, ("tools", 0)),
    "ollama": (OLLAMA, {}, ()),
    "ollama_options": (OLLAMA, {}, ("options",)),
}
"""The routes that take the fields of each part of the table, and where the fields stand."""
ALONE = {
    CHAT: {
        *("tools", "tool_choice", "reasoning_effort", "include_reasoning", "parallel_tool_calls"),
        "prediction",
    },
    COMPLETIONS: {"echo", "add_special_tokens"},
}
"""Fields of the table that are declared on a route."""
SAMPLES = ("x", 7, True, 0.5, [1], {"a": 1}, "fast", {"type": "none"})
"""Values of every type."""


PARTS = [(part, route) for part, (routes, _, _) in PLACES.items() for route in routes]


def kinds_of(row: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return values of a row of the table: neutral ones, hints and a demand."""
    if row is None:
        return [*SAMPLES], [], []
    mark = mark_of(row)
    neutral = [None, *mark.neutral]
    others = [x for x in SAMPLES if json.dumps(x) not in map(json.dumps, neutral)]
    if mark.hints is None:
        return neutral, others, []
    return neutral, [*mark.hints], [x for x in others if x not in mark.hints]


def request(part: str, route: str, fields: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """A request with fields at the place of a part of the table."""
    _, more, place = PLACES[part]
    body = json.loads(json.dumps({**LEAST[route], **more, "stream": stream}))
    if "stream_options" in more and not stream:
        body["stream"] = True
    if route == COUNT:
        del body["stream"]
    found = body
    for key in place:
        found = found[key]
    found |= fields
    return body


def ignored(answer: Any) -> list[str]:
    """The paths in the header, without the paths of the objects around the field."""
    assert answer.status_code == 200, answer.text
    names = answer.headers.get("x-mie-ignored", "")
    return [name for name in names.split(",") if name and name not in ("thinking",)]


def text_of(answer: Any) -> str:
    """The body without ids and times, because they differ."""
    found = answer.json()
    for key in ("choices", "output", "content", "message", "response", "input_tokens"):
        if key in found:
            return json.dumps(found[key]).replace(found.get("id", "\0").partition("_")[2], "")
    raise AssertionError(found)


def test_the_generator_covers_the_table():
    assert FIELDS.keys() == PLACES.keys()


@pytest.mark.parametrize(("part", "route"), PARTS)
def test_every_value_of_every_field_is_neutral_or_named_or_refused(
    server: Any, part: str, route: str
):
    place = [*map(str, PLACES[part][2])]
    rows = {n: kinds_of(r) for n, r in FIELDS[part].items() if n not in ALONE.get(route, ())}
    plain = None
    if "stream_options" not in part:
        plain = text_of(server.post(route, **request(part, route, {}, stream=False)))
    for kind in (0, 1):
        most = max(len(values[kind]) for values in rows.values())
        for turn in range(max(2, most) if most else 0):
            fields = {n: v[kind][turn % len(v[kind])] for n, v in rows.items() if v[kind]}
            names = [".".join([*place, name]) for name in fields] if kind else []
            body = request(part, route, fields, stream=turn % 2 == 1)
            answer = server.post(route, **body)
            assert sorted(ignored(answer)) == sorted(names)
            if answer.headers["content-type"] == "application/json":
                assert text_of(answer) == plain, "a token has changed"
    for turn, (name, (_, _, demands)) in enumerate(rows.items()):
        for demand in demands:
            body = request(part, route, {name: demand}, stream=turn % 2 == 1)
            answer = server.post(route, **body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert message.startswith(f"{'.'.join([*place, name])} is not supported: "), message


HINTS = yaml_table("hints")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("route", "change", "names"), HINTS, ids=str)
def test_a_hint_that_depends_on_the_server_is_named(
    server: Any, route: str, change: dict[str, Any], names: list[str], stream: bool
):
    body = {**LEAST[route], "stop": ["."], **change, "stream": stream}
    if route in (RESPONSES, MESSAGES):
        del body["stop"]
    if route in OLLAMA:
        del body["stop"]
        body["options"] = {**LEAST[route]["options"], "stop": ["."], **change.get("options", {})}
    answer = server.post(route, **body)
    assert answer.status_code == 200, answer.text
    found = answer.headers.get("x-mie-ignored", "")
    assert [name for name in found.split(",") if name] == names


def test_a_strict_server_refuses_hints(server: Any):
    with live(server.engine, ServeConfig(strict=True)) as url:
        for change, name in (
            ({"verbosity": "high"}, "verbosity"),
            ({"max_tokens": 10**5}, "max_tokens"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
        ):
            answer = server.client.post(f"{url}{CHAT}", json={**LEAST[CHAT], **change})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name), error
            assert (
                error["message"]
                == f"fields without an effect: {name} (the server runs with --strict)"
            )


REASONING = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{{ enable_thinking }} {{ reasoning_effort }}"""


@contextmanager
def prompts_of(engine: Any) -> Iterator[list[str]]:
    """Yield the list of the prompts that the engine gets meanwhile."""
    prompts: list[str] = []
    prepare = engine.prepare

    async def recorded(prompt: Any, *args: Any, **options: Any) -> Any:
        prompts.append(prompt["prompt"])
        return await prepare(prompt, *args, **options)

    engine.prepare = recorded
    try:
        yield prompts
    finally:
        del engine.prepare


def test_reasoning_reaches_a_template_that_reads_it(server: Any):
    def last_line(url: str, route: str, **body: Any) -> str:
        answer = server.client.post(f"{url}{route}", json={**LEAST[route], **body})
        assert answer.status_code == 200, answer.text
        assert "x-mie-ignored" not in answer.headers
        lines = prompts[-1].splitlines()
        return lines[-1]

    config = ServeConfig(chat_template=REASONING)
    with prompts_of(server.engine) as prompts, live(server.engine, config) as url:
        assert last_line(url, CHAT, reasoning_effort="high") == " high"
        assert last_line(url, CHAT, reasoning_effort="none") == "False "
        own = {"reasoning_effort": "low"}
        assert last_line(url, CHAT, reasoning_effort="high", chat_template_kwargs=own) == " low"
        assert last_line(url, RESPONSES, reasoning={"effort": "minimal"}) == " minimal"
        assert last_line(url, MESSAGES, thinking={"type": "disabled"}) == "False "
        both = {"thinking": {"type": "enabled"}, "output_config": {"effort": "max"}}
        assert last_line(url, MESSAGES, **both) == "True max"


def test_a_developer_is_the_system_where_the_template_names_no_developer(server: Any):
    body = {"messages": [{"role": "developer", "content": "Be brief."}, *USER]}
    for template, role in ((REASONING, "system"), (REASONING + "{# developer #}", "developer")):
        with live(server.engine, ServeConfig(chat_template=template)) as url:
            answer = server.client.post(f"{url}/apply-template", json=body)
        assert answer.json()["prompt"].startswith(f"{role}: Be brief.\n")


def test_instructions_between_turns_are_read_where_a_template_takes_one_system_message(server: Any):
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('the system message comes first') }}{% endif %}"
        "{{ m.role }}:{{ m.content }}|{% endfor %}"
    )
    system = {"role": "system", "content": "Two."}
    user = {"role": "user", "content": "Hi"}
    bodies = {
        MESSAGES: {"system": "One.", "messages": [system, user, system]},
        RESPONSES: {"instructions": "One.", "input": [{**system, "role": "developer"}, user]},
    }
    config = ServeConfig(chat_template=strict)
    with prompts_of(server.engine) as prompts, live(server.engine, config) as url:
        for route, body in bodies.items():
            answer = server.client.post(f"{url}{route}", json={**LEAST[route], **body})
            assert answer.status_code == 200, answer.text
    assert prompts == ["system:One.\nTwo.|user:Hi\nTwo.|", "system:One.\nTwo.|user:Hi|"]


def test_repeat_last_n_turns_penalties_off_and_is_refused_where_it_would_change_a_token(
    server: Any,
):
    plain = {"num_predict": 24, "temperature": 0}
    penalised = {**plain, "repeat_penalty": 9.0, "frequency_penalty": 2.0}

    def said(**options: Any) -> str:
        answer = server.ask("/api/chat", messages=USER, stream=False, options=options)
        return answer["message"]["content"]

    assert said(**penalised) != said(**plain)
    assert said(**penalised, repeat_last_n=0) == said(**plain)
    assert said(**penalised, repeat_last_n=-1) == said(**penalised)
    for penalty in ({"repeat_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": 0.1}):
        options = {**plain, **penalty, "repeat_last_n": 64}
        answer = server.post("/api/chat", messages=USER, options=options)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("options.repeat_last_n is not supported: ")


def test_a_limit_above_the_context_ends_where_the_context_ends(server: Any):
    def length(**options: Any) -> tuple[int, int]:
        options |= {"temperature": 0, "stop": []}
        answer = server.ask("/api/chat", messages=USER, stream=False, options=options)
        return answer["prompt_eval_count"], answer["eval_count"]

    num_prompt, num_new = length(num_ctx=64)
    assert num_prompt + num_new == 64
    assert length(num_ctx=10**6, num_predict=5) == (num_prompt, 5)
    too_long = {"role": "user", "content": "otter " * 2000}
    answer = server.post("/api/chat", messages=[too_long], truncate=True, stream=False)
    assert answer.status_code == 400
    assert "the context holds" in answer.json()["error"]


def test_many_tools_with_long_names_are_offered(server: Any):
    names = [f"{number:04}" + "n" * 124 for number in range(130)]
    tools = [{"name": name, "input_schema": {}} for name in names]
    answer = server.post(COUNT, messages=USER, tools=tools)
    assert answer.status_code == 200, answer.text
    named = {"type": "tool", "name": names[-1]}
    body = {"messages": USER, "tools": tools, "tool_choice": named}
    assert server.post(COUNT, **body).status_code == 200
    for wrong in ([{"name": "n" * 129, "input_schema": {}}], tools * 8):
        assert server.post(COUNT, messages=USER, tools=wrong).status_code == 400


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/chat", {}, 200),
        ("/api/generate", {}, 200),
        ("/api/show", {}, 200),
        ("/api/chat", {"origin": "http://localhost"}, 415),
        ("/api/chat", {"sec-fetch-site": "same-origin"}, 415),
        ("/api/chat", {"sec-fetch-mode": "no-cors"}, 415),
        ("/api/chat", {"content-type": "text/plain"}, 415),
        ("/v1/chat/completions", {}, 415),
    ],
)
def test_a_program_may_leave_the_content_type_out_on_ollamas_routes(
    engine: AsyncLLM, path: str, headers: dict[str, str], status: int
):
    body = {"messages": USER, "prompt": "Hi", "options": {"num_predict": 1}, "stream": False}
    content = json.dumps(body).encode()
    answer = answer_of(engine, path, method="POST", content=content, headers=headers)
    assert answer.status_code == status, answer.text


def test_the_page_has_the_table():
    script = runpy.run_path(str(ROOT / "scripts" / "doc_tables.py"))
    text = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")
    assert script["with_fields"](text) == text, "run scripts/doc_tables.py"
