"""Web pages of other sites, which no route answers, and clients that try wrong keys."""

import asyncio
import gzip
import logging
import re

import httpx2
import pytest
from edge_helpers import answer_of, asks, client_of
from starlette.routing import Route
from tables import yaml_table

from mie.errors import ConfigError
from mie.serve.auth import MAX_CLIENTS, NUM_FREE, SECONDS, WrongKeys
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

KEYS = Keys.of(["sk-one"])
JSON = {"content-type": "application/json"}
EVIL = {"origin": "https://evil.example"}
BODY = b'{"prompt": "Once", "max_tokens": 1}'
TABLES = yaml_table("cross_site")


def config_of(options):
    """Return a configuration of the tables."""
    return ServeConfig(
        **{name: KEYS if value == "KEYS" else value for name, value in options.items()}
    )


def message_of(body):
    """The message of an error in any dialect."""
    return body["error"] if isinstance(body["error"], str) else body["error"]["message"]


def status(engine, config=None, path="/version", method="GET", **options):
    return answer_of(engine, path, config, method, **options).status_code


def answers_of_all_routes(engine, config, headers):
    async def ask():
        async with client_of(engine, config) as client:
            found = {}
            for route in client.app.routes:
                assert isinstance(route, Route)
                path = re.sub(r"{\w+(:path)?}", "x", route.path)
                for method in route.methods:
                    found[method, path] = await client.request(
                        method, path, headers={**JSON, **headers}
                    )
            for path in ("/unknown", "/v1", "/health/"):
                found["GET", path] = await client.get(path, headers=headers)
            return found

    return asks(ask())


# Names.


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example:8000"}, "host_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, "origin_not_allowed"),
    ],
)
def test_no_route_of_a_server_without_keys_answers_another_site(engine, headers, code):
    found = answers_of_all_routes(engine, ServeConfig(), headers)
    assert len(found) > 30
    for (method, path), answer in found.items():
        assert answer.status_code == 403, (method, path)
        if method != "HEAD":
            body = answer.json()
            if path.startswith("/v1/messages"):
                assert body["error"]["type"] == "permission_error"
                assert body["type"] == "error"
            elif not path.startswith("/api/"):
                assert body["error"]["code"] == code
            assert "--allowed-" in (message := message_of(body))
            assert "--api-key" in message


@pytest.mark.parametrize(("host", "options", "is_known"), TABLES["hosts"])
def test_a_server_answers_to_addresses_and_to_the_names_that_it_knows(
    engine, host, options, is_known
):
    assert status(engine, config_of(options), headers={"host": host}) == (200 if is_known else 403)


@pytest.mark.parametrize(
    ("version", "hosts", "expected"),
    [
        ("1.1", ["localhost", "evil.example"], 403),
        ("1.1", ["localhost", "localhost"], 400),
        ("1.0", ["localhost", "localhost"], 400),
        ("1.1", [], 400),
        ("1.1", ["localhost"], 200),
        ("1.0", [], 200),  # a load balancer, and no browser
    ],
)
def test_a_request_has_one_host_which_only_http_1_0_may_leave_out(engine, version, hosts, expected):
    async def ask():
        async with client_of(engine) as client:

            async def app(scope, receive, send):
                await client.app({**scope, "http_version": version}, receive, send)

            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as other:
                request = other.build_request("GET", "http://localhost/health")
                del request.headers["host"]
                headers = [*request.headers.raw, *((b"host", each.encode()) for each in hosts)]
                request.headers = httpx2.Headers(headers)
                return await other.send(request)

    answer = asks(ask())
    assert answer.status_code == expected
    if expected == 400:
        assert answer.json()["error"]["code"] == "invalid_host"
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("gzip", 415), ("GZIP", 415), ("gzip, identity", 415), ("br", 415), ("identity", 200)],
)
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(engine, encoding, expected):
    data = b'{"prompt": "Hello"}'
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = answer_of(
        engine,
        "/tokenize",
        method="POST",
        content=gzip.compress(data) if "gzip" in encoding.lower() else data,
        headers=headers,
    )
    assert answer.status_code == expected
    if expected == 415:
        assert f"got content-encoding {encoding}" in answer.json()["error"]["message"]


def test_what_is_refused_is_one_line_of_the_log(engine, caplog):
    caplog.set_level(logging.INFO, "mie")
    assert status(engine, path="/health", headers={"host": "evil.example\x7f"}) == 403
    assert status(engine, path="/health", headers=EVIL) == 403
    [of_host, of_origin] = [each.facts for each in caplog.records if hasattr(each, "facts")]
    assert of_host["refused"] == "to the name 'evil.example\\x7f'"
    assert of_origin["refused"] == "a page of https://evil.example"
    assert len(caplog.records) == 2


# Origins.


@pytest.mark.parametrize(("headers", "options", "is_taken"), TABLES["origins"])
def test_a_page_of_this_server_or_of_an_allowed_site_is_answered(
    engine, headers, options, is_taken
):
    assert (status(engine, config_of(options), headers=headers) == 200) == is_taken


@pytest.mark.parametrize(("options", "message"), TABLES["lists"])
def test_a_list_that_would_match_nothing_is_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ServeConfig(**options)


# Content types.


REFUSED_KINDS = (
    *("text/plain", "Text/Plain; charset=utf-8", "application/x-www-form-urlencoded"),
    *("multipart/form-data; boundary=x", "application/csp-report", "application/reports+json"),
    *("application/x-ndjson", "", None),
)


@pytest.mark.parametrize("options", [{}, {"keys": KEYS}], ids=["keyless", "keys"])
async def test_a_body_that_is_not_json_is_refused(engine, options):
    async with client_of(engine, ServeConfig(**options)) as client:
        for path in ("/v1/completions", "/reset_prefix_cache", "/tokenize"):
            for kind in (*REFUSED_KINDS, "application/json", "Application/JSON; charset=utf-8"):
                headers = {"authorization": "Bearer sk-one"}
                headers |= {} if kind is None else {"content-type": kind}
                response = await client.post(path, content=BODY, headers=headers)
                if kind not in REFUSED_KINDS:
                    assert response.status_code == 200
                    continue
                error = response.json()["error"]
                assert response.status_code == 415, kind
                assert error["code"] == "unsupported_media_type"
                remedy = "send the header 'Content-Type: application/json'"
                assert remedy in error["message"]


def test_a_post_without_a_body_needs_no_content_type(engine):
    assert status(engine, path="/reset_prefix_cache", method="POST") == 200


def test_a_trace_has_its_own_content_type(engine):
    trace = {"path": "/mie/trace", "method": "POST", "content": b"{}\n"}
    assert status(engine, **trace, headers={"content-type": "application/x-ndjson"}) == 400
    assert status(engine, **trace, headers=JSON) == 415


# Wrong keys.


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0

    async def sleep(self, seconds):
        self.now += seconds

    def limit(self):
        return WrongKeys(lambda: self.now, self.sleep)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("mie.serve.page.shell.WrongKeys", clock.limit)
    return clock


@pytest.mark.parametrize("way", ["login", "bearer", "x-api-key"])
async def test_wrong_keys_in_a_row_are_slowed_and_the_right_one_is_not(engine, clock, way):
    async def attempt(client, key):
        if way == "login":
            return await client.post("/mie/login", json={"key": key})
        name, value = (
            ("x-api-key", key) if way == "x-api-key" else ("authorization", f"bearer {key}")
        )
        return await client.get("/load", headers={name: value})

    async with client_of(engine, ServeConfig(keys=KEYS)) as client:
        for number in range(30):
            assert (await attempt(client, f"sk-{number}")).status_code == 401
        slept = clock.now
        right = (await attempt(client, "sk-one")).status_code
        slept, right, more = slept, right, clock.now - slept
    assert slept == (30 - NUM_FREE) * SECONDS
    assert (right, more) == (204 if way == "login" else 200, 0.0)


async def test_requests_without_a_key_are_no_attempts(engine, clock):
    async with client_of(engine, ServeConfig(keys=KEYS)) as client:
        for _ in range(30):
            assert (await client.get("/load")).status_code == 401
    assert clock.now == 0.0


async def test_wrong_keys_at_once_wait_one_after_another_or_are_refused(engine, monkeypatch):
    """They neither pile up nor keep the right key out."""
    may_go = asyncio.Event()

    async def sleep(seconds):
        await may_go.wait()

    monkeypatch.setattr("mie.serve.page.shell.WrongKeys", lambda: WrongKeys(lambda: 0.0, sleep))
    async with client_of(engine, ServeConfig(keys=KEYS)) as client:
        wrong = {"authorization": "Bearer sk-two"}
        answers = [asyncio.ensure_future(client.get("/load", headers=wrong)) for _ in range(50)]
        while sum(each.done() for each in answers) < 47:
            await asyncio.sleep(0)
        right = await client.get("/load", headers={"authorization": "Bearer sk-one"})
        assert right.status_code == 200
        may_go.set()
        found = [await each for each in answers]
        assert [each.status_code for each in found].count(401) == NUM_FREE + 3
        refused = [each for each in found if each.status_code == 429]
        assert len(refused) == 50 - NUM_FREE - 3
        assert all(int(each.headers["retry-after"]) > 0 for each in refused)


async def test_clients_are_told_apart_and_few_are_remembered():
    clock, refusal = Clock(), object()

    async def wrong(limit, address, times=1):
        for _ in range(times):
            await limit.answer_to({"client": (address, 1)}, refusal)
        return clock.now

    limit = clock.limit()
    assert await wrong(limit, "192.0.2.1", NUM_FREE) == 0
    assert await wrong(limit, "192.0.2.2", NUM_FREE) == 0
    assert await wrong(limit, "192.0.2.1") == SECONDS
    clock.now = 1000.0
    assert await wrong(limit, "192.0.2.1", NUM_FREE) == 1000.0, "it is forgiven"
    assert await wrong(limit, "2001:db8::1", NUM_FREE) == 1000.0
    assert await wrong(limit, "2001:db8::ffff:2") == 1000.0 + SECONDS, "the same network"
    for number in range(MAX_CLIENTS):
        await wrong(limit, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert await wrong(limit, "2001:db8::3", NUM_FREE) == 1000.0 + SECONDS, "it is forgotten"
    await limit.answer_to({"client": None}, refusal)
