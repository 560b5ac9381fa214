"""The web page's routes: their files, their events, and their access rules."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
from contextlib import asynccontextmanager

import pytest
from edge_helpers import answer_of, asks, client_of, generate, load, server_of, without_steps
from event_stories import EMPTY, write_story
from page_cells import Page

from mie.events import EventLog, read_log
from mie.page.assets import RECORDED_RUNS, WEB, assets
from mie.page.cells import NodeText
from mie.page.recording import Recording
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.page import access as sessions_module
from mie.serve.page import processes
from mie.serve.page.access import MAX_SESSIONS, Sessions
from mie.serve.page.shell import CSP
from mie.serve.serving import Serving

KEY, OTHER = "sk-one", "sk-two"
NDJSON = {"content-type": "application/x-ndjson"}
FROM_PAGE = {"x-mie-page": "1"}


SMALL = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def engine():
    with_engine = load(**SMALL)
    yield with_engine
    with_engine.shutdown()


@asynccontextmanager
async def watched():
    """A server with a new engine, its client, and the live stream after its first key."""
    async with (
        server_of(load(**SMALL)) as running,
        running.client.stream("GET", "/mie/events") as response,
    ):
        stream = Stream(response)
        await stream.read_until(lambda: stream.last["record"] == "key")
        yield running, stream


class Stream:
    """The live stream, applied to a page."""

    def __init__(self, response):
        self.page = Page()
        self.records = []
        self.ids = []
        self._lines = response.aiter_lines()

    async def read_until(self, is_so):
        """Read until a condition holds after some record."""
        async for line in self._lines:
            if line.startswith("id: "):
                self.ids.append(line[4:])
            elif line.startswith("data: "):
                self.records.append(json.loads(line[6:]))
                self.page.take(self.records[-1])
                if is_so():
                    return
        raise AssertionError("the stream has ended")

    @property
    def last(self):
        return self.records[-1]

    def events(self, kind):
        """All events of a kind so far."""
        steps = [step for record in self.records for step in record.get("steps", ())]
        now = [record for record in self.records if record["record"] == "now"]
        return [event for each in [*steps, *now] for event in each["events"] if event[0] == kind]


# The shell.


def test_the_page_and_its_files_are_sent_with_a_strict_policy(engine):
    index = answer_of(engine, "/")
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.headers["content-security-policy"] == CSP
    assert "unsafe" not in CSP
    assert "default-src 'none'" in CSP

    async def ask():
        async with client_of(engine) as client:
            return {name: await client.get(f"/mie/page/{name}") for name in assets()}

    answers = asks(ask())
    for name, asset in assets().items():
        assert (answers[name].status_code, answers[name].content) == (200, asset.content)
        assert answers[name].headers["content-type"] == asset.media_type
        assert answers[name].headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon\w+=|style=", index.text)


def test_an_unchanged_file_is_not_sent_again(engine):
    tag = answer_of(engine, "/").headers["etag"]
    assert answer_of(engine, "/", headers={"if-none-match": tag}).status_code == 304
    assert answer_of(engine, "/", headers={"if-none-match": '"other"'}).status_code == 200


def test_files_are_compressed_for_those_who_can_read_it(engine):
    plain = answer_of(engine, "/", headers={"accept-encoding": "identity"})
    packed = answer_of(engine, "/", headers={"accept-encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content)
    assert packed.text == plain.text


@pytest.mark.parametrize(
    "path", ["nothing.js", "../assets.py", "%2e%2e/assets.py", "..%2fassets.py", "", "/etc/passwd"]
)
def test_no_file_is_sent_from_elsewhere(engine, path):
    assert (WEB / "../assets.py").exists()
    answer = answer_of(engine, f"/mie/page/{path}")
    assert answer.status_code == 404
    assert "etag" not in answer.headers


def test_the_page_is_found_below_the_path_of_a_proxy(engine):
    config = ServeConfig(root_path="/llm")
    for path in ("/llm/", "/llm/mie/config", "/", "/mie/config"):
        assert answer_of(engine, path, config).status_code == 200


def test_the_page_can_be_switched_off(engine):
    for path in ("/", "/mie/config", "/mie/events", "/mie/page/index.html"):
        assert answer_of(engine, path, ServeConfig(page=False)).status_code == 404


def test_the_config_says_what_the_page_needs_to_know(engine):
    config = answer_of(engine, "/mie/config", headers={"host": "localhost:8000"}).json()
    assert config["limits"]["num_blocks"] == 64
    assert config["limits"]["max_num_seqs"] == 2
    assert [run["name"] for run in config["runs"]] == ["shared-prompt", "small-pool", "guesses"]
    assert (config["has_keys"], config["client"]) == (False, None)
    assert config["may_read_text"]
    assert config["has_chat"]
    assert config["has_structured"]


def test_the_config_says_what_is_lacking(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(Serving, "has_chat_template", False)
    config = answer_of(engine, "/mie/config").json()
    assert not config["has_structured"]
    assert not config["has_chat"]


@pytest.mark.parametrize(
    "path", ["state?step=0", "history?until=0", "text?blocks=0", "why?seq=0.0"]
)
def test_a_question_to_another_server_is_refused(engine, path):
    answer = answer_of(engine, f"/mie/{path}&server=gone", headers={"host": "localhost:8000"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "other_server"


@pytest.mark.parametrize("run", RECORDED_RUNS, ids=lambda run: run.name)
def test_a_recorded_run_is_sent_as_records(engine, run):
    answer = answer_of(engine, f"/mie/page/runs/{run.name}.page.jsonl")
    assert answer.content == gzip.decompress(run.compressed())
    assert answer_of(engine, "/mie/page/runs/other.page.jsonl").status_code == 404


# The live stream.


async def test_the_stream_shows_the_states_of_the_replay():
    async with watched() as (running, stream):
        client, start = running.client, stream.page.step
        answer = await generate(client, n=2)
        again = await generate(client, prompt="Once upon a time, there was a small boat.")
        once_more = await generate(client, prompt="Once upon a time, there was a small boat.")
        await stream.read_until(
            lambda: len(stream.events("finish")) == 4 and stream.last["record"] == "truth"
        )
        follow_up = Page()
        follow_up.take(next(r for r in stream.records if r["record"] == "key"))
        for record in stream.records:
            if record["record"] != "key":
                follow_up.take(record)
            if record["record"] == "steps":
                exact = await client.get(f"/mie/state?step={follow_up.step}")
                expected = Page()
                expected.take(exact.json())
                assert follow_up.cells() == expected.cells()
        past = await client.get(f"/mie/history?until={follow_up.step}")
        now = await client.get("/mie/state")
        start, stream, answers, past, now = start, stream, [answer, again, once_more], past, now
    # No cell has a request that began and ended within a merged record, but an event has.
    assert {answer["id"] for answer in answers} <= {event[1] for event in stream.events("add")}
    assert stream.events("fork")
    assert stream.events("copy")[0][4] == "fork"
    hit = stream.events("hit")[-1]
    cached = answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit[3] + hit[4] == cached > 0
    # The page, the server and its metrics agree at the end.
    truth, key = stream.last, next(r for r in stream.records if r["record"] == "key")
    assert truth["server"] == truth["metrics"]
    kinds = [kind for kind, _, _ in stream.page.blocks.values()]
    assert truth["server"]["num_blocks_used"] == kinds.count(1) == 0
    assert truth["server"]["num_blocks_cached"] == kinds.count(2) > 0
    assert truth["server"]["num_copies"] == key["totals"]["num_copies"] + len(stream.events("copy"))
    hits = sum(event[3] + event[4] for event in stream.events("hit"))
    assert truth["server"]["num_hit_tokens"] == key["totals"]["num_hit_tokens"] + hits
    # The past that a newly opened page gets ends in the same state.
    page = Page()
    for line in past.text.splitlines():
        page.take(json.loads(line))
    assert page.step == stream.page.step > start
    assert page.cells() == stream.page.cells()
    page.take(now.json())
    assert page.cells() == stream.page.cells()


async def test_an_abort_frees_its_cells_without_another_step():
    async with watched() as (running, stream):
        with without_steps(running.edge.engine):
            events = await running.stream(max_tokens=400)
            await anext(events)
            await events.aclose()
            await stream.read_until(lambda: any(e[2] == "abort" for e in stream.events("finish")))
    assert not stream.page.seqs
    assert all(kind != 1 for kind, _, _ in stream.page.blocks.values())


async def test_a_page_that_comes_back_gets_what_it_missed():
    async with watched() as (running, first):
        client = running.client
        await generate(client)
        headers = {"last-event-id": first.ids[-1]}
        async with client.stream("GET", "/mie/events", headers=headers) as response:
            second = Stream(response)
            second.page = first.page
            await second.read_until(lambda: second.events("finish"))
        strange = {"last-event-id": "other.17"}
        async with client.stream("GET", "/mie/events", headers=strange) as response:
            third = Stream(response)
            await third.read_until(lambda: third.last["record"] == "key")
        _, second, third = first, second, third
    assert second.records[0]["record"] == "head"
    assert "key" not in [record["record"] for record in second.records]
    assert second.page.cells() == third.page.cells()


def test_the_stream_ends_with_the_engine():
    async def watch():
        async with watched() as (running, stream):
            await running.edge.end_engine()
            await stream.read_until(lambda: stream.last["record"] == "end")
        return stream

    assert asks(watch()).last == {"record": "end", "reason": "the engine was shut down"}


def test_without_an_event_log_the_page_says_what_to_change():
    engine = load(event_log_steps=0)
    try:
        answer = answer_of(engine, "/mie/events")
        assert answer.status_code == 409
        assert "--event-log-steps" in answer.json()["error"]["message"]
        assert answer_of(engine, "/mie/state?step=0").status_code == 404
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "path", ["state?step=x", "state?step=-1", "history", "text?blocks=", "text?blocks=1,x", "why"]
)
def test_a_malformed_question_is_refused(engine, path):
    answer = answer_of(engine, f"/mie/{path}", headers={"host": "localhost"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_step_that_the_log_does_not_hold_is_not_found(engine):
    assert answer_of(engine, "/mie/state?step=99999").status_code == 404
    assert answer_of(engine, "/mie/history?until=99999").status_code == 200


# Keys.


async def test_a_login_gives_a_cookie_that_stands_for_the_key(engine):
    async with client_of(engine, ServeConfig(keys=Keys.of([KEY]))) as client:
        assert (await client.get("/mie/config")).status_code == 401
        wrong = await client.post("/mie/login", json={"key": OTHER})
        assert wrong.status_code == 401
        assert not client.cookies
        login = await client.post("/mie/login", json={"key": KEY})
        assert login.status_code == 204
        cookie = login.headers["set-cookie"]
        assert KEY not in cookie
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        config = await client.get("/mie/config")
        assert (config.json()["client"], config.json()["may_read_text"]) == ("key-1", True)
        body = {"prompt": "Once", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 401
        ok = await client.post("/v1/completions", json=body, headers=FROM_PAGE)
        assert ok.status_code == 200
        held = f"mie_session={client.cookies['mie_session']}"
        logout = await client.post("/mie/logout")
        assert "Max-Age=0" in logout.headers["set-cookie"]
        again = await client.get("/mie/config", headers={"cookie": held})
        assert again.status_code == 401


async def test_a_login_without_a_key_cannot_send_much(engine):
    async with client_of(engine, ServeConfig(keys=Keys.of([KEY]))) as client:
        for route in ("/mie/login", "/mie/logout"):
            answer = await client.post(route, json={"key": "x" * 20_000})
            assert answer.status_code == 413
        for body in ("[]", "{", '{"key": 7}', "{}"):
            headers = {"content-type": "application/json"}
            answer = await client.post("/mie/login", content=body, headers=headers)
            assert answer.status_code in (400, 401)


def test_a_cookie_is_for_https_where_the_server_speaks_it(engine):
    scope = {"scheme": "https"}
    assert "; Secure" in sessions_module.cookie_for("x", scope, "/llm")
    assert "; Path=/llm;" in sessions_module.cookie_for("x", scope, "/llm")


async def test_with_several_keys_none_sees_what_the_others_send(engine):
    async with client_of(engine, ServeConfig(keys=Keys.of([KEY, OTHER]))) as client:
        login = await client.post("/mie/login", json={"key": KEY})
        assert (login.status_code, login.json()["error"]["code"]) == (403, "page_forbidden")
        paths = ["config", "events", "history?until=0", "state", "text?blocks=1", "why?seq=1.0"]
        for path in paths:
            headers = {"authorization": f"Bearer {KEY}"}
            answer = await client.get(f"/mie/{path}", headers=headers)
            assert answer.status_code == 403
        answer = await client.post("/mie/trace", content=b"", headers={**headers, **NDJSON})
        assert answer.status_code == 403


async def test_the_admin_key_sees_the_page_and_no_other_does(engine):
    config = ServeConfig(keys=Keys.of([KEY]), admin_keys=Keys.of_one("admin", OTHER))
    async with client_of(engine, config) as client:
        login = await client.post("/mie/login", json={"key": KEY})
        assert login.status_code == 403
        assert (await client.get("/mie/config")).status_code == 401
        login = await client.post("/mie/login", json={"key": OTHER})
        assert login.status_code == 204
        assert (await client.get("/mie/config")).json()["client"] == "admin"
        assert (await client.get("/metrics")).status_code == 200
        body = {"prompt": "Once", "max_tokens": 1}
        ok = await client.post("/v1/completions", json=body, headers=FROM_PAGE)
        assert ok.status_code == 200


def test_a_session_ends_after_some_hours_and_the_oldest_makes_room():
    now = 0.0
    sessions = Sessions(clock=lambda: now)

    def client_of(value, method="GET"):
        cookie = f"a=b; {sessions_module.COOKIE}={value}".encode()
        return sessions.client({"type": "http", "method": method, "headers": [(b"cookie", cookie)]})

    first = sessions.open("one")
    assert (client_of(first), client_of(first, "POST"), client_of("x")) == ("one", None, None)
    now = sessions_module.SESSION_SECONDS + 1.0
    assert client_of(first) is None
    values = [sessions.open(str(number)) for number in range(MAX_SESSIONS + 1)]
    assert client_of(values[0]) is None
    assert client_of(values[1]) == "1"


def test_without_keys_only_this_machine_reads_text(engine):
    open_to_all = ServeConfig(allowed_hosts=["*"], allowed_origins=["*"])
    for headers in (
        {"host": "proxy.example"},
        {"host": "127.0.0.1.evil.example:8000"},
        {"host": "192.0.2.1"},
        {"host": "localhost", "x-forwarded-for": "10.0.0.1"},
        {"host": "localhost", "origin": "http://evil.example"},
    ):
        answer = answer_of(engine, "/mie/text?blocks=0", open_to_all, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "text_forbidden")
        config = answer_of(engine, "/mie/config", open_to_all, headers=headers).json()
        assert not config["may_read_text"]


async def test_a_sequence_that_waits_is_told_what_it_waits_for():
    async with server_of(load(**SMALL)) as running:
        client, engine = running.client, running.edge.engine
        body = {"prompt": "Once", "max_tokens": 30, "ignore_eos": True}
        with without_steps(engine):
            both = await running.stream(**body, n=2)  # takes both seats
            await anext(both)
            third = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while engine.pulse.num_waiting < 1:
                await asyncio.sleep(0.001)
            state = (await client.get("/mie/state")).json()
            [name] = [name for name, seq in state["seqs"].items() if seq["row"] is None]
            found = (await client.get(f"/mie/why?seq={name}")).json()
        assert [event async for event in both][-1] == "[DONE]"
        assert (await third).status_code == 200
        late = (await client.get(f"/mie/why?seq={name}")).json()
    assert (found["because"], found["seats"]) == ("seats", 2)
    assert found["sentence"] == "All 2 seats are taken."
    assert late["because"] is None
    assert late["sentence"].startswith("It does not wait")


async def test_text_of_blocks_is_that_of_the_prompt(engine):
    prompt = "The otter and the mill. " * 4
    async with client_of(engine) as client:
        client.headers["host"] = "localhost:8000"
        await generate(client, prompt=prompt)
        state = (await client.get("/mie/state")).json()
        blocks = ",".join(state["tree"])
        found = (await client.get(f"/mie/text?blocks={blocks},63")).json()["blocks"]
        step = state["step"]
        then = (await client.get(f"/mie/text?blocks={blocks}&step={step}")).json()["blocks"]
        tree, found, then = state["tree"], found, then
    assert found.pop("63") is None
    assert found == then
    assert not any("tokens" in node or "text" in node for node in tree.values())
    texts = [cell["text"] for cell in found.values()]
    assert any("The otter and the mill." in text for text in texts)


# Traces that are sent to the server.


def post_trace(engine, content, config=None):
    return answer_of(engine, "/mie/trace", config, "POST", content=content, headers=NDJSON)


def test_a_trace_comes_back_as_records(engine, tmp_path):
    path = write_story(tmp_path / "story.jsonl")
    answer = post_trace(engine, path.read_bytes())
    assert answer.status_code == 200, answer.text
    recording = Recording(read_log(path), NodeText())
    assert answer.text.splitlines() == list(recording.lines("the log"))


def huge_pool(tmp_path):
    with (tmp_path / "log").open("w") as file:
        EventLog(0, file).start(lambda: {**EMPTY, "num_blocks": 1 << 40})
    return (tmp_path / "log").read_bytes()


HOSTILE = {
    "empty": (b"", "it is empty"),
    "deep": (b"[" * 200_000 + b"\n", "not JSON"),
    "page records": (b'{"record":"head","version":1}\n', "not an event"),
    "number": (b'{"step":' + b"9" * 5000 + b',"event":"snapshot"}\n', "line 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_trace_is_refused(engine, name):
    content, expected = HOSTILE[name]
    answer = post_trace(engine, content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_trace"
    assert expected in error["message"]
    assert "/dev/stdin" not in error["message"]
    assert "Traceback" not in error["message"]


def test_a_trace_that_contradicts_itself_is_refused(engine, tmp_path):
    path = write_story(tmp_path / "story.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    broken = "".join(line for line in lines if '"alloc"' not in line)
    answer = post_trace(engine, broken.encode())
    assert answer.status_code == 400
    assert "after step 0" in answer.json()["error"]["message"]
    answer = post_trace(engine, huge_pool(tmp_path))
    assert "a page shows at most" in answer.json()["error"]["message"]


def test_a_trace_may_not_take_more_than_its_share(engine, tmp_path, monkeypatch):
    path = write_story(tmp_path / "story.jsonl")
    monkeypatch.setattr(processes, "OUTPUT_BYTES", 1000)
    answer = post_trace(engine, path.read_bytes())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "trace_too_large")
    monkeypatch.undo()
    limited = ServeConfig(max_request_bytes=100)
    assert post_trace(engine, path.read_bytes(), limited).status_code == 413


def test_one_trace_is_opened_at_a_time(engine, tmp_path):
    path = write_story(tmp_path / "story.jsonl")

    async def ask():
        async with client_of(engine) as client:
            posts = [
                client.post("/mie/trace", content=path.read_bytes(), headers=NDJSON)
                for _ in range(3)
            ]
            return sorted([answer.status_code for answer in await asyncio.gather(*posts)])

    assert asks(ask()) == [200, 429, 429]
