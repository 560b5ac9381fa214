"""The server as a whole: draining, crashes, sockets, TLS, proxies, web pages."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import ssl
from contextlib import suppress

import httpx2
import pytest
from audit import is_stopping
from command_line import PATIENCE, start
from edge_helpers import DIALECTS, asks, client_of, held, load, server_of
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mie.errors import ConfigError
from mie.events import read_log
from mie.serve.config import ServeConfig
from mie.serve.server import Server, bound, serve, serve_app, url_of

BODY = {"prompt": "Once", "max_tokens": 2}


async def rest_of(events):
    return [event async for event in events]


async def two_requests(running):
    """The events of a request that streams, and the answer to one that does not."""
    events = await running.stream(max_tokens=200)
    await anext(events)
    body = {**BODY, "max_tokens": 100, "ignore_eos": True}
    whole = asyncio.ensure_future(running.client.post("/v1/completions", json=body))
    while running.edge.health.num_requests < 2:
        await asyncio.sleep(0.01)
    return events, whole


# Ending.


async def test_a_server_that_is_told_to_end_lets_running_requests_finish():
    engine = load()
    with held(engine) as hold:
        async with server_of(engine) as running:
            events, whole = await two_requests(running)
            running.server.stop("SIGTERM")
            response = await running.client.post("/v1/completions", json=BODY)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) <= 60
            assert (await running.client.get("/health")).json() == {"status": "draining"}
            hold.release()
            *_, last, done = await rest_of(events)
            assert done == "[DONE]"
            assert last["choices"][0]["finish_reason"] == "length"
            assert (await whole).json()["usage"]["completion_tokens"] == 100
            assert await running.task == 0


async def test_what_does_not_finish_in_time_is_told_so():
    engine = load()
    with held(engine) as hold:
        async with server_of(engine, shutdown_timeout=0.0) as running:
            events, whole = await two_requests(running)
            running.server.stop("SIGTERM")
            while not is_stopping(engine):
                await asyncio.sleep(0.01)
            hold.release()
            *_, last, done = await rest_of(events)
            assert done == "[DONE]"
            assert last["error"]["type"] == "service_unavailable"
            assert "choices" not in last, "no client may count it as finished"
            assert (await whole).status_code == 503
            assert await running.task == 0


@pytest.mark.parametrize(("path", "body"), DIALECTS.items())
async def test_a_stream_that_the_end_cuts_is_logged_as_cut_and_is_no_bug(path, body, caplog):
    caplog.set_level(logging.INFO, "mie")
    engine = load()
    with held(engine) as hold:
        async with server_of(engine, shutdown_timeout=0.0) as running:
            asked = {**body, "temperature": 0, "stream": True}
            async with running.client.stream("POST", path, json=asked) as answer:
                await hold.reached()
                running.server.stop("SIGTERM")
                while not is_stopping(engine):
                    await asyncio.sleep(0.01)
                hold.release()
                assert b"the engine was shut down" in await answer.aread()
            assert await running.task == 0
    [facts] = [record.facts for record in caplog.records if hasattr(record, "facts")]
    assert facts["status"] == 503
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_a_client_that_never_ends_its_body_does_not_keep_the_server(monkeypatch, caplog):
    """It is hung up on, and nothing looks like a bug."""
    monkeypatch.setattr("mie.serve.app.FLUSH_SECONDS", 0.0)
    monkeypatch.setattr("mie.serve.server.HANG_UP_SECONDS", 0.05)
    async with server_of(load(), shutdown_timeout=0.0) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        while running.edge.health.num_requests < 1:
            await asyncio.sleep(0.01)
        running.server.stop("SIGTERM")
        assert await running.task == 0
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("drains", [False, True])
async def test_the_death_of_the_engine_answers_everybody_and_is_the_exit_code(caplog, drains):
    caplog.set_level(logging.CRITICAL + 1)

    def fail():
        raise RuntimeError("the chip is on fire")

    engine = load()
    with held(engine, then=fail) as hold:
        async with server_of(engine) as running:
            events, whole = await two_requests(running)
            if drains:
                running.server.stop("SIGTERM")
                while not running.edge.health.is_draining:
                    await asyncio.sleep(0.01)
            hold.release()
            *_, last, done = await rest_of(events)
            assert done == "[DONE]"
            assert "the chip is on fire" in last["error"]["message"]
            assert (await whole).status_code == 503
            assert await running.task == 1


def test_an_engine_that_hangs_does_not_keep_the_server(monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL + 1)

    class Exited(BaseException):
        pass

    def leave(code):
        raise Exited(code)

    monkeypatch.setattr("mie.serve.server.os._exit", leave)
    for name in ("STEP_SECONDS", "FLUSH_SECONDS"):
        monkeypatch.setattr(f"mie.serve.app.{name}", 0.1)

    engine = load()

    async def ask():
        async with server_of(engine, shutdown_timeout=0.0) as running:
            await two_requests(running)
            await hold.reached()
            running.server.stop("SIGTERM")
            await running.task

    with held(engine) as hold:
        with pytest.raises(Exited, match="1"):
            asks(ask())
        hold.release()
    engine.shutdown()


@pytest.fixture
def process():
    """Starts ``mie serve`` processes, and ends those that a test leaves behind."""
    started = []

    def begin(*arguments, **streams):
        child = start("serve", "--port", "0", "--num-blocks", "256", *arguments, **streams)
        started.append(child)
        for line in child.stderr:
            found = re.search(r"listening on (https?://[\w.:]+)", line.decode())
            if found:
                return child, found[1]
        raise AssertionError(f"it ended: {child.wait(PATIENCE)}")

    yield begin
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=PATIENCE)


def slow_stream(url, **more):
    """A stream of many prompts. One after another, they take more than a minute."""
    body = {"prompt": [[5]] * 256, "stream": True, "ignore_eos": True, "max_tokens": 1000, **more}
    return httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE)


def test_a_signal_drains(process, tmp_path):
    trace = tmp_path / "trace.jsonl"
    child, url = process("--log-format", "json", "--load-format", "dummy", "--trace", str(trace))
    with slow_stream(url, prompt=[5], max_tokens=100) as response:
        lines = response.iter_lines()
        next(lines)
        child.send_signal(signal.SIGINT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert child.wait(PATIENCE) == 0
    entries = [json.loads(line) for line in child.stderr]
    assert {entry["level"] for entry in entries} == {"info"}
    [request] = [entry for entry in entries if entry["logger"] == "mie.access"]
    assert (request["status"], request["num_output_tokens"]) == (200, 100)
    assert list(read_log(trace))[-1].last >= 100


def test_the_second_signal_ends_at_once(process):
    child, url = process(
        "--shutdown-timeout", str(PATIENCE), "--max-num-seqs", "1", "--max-num-queued-reqs", "256"
    )
    with slow_stream(url) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        for line in child.stderr:
            if b"SIGTERM: no new requests" in line:
                break
        child.send_signal(signal.SIGTERM)
        with pytest.raises(httpx2.TransportError):
            list(lines)
    assert child.wait(PATIENCE) == 130
    assert b"SIGTERM again: the server ends at once" in child.stderr.read()


# Where it listens.


def take(**options):
    """Try to take an address."""
    with bound(ServeConfig(**options)):
        raise AssertionError("it was free")


async def test_an_application_without_an_engine_is_served_until_a_signal(capsys):
    """The front of replicas ends so: running requests may end, and then the server does."""
    has_come, may_end = asyncio.Event(), asyncio.Event()

    async def home(request):
        has_come.set()
        await may_end.wait()
        return PlainTextResponse("here")

    config = ServeConfig(port=0)
    with bound(config) as listener:
        app = Starlette(routes=[Route("/", home)])
        serving = asyncio.ensure_future(serve_app(app, config, listener, "an application"))
        await asyncio.sleep(0)  # it listens
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            asked = asyncio.ensure_future(client.get(url_of(listener, config)))
            await has_come.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            while listener.fileno() >= 0:  # until the server takes no more connections
                await asyncio.sleep(0.01)
            assert not serving.done()
            may_end.set()
            assert (await asked).text == "here"
        await serving
    first, second = capsys.readouterr().err.splitlines()
    assert first == "[an application]"
    assert second.startswith("[listening on http://127.0.0.1:")


@pytest.mark.parametrize("was_killed", [False, True])
async def test_a_unix_socket(tmp_path, was_killed):
    path = tmp_path / "mie.sock"
    if was_killed:  # the server before has left its socket
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    async with server_of(load(), uds=str(path)) as running:
        assert (await running.client.get("/health")).status_code == 200
        assert path.stat().st_mode & 0o777 == 0o660
        with pytest.raises(ConfigError, match="cannot listen on the Unix socket"):
            take(uds=str(path))
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(ConfigError, match="cannot listen on the Unix socket"):
        take(uds=str(path))
    assert path.read_text() == "a file of somebody's"


async def test_a_port_in_use_is_refused_by_name():
    async with server_of(load()) as running:
        port = int(running.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1 port {port}"):
            take(port=port)


@pytest.mark.parametrize(
    "options", [{"host": "203.0.113.1"}, {"host": "no.such.host.invalid"}, {"ssl_certfile": "x"}]
)
def test_a_bad_address_is_refused_before_the_model_is_loaded(options):
    def load():
        raise AssertionError("it was loaded")

    with pytest.raises(ConfigError):
        serve(load, ServeConfig(**{"port": 0, **options}))


async def test_tls_which_may_ask_clients_for_a_certificate(certificate):
    cert, key = certificate
    options = {"ssl_certfile": cert, "ssl_keyfile": key}
    async with server_of(load(), **options) as running:
        assert running.url.startswith("https://")
        assert (await running.client.get("/health")).status_code == 200
        plain = running.url.replace("https", "http")
        with pytest.raises(httpx2.TransportError):
            await running.client.get(f"{plain}/health")
    async with server_of(load(), **options, ssl_ca_certs=cert) as running:
        with pytest.raises(httpx2.TransportError):
            await running.client.get("/health")
        context = ssl.create_default_context(cafile=cert)
        context.load_cert_chain(cert, key)
        async with httpx2.AsyncClient(verify=context, timeout=PATIENCE) as known:
            assert (await known.get(f"{running.url}/health")).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_keyfile": "k"}, "ssl_keyfile and ssl_certfile belong together"),
        ({"ssl_ca_certs": "k"}, "ssl_ca_certs needs ssl_certfile"),
        ({"ssl_keyfile": "no", "ssl_certfile": "no"}, "TLS cannot use no, no: .*No such file"),
        ({"root_path": "llm"}, "root_path must be like '/llm'"),
        ({"root_path": "/llm/"}, "root_path must be like '/llm'"),
        ({"watchdog_timeout": -1}, "watchdog_timeout must be a number"),
        ({"keys": ["sk-one"]}, r"keys must be a Keys \(Keys.of"),
        ({"log_format": "xml"}, "log_format must be one of text, json"),
    ],
)
def test_options_that_cannot_work_are_refused(engine, options, message):
    with pytest.raises(ConfigError, match=message):
        Server(engine, ServeConfig(**options))


async def answer_to(url, *pieces):
    """The bytes of a server until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in pieces:
        writer.write(piece)
        try:
            await writer.drain()
        except ConnectionError:  # it closed the connection
            break
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_headers_after_the_body_are_dropped(caplog):
    """They would be kept without a limit, and be added to those that were checked."""
    caplog.set_level(logging.INFO, "mie.access")
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nx-request-id: late\r\n\r\n"
    )
    async with server_of(load()) as running:
        assert b"prompt is missing" in await answer_to(running.url, request)
    [facts] = [record.facts for record in caplog.records if hasattr(record, "facts")]
    assert facts["status"] == 400
    assert "client_request_id" not in facts


async def test_headers_are_limited_in_size_and_in_time(monkeypatch, caplog):
    start = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    async with server_of(load()) as running:
        ordinary = start + b"x: " + b"y" * 30_000 + b"\r\n\r\n"
        assert b"200 OK" in await answer_to(running.url, ordinary)
        long = [start, b"x: ", *([b"y" * 50_000] * 40)]
        assert b"200 OK" not in await answer_to(running.url, *long)
        many = [start, *([b"x: y\r\n" * 5_000] * 40)]
        assert b"200 OK" not in await answer_to(running.url, *many)
        body = b"z" * 300_000
        large = b"POST /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        large += b"content-type: application/json\r\ncontent-length: "
        large += str(len(body)).encode() + b"\r\n\r\n" + body
        assert b"405 Method" in await answer_to(running.url, large), "a body is no header"
        with monkeypatch.context() as patch:
            patch.setattr("mie.serve.http_protocol.HEAD_SECONDS", 0.05)
            assert await answer_to(running.url) == b""
            assert await answer_to(running.url, start) == b""
        assert (await running.client.get("/health")).status_code == 200


async def test_a_body_that_stalls_is_answered_and_hung_up_on(monkeypatch, caplog):
    start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n"
    kind = b"content-type: application/json\r\n\r\n"
    async with server_of(load()) as running:
        with monkeypatch.context() as patch:
            patch.setattr("mie.serve.http_protocol.BODY_SECONDS", 0.05)
            for body in (b"", b"{", b" " * 300_000):
                got = await answer_to(running.url, start + kind + body)
                assert got.startswith(b"HTTP/1.1 408 ")
            refused = await answer_to(running.url, start + b"content-type: text/plain\r\n\r\n")
            assert refused.startswith(b"HTTP/1.1 415 ")  # and no second answer behind it
            assert refused.count(b"HTTP/1.1") == 1
        assert (await running.client.get("/health")).status_code == 200
        assert running.edge.health.num_requests == 0
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == []


# Behind a proxy, and from web pages.


async def test_a_root_path_is_where_a_proxy_serves():
    from mie.serve.keys import Keys

    options = {"root_path": "/llm", "keys": Keys.of(["sk"])}
    async with server_of(load(), **options) as running:
        base = running.url.removesuffix("/llm")
        headers = {"authorization": "Bearer sk"}
        for path in ("/health", "/llm/health"):
            assert (await running.client.get(base + path)).status_code == 200
        for path in ("/load", "/llm/load", "/llm/llm/health", "/llmhealth"):
            assert (await running.client.get(base + path)).status_code == 401
        for path in ("/load", "/llm/load"):
            assert (await running.client.get(base + path, headers=headers)).status_code == 200


def test_web_pages_may_not_use_the_server_unless_asked(engine):
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}

    async def ask(**options):
        async with client_of(engine, ServeConfig(**options)) as client:
            asked = await client.options("/v1/completions", headers=preflight)
            headers = {"origin": "https://page.example"}
            answer = await client.get("/version", headers=headers)
            return asked.status_code, answer.headers.get("access-control-allow-origin")

    assert asks(ask()) == (403, None)
    assert asks(ask(allowed_origins=["https://page.example"])) == (200, "https://page.example")
    assert asks(ask(allowed_origins=["https://other.example"])) == (400, None)


# The command line.


def test_a_yaml_file_has_options_which_the_command_line_overrides(tmp_path, process):
    file = tmp_path / "mie.yaml"
    file.write_text(
        "port: 1\nmax_num_seqs: 3\nmax-num-queued-reqs: 0\nlog-format: json\n"
        "served-model-name: [one, two]\napi-key: [sk-yaml]\nenable_prefix_caching: false\n"
    )
    child, url = process("--config", str(file))
    headers = {"authorization": "Bearer sk-yaml"}
    with httpx2.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
        text = client.get("/metrics").text
        assert 'model_name="one"' in text
        assert 'enable_prefix_caching="False"' in text
        assert client.get("/metrics", headers={"authorization": ""}).status_code == 401
        body = {**BODY, "prompt": ["a"] * 4}
        assert (
            "the server takes 0 that wait and 3 that run"
            in client.post("/v1/completions", json=body).text
        )
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE) == 0
