"""A client that leaves takes its request with it: its blocks are free within one step.

The test holds the engine before a step, closes the connection, and lets that one step go on. After
that, the engine must hold no trace of the request, streamed or not, waiting or running.
"""

import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from audit import check_scheduler, engine_of, loop_of
from deadlines import PATIENCE
from edge_helpers import DIALECTS
from live_server import live
from stepped import Stepped, eventually, state_of

from mie import AsyncLLM
from mie.frontend.prepare import Preparer
from mie.serve.config import ServeConfig

LONG = list(range(100, 164))  # four blocks of 16 tokens
OTHER = list(range(300, 364))

SETTINGS: dict[str, dict[str, Any]] = {
    "queued": {"max_num_seqs": 1},
    "prefilling": {"max_num_batched_tokens": 24},
    "decoding": {},
    "preempted": {"num_blocks": 12, "enable_prefix_caching": False, "watermark": 0},
    "swapped": {
        "num_blocks": 12,
        "enable_prefix_caching": False,
        "watermark": 0,
        "preemption_mode": "swap",
        "swap_space": 2**24,
    },
}


class Connection:
    """A connection that has sent a request, to be closed at any moment."""

    def __init__(self, url: str, path: str = "/v1/completions", **body: Any) -> None:
        host, port = url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self.socket.sendall(head.encode() + data)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close the connection so that the server sees at once that its client has left."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@contextmanager
def stepped_server(
    config: ServeConfig | None = None, **settings: Any
) -> Iterator[tuple[Stepped, str]]:
    engine = AsyncLLM("bundled", **{"num_blocks": 64, "max_num_seqs": 4, **settings})
    stepped = Stepped(engine)
    try:
        with live(engine, config) as url:
            try:
                yield stepped, url
            finally:
                stepped.free()
    finally:
        engine.shutdown()


def ids_of(stepped: Stepped) -> list[str]:
    return [request.request_id for request in stepped.engine.requests]


def close_and_take_one_step(stepped: Stepped, connection: Connection) -> None:
    """Close a connection while the engine is about to step, and let it take that step."""
    stepped.hold()
    assert not loop_of(stepped.llm).has_mail
    connection.close()
    eventually(lambda: loop_of(stepped.llm).has_mail)
    stepped.step()


def cases() -> list[Any]:
    """Each state, streamed with one choice and whole with three. The other cases are slow."""
    return [
        pytest.param(*case, marks=() if case[1:] in ((1, True), (3, False)) else pytest.mark.slow)
        for case in itertools.product(SETTINGS, (1, 3), (False, True))
    ]


@pytest.mark.parametrize(("state", "n", "stream"), cases())
def test_blocks_are_free_within_one_step(state, n, stream):
    settings = SETTINGS[state] if (state, n) != ("queued", 3) else {"max_num_seqs": 3}
    body = {"max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": stream}
    with stepped_server(**settings) as (stepped, url):
        # The first one stays, so that the engine steps in the end.
        staying = Connection(url, prompt=LONG, n=n if state == "queued" else 1, **body)
        stepped.hold()
        [stays] = ids_of(stepped)
        leaving = Connection(url, prompt=OTHER, n=n, **body)
        eventually(lambda: loop_of(stepped.llm).has_mail)
        stepped.step_until(lambda: len(ids_of(stepped)) == 2)
        [leaves] = {*ids_of(stepped)} - {stays}
        stepped.step_until(lambda: state_of(stepped, leaves) == state)

        close_and_take_one_step(stepped, leaving)

        stepped.hold()  # before the next step
        [request] = stepped.engine.requests
        assert request.request_id == stays
        check_scheduler(stepped.scheduler)
        held = {b for s in request.sequences if s.table for b in s.table.block_ids}
        assert stepped.scheduler.manager.num_used == len(held)
        close_and_take_one_step(stepped, staying)
        assert stepped.between_steps(lambda: stepped.engine.requests) == []
        assert stepped.scheduler.manager.num_used == 0


@pytest.mark.parametrize("path", DIALECTS)
def test_every_route_ends_with_its_client(path):
    body = {**DIALECTS[path], "stream": path != "/v1/chat/completions"}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 500
    with stepped_server() as (stepped, url):
        leaving = Connection(url, path, **body)
        stepped.hold()
        stepped.step()
        stepped.hold()
        assert stepped.engine.requests
        close_and_take_one_step(stepped, leaving)
        assert stepped.between_steps(lambda: stepped.engine.requests) == []
        assert stepped.scheduler.manager.num_used == 0


def test_a_client_that_leaves_while_it_is_tokenized_adds_nothing(monkeypatch):
    original, is_let, is_there = Preparer.prepare, threading.Event(), threading.Event()

    def prepare(self, *args, **more):
        is_there.set()
        assert is_let.wait(PATIENCE)
        return original(self, *args, **more)

    monkeypatch.setattr(Preparer, "prepare", prepare)
    with stepped_server() as (stepped, url):
        stepped.free()
        leaving = Connection(url, prompt=LONG, max_tokens=500)
        assert is_there.wait(PATIENCE)
        leaving.reset()
        # The server has seen it leave when it answers a connection that came later.
        with socket.create_connection((url[7:].split(":")[0], int(url.split(":")[2]))) as later:
            later.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while later.recv(4096):
                pass
        is_let.set()
        eventually(lambda: stepped.between_steps(lambda: not stepped.engine.requests))
        assert stepped.scheduler.manager.num_used == 0


def test_a_client_that_sends_half_a_request_costs_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    for part in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
        with socket.create_connection((host, int(port))) as half:
            half.sendall(part)
    assert server.ask("/v1/completions", prompt="A mill", max_tokens=1)["choices"]


# Clients that end only their own half of the connection.


def whole_answer(connection: socket.socket) -> tuple[list[bytes], bytes, bytes]:
    """Return the interim heads, the head and the body of the last answer of a connection."""
    connection.settimeout(PATIENCE)
    data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    heads = []
    while data.startswith(b"HTTP/1.1 100 "):
        head, _, data = data.partition(b"\r\n\r\n")
        heads.append(head)
    return heads, *data.partition(b"\r\n\r\n")[::2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_client_that_only_sends_no_more_gets_its_whole_answer(stream, is_slow):
    body = {"prompt": LONG, "max_tokens": 5, "ignore_eos": True, "stream": stream}
    with stepped_server() as (stepped, url):
        connection = Connection(url, **body)
        connection.socket.shutdown(socket.SHUT_WR)
        if is_slow:
            stepped.hold()
            assert connection.socket.recv(1, socket.MSG_PEEK)  # the server looked for the client
        stepped.free()
        interim, head, content = whole_answer(connection.socket)
        assert set(interim) <= {b"HTTP/1.1 100 Continue"}
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in head.lower()
        assert content.count(b'"finish_reason": "length"') == 1
        assert (b"[DONE]" in content) == stream
        connection.close()


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
def test_short_answers_reach_a_client_that_only_sends_no_more(server, path):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        _, head, content = whole_answer(connection)
    assert head.startswith(b"HTTP/1.1 404 " if path == "/nowhere" else b"HTTP/1.1 200 ")
    assert json.loads(content)


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_sends_no_more_and_leaves_later_takes_its_request_with_it(reads):
    with stepped_server() as (stepped, url):
        connection = Connection(url, prompt=LONG, max_tokens=200, ignore_eos=True)
        stepped.step_until(lambda: len(ids_of(stepped)) == 1)
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.socket.recv(1 << 10 if reads else 1)  # the server looked for the client
        stepped.hold()
        assert len(ids_of(stepped)) == 1
        close_and_take_one_step(stepped, connection)
        eventually(lambda: not stepped.engine.requests)


def test_a_client_of_http_1_0_that_sends_no_more_has_left(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        data = json.dumps({"prompt": LONG, "max_tokens": 200, "ignore_eos": True}).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        connection.shutdown(socket.SHUT_WR)
        assert b"100 Continue" not in b"".join(iter(lambda: connection.recv(1 << 16), b""))
    eventually(lambda: not engine_of(server.engine).has_work)
