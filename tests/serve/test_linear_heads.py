"""The CPU time of a request's head grows in proportion to its length, before a key is checked.

Each header is filled with each character that some parser may stumble over. CPU time is measured,
so the tests hold on a busy machine.
"""

import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from edge_helpers import asks, call_app
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError
from mie.serve.keys import Keys
from mie.serve.ollama.protocol import seconds_of as duration
from mie.serve.page.access import COOKIE, MAX_COOKIE_CHARS, Sessions

SHORT, LONG = 4_000, 60_000
"""Lengths of a header. All headers together may have 65,536 bytes."""
FREE_SECONDS = 0.03
"""CPU time that a head may always take. Linear parsers take about 0.001 s."""
GROWTH = 3 * LONG / SHORT
HEADERS = (
    *("cookie", "authorization", "x-api-key", "host", "origin", "referer", "content-type"),
    *("content-length", "content-encoding", "transfer-encoding", "accept", "accept-encoding"),
    *("sec-fetch-site", "sec-fetch-dest", "x-forwarded-for", "x-forwarded-proto", "forwarded"),
    *("x-request-id", "last-event-id", "x-mie-page", "if-none-match"),
    *("access-control-request-headers", "access-control-request-method", "upgrade", "connection"),
)
FILLERS = (
    *("\\", "\\0", '"', " ", ",", ";", "=", "%", ".", ":", "[", "-", "a", "0", "\xe9", "a=b;"),
    '="\\',
)
FRAMES: dict[str, tuple[str, ...]] = {
    "cookie": ("{}", 'mie_session="{}"', "mie_session={}", 'a={}; b="{}"'),
    "authorization": ("{}", "Bearer {}", "Basic {}"),
    "x-forwarded-for": ("{}", "127.0.0.1,{}"),
    "forwarded": ("{}", 'for="{}"'),
    "host": ("{}", "localhost:{}", "[{}]"),
}
"""The forms of some headers, in which a filler takes the place of the braces."""
CONFIGS = {
    "with keys": ServeConfig(keys=Keys.of(["sk-one"]), admin_keys=Keys.of_one("admin", "sk-two")),
    "without": ServeConfig(allowed_hosts=["*.example.org"], allowed_origins=["https://a.example"]),
}


async def seconds_of(app: Any, method: str, path: str, head: Any, body: bytes = b"") -> float:
    """Return the CPU seconds of a request. It must be answered without a 500."""
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    begin = time.thread_time()
    await call_app(app, path, body, send, method, **head)
    seconds = time.thread_time() - begin
    assert 200 <= statuses[0] < 500
    return seconds


async def assert_linear(what: Any, cost: Callable[[int], Awaitable[float]]) -> None:
    """Compare the costs of a short and of a long head. The least of some tries counts."""
    short = await cost(SHORT)
    if short > FREE_SECONDS:
        short = min([await cost(SHORT) for _ in range(3)])
    assert short < FREE_SECONDS, (what, SHORT, short)
    long = await cost(LONG)
    if long > FREE_SECONDS:
        long = min([long, await cost(LONG), await cost(LONG)])
    assert long < max(FREE_SECONDS, GROWTH * short), (what, LONG, long)


@pytest.fixture(params=CONFIGS)
def app(request, engine):
    app = create_app(engine, CONFIGS[request.param])
    app.state.serving = asks(app.state.edge.start())
    return ProxyHeadersMiddleware(app, "127.0.0.1")


@pytest.mark.parametrize("name", HEADERS)
async def test_no_header_costs_more_than_in_proportion_to_its_length(app, name):
    method = "OPTIONS" if name.startswith("access-control") else "POST"
    others = {b"host": b"localhost", b"content-type": b"application/json"}
    if method == "OPTIONS":
        others |= {b"origin": b"https://a.example", b"access-control-request-method": b"GET"}
    for frame, filler in itertools.product(FRAMES.get(name, ("{}",)), FILLERS):

        def cost(length: int, text: str = filler, frame: str = frame) -> Awaitable[float]:
            filled = text * (length // len(text) // frame.count("{}"))
            value = frame.replace("{}", filled).encode("latin-1")
            headers = [*(others | {name.encode(): value}).items()]
            return seconds_of(app, method, "/mie/login", {"headers": headers})

        await assert_linear((name, frame, filler), cost)


HOST = [(b"host", b"localhost")]


@pytest.mark.parametrize("filler", FILLERS)
async def test_no_path_query_or_number_of_headers_costs_more_than_in_proportion(app, filler):
    data = filler.encode("latin-1")

    def of_path(length: int) -> Awaitable[float]:
        path = "/v1/models/" + filler * (length // len(filler))
        return seconds_of(app, "GET", path, {"headers": HOST})

    def of_query(length: int) -> Awaitable[float]:
        head = {"headers": HOST, "query_string": (b"model=" + data * length)[:length]}
        return seconds_of(app, "GET", "/v1/models", head)

    def of_many(length: int) -> Awaitable[float]:
        headers = HOST + [(b"cookie", data)] * (length // 8) + [(b"x-a", data)] * (length // 8)
        return seconds_of(app, "GET", "/v1/models", {"headers": headers})

    for cost in (of_path, of_query, of_many):
        await assert_linear((cost.__name__, filler), cost)


BODIES = {
    "digits": lambda n: b'{"key": ' + b"1" * n + b"}",
    "fraction": lambda n: b'{"key": 0.' + b"1" * n + b"}",
    "lists": lambda n: b'{"key": ' + b"[" * n,
    "objects": lambda n: b'{"a":' * (n // 5),
    "escapes": lambda n: b'{"key": "' + b"\\\\" * (n // 2) + b'"}',
    "surrogates": lambda n: b'{"key": "' + b"\\ud800" * (n // 6) + b'"}',
    "equal names": lambda n: b'{"key": 1' + b', "key": 1' * (n // 10) + b"}",
    "quotes": lambda n: b'"' * n,
    "spaces": lambda n: b" " * n,
}


@pytest.mark.parametrize("kind", BODIES)
async def test_no_login_costs_more_than_in_proportion_to_its_body(app, kind):
    headers = [*HOST, (b"content-type", b"application/json")]

    def cost(length: int) -> Awaitable[float]:
        body = BODIES[kind](length // 4)  # a login may have 16 KiB
        return seconds_of(app, "POST", "/mie/login", {"headers": headers}, body)

    await assert_linear(kind, cost)


@pytest.mark.parametrize("text", ["1" * 65, "1" * 10**6, "1h" * 33, "-" * 65, "." * 10**6])
def test_a_long_text_for_a_time_is_refused_before_it_is_read(text):
    with pytest.raises(ApiError, match="keep_alive must be seconds"):
        duration(text)


def test_a_session_is_found_among_other_cookies():
    sessions = Sessions()
    value = sessions.open("alice")
    for cookie, expected in (
        (f"{COOKIE}={value}", "alice"),
        (f"a=b; {COOKIE}={value}; c=d", "alice"),
        (f"a=b;{COOKIE}={value}", "alice"),
        (f'a="b\\"; {COOKIE}={value}', "alice"),
        (f"{COOKIE}=wrong; {COOKIE}={value}", None),  # the first one counts
        (f"x{COOKIE}={value}", None),
        (f"{COOKIE}={value}x", None),
        (f"{COOKIE}={value[:-1]}", None),
        (f"{COOKIE}={'x' * (MAX_COOKIE_CHARS + 1)}", None),
        (COOKIE, None),
        ("", None),
    ):
        headers = [(b"cookie", cookie.encode())]
        scope = {"type": "http", "method": "GET", "headers": headers}
        assert sessions.client(scope) == expected, cookie
