"""Pages of other sites try to use a server without keys, in a real browser.

The browser resolves evil.test to this machine. A page of evil.test at another port is one of
another site. At the server's own port, it is one whose name was rebound. New versions of Chromium
ask the person before a page reaches this machine. That is off here, because other browsers do not.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from audit import engine_of
from browser import chromium, opened
from deadlines import join
from live_server import live

from mie import AsyncLLM

pytestmark = pytest.mark.slow  # tests/serve/test_cross_site.py sends the same requests

PATIENCE = 120.0
BODY = json.dumps({"prompt": "Once", "messages": [{"role": "user", "content": "Hi"}]})
READ = ("/health", "/v1/models", "/metrics", "/load", "/mie/config", "/mie/state", "/mie/events")
READ += ("/mie/history?until=9", "/openapi.json", "/tokenizer_info", "/")
WRITE = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/reset_prefix_cache")
WRITE += ("/tokenize", "/mie/trace", "/mie/login", "/v1/requests/x/cancel")


class Site(BaseHTTPRequestHandler):
    """The other site. Its page /report reports violations of its policy to the attacked server."""

    report_to = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        if self.path == "/report":
            policy = f"img-src 'none'; report-uri {self.report_to}"
            self.send_header("content-security-policy", policy)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>evil</title><img src=/x.png>")

    def log_message(self, *_: object) -> None:
        pass


class Attacked(logging.Handler):
    """A server without keys, and its answers."""

    def __init__(self, url: str, engine: AsyncLLM) -> None:
        super().__init__()
        self.url, self.engine = url, engine
        self.port = url.rpartition(":")[2]
        self.answers: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts = record.__dict__["facts"]
        if facts["path"] != "/favicon.ico":  # browsers ask for it beside any answer
            self.answers.append(facts)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < end, self.answers
            time.sleep(0.01)

    def heard(self, *paths: str) -> None:
        """Wait until requests have come to all of these routes, and none was answered."""
        self.until(lambda: {path.partition("?")[0] for path in paths} <= self.paths())
        for each in self.answers:
            assert each["status"] in (403, 415), each
        assert not engine_of(self.engine).has_work

    def paths(self) -> set[str]:
        return {each["path"] for each in self.answers}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("bundled", num_blocks=64)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def server(engine: AsyncLLM) -> Iterator[Attacked]:
    with live(engine) as url:
        yield Attacked(url, engine)


@pytest.fixture
def attacked(server: Attacked) -> Iterator[Attacked]:
    server.answers.clear()
    log = logging.getLogger("mie.access")
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(server)
    yield server
    log.removeHandler(server)
    log.setLevel(before)


@pytest.fixture(scope="module")
def site(server: Attacked) -> Iterator[str]:
    Site.report_to = f"{server.url}/reset_prefix_cache"
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://evil.test:{other.server_port}"
        other.shutdown()
        join(thread)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ("--disable-features=LocalNetworkAccessChecks",)
    with chromium("--host-resolver-rules=MAP evil.test 127.0.0.1", *flags) as browser:
        yield browser


@pytest.fixture
def page(browser: Any, site: str) -> Iterator[Any]:
    """A page of another site."""
    page = browser.new_page()
    page.goto(f"{site}/")
    yield page
    page.close()


@pytest.fixture
def rebound(browser: Any, attacked: Attacked) -> Iterator[Any]:
    """A page that was loaded under a name, which resolves to the attacked server since then."""
    page = browser.new_page()
    address = f"http://evil.test:{attacked.port}/attack"
    page.route(address, lambda route: route.fulfill(body="<!doctype html>", status=200))
    page.goto(address)
    yield page
    page.close()


TRY = """async ([url, options]) => {
    try {
        const answer = await fetch(url, options);
        return [answer.type, answer.status, await answer.text()];
    } catch (error) { return ["error", 0, ""]; }
}"""


def test_a_rebound_name_reads_and_changes_nothing(rebound: Any, attacked: Attacked) -> None:
    for path in READ:
        kind, status, text = rebound.evaluate(TRY, [path, {}])
        assert (kind, status) == ("basic", 403), path
        assert "--allowed-hosts evil.test" in text
    for path in WRITE:
        headers = {"content-type": "application/json", "x-mie-page": "1"}
        options = {"method": "POST", "headers": headers, "body": BODY}
        assert rebound.evaluate(TRY, [path, options])[1] == 403, path
    attacked.heard(*READ, *WRITE)
    assert {each["refused"] for each in attacked.answers} == {"to the name evil.test"}


def test_scripts_of_another_site_are_refused(page: Any, attacked: Attacked) -> None:
    for path in (*READ, *WRITE):
        url = attacked.url + path
        as_json = {"method": "POST", "headers": {"content-type": "application/json"}, "body": BODY}
        asked = [{}] if path in READ else [as_json, {"method": "POST", "body": BODY}]
        for options in asked:
            assert page.evaluate(TRY, [url, options]) == ["error", 0, ""]
            kind, _, text = page.evaluate(TRY, [url, {**options, "mode": "no-cors"}])
            assert (kind in ("opaque", "error"), text) == (True, "")
    attacked.heard(*READ, *WRITE)


def test_a_beacon_has_no_effect(page: Any, attacked: Attacked) -> None:
    send = """([urls, body]) => urls.map(url => [
        navigator.sendBeacon(url, body),
        navigator.sendBeacon(url),
        navigator.sendBeacon(url, new Blob([body])),
        navigator.sendBeacon(url, new Blob([body], {type: "text/plain"})),
    ])"""
    page.evaluate(send, [[attacked.url + path for path in WRITE], BODY])
    attacked.until(lambda: len(attacked.answers) >= 4 * len(WRITE))
    attacked.heard(*WRITE)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_form_has_no_effect(page: Any, attacked: Attacked, kind: str) -> None:
    send = """([url, kind]) => {
        const form = document.createElement("form");
        Object.assign(form, {action: url, method: "POST", enctype: kind, target: "_blank"});
        form.innerHTML = `<input name='{"prompt": "Once", "x": "' value='"}'>`;
        document.body.append(form);
        form.submit();
    }"""
    for path in WRITE:
        with page.expect_popup() as popup:
            page.evaluate(send, [attacked.url + path, kind])
        attacked.heard(path)
        popup.value.close()


def test_a_csp_report_has_no_effect(browser: Any, site: str, attacked: Attacked) -> None:
    page = browser.new_page()
    page.goto(f"{site}/report")
    attacked.heard("/reset_prefix_cache")
    page.close()


@pytest.mark.parametrize("kind", ["img", "script", "iframe", "EventSource", "WebSocket"])
def test_elements_and_sockets_of_another_site_get_nothing(
    page: Any, attacked: Attacked, kind: str
) -> None:
    ask = """([urls, kind]) => {
        for (const url of urls) {
            if (kind === "EventSource") new EventSource(url);
            else if (kind === "WebSocket") new WebSocket(url.replace("http", "ws"));
            else document.body.append(Object.assign(document.createElement(kind), {src: url}));
        }
    }"""
    # Chromium opens one socket after another, and waits longer after each that was refused.
    paths = ("/mie/events",) if kind == "WebSocket" else READ
    page.evaluate(ask, [[attacked.url + path for path in paths], kind])
    attacked.heard(*paths)


def test_a_link_to_the_page_works_and_so_does_the_page(
    browser: Any, site: str, attacked: Attacked
) -> None:
    with opened(browser, f"{site}/") as shown:
        shown.js("url => { location.href = url }", f"{attacked.url}/")
        shown.until("window.mie?.store.run")
        headers = {"content-type": "application/json"}
        body = json.dumps({"prompt": "Once", "max_tokens": 2})
        options = {"method": "POST", "headers": headers, "body": body}
        assert shown.js(TRY, ["/v1/completions", options])[:2] == ["basic", 200]
    assert not [each for each in attacked.answers if each["status"] in (403, 415)]
