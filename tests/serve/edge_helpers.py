"""An app in this process, and a server on a free port of this machine."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager

import httpx2
from audit import engine_of, loop_of
from deadlines import PATIENCE

from mie import AsyncLLM
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.server import Server, bound

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
DIALECTS = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
    "/v1/responses": {"input": "Tell me a story."},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Tell me a story."},
}
"""The least that a request for an answer needs, by its route."""


def load(**settings):
    """An engine with the model that ships with mie, in a small pool."""
    settings = {"num_blocks": 256, "max_num_seqs": 4, "scheduling_policy": "fair", **settings}
    return AsyncLLM("bundled", **settings)


def asks(coroutine):
    """Run a test's coroutine, which must end."""
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


@asynccontextmanager
async def client_of(engine, config=None, **options):
    """A client of an app in this process, without sockets."""
    app = create_app(engine, config or ServeConfig())
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app, **options)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            client.app = app
            yield client


JSON_HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))


async def call_app(app, path, data, send, method="POST", headers=JSON_HEADERS, **scope):
    """Call an app in this process as a server does, with all of the body at once.

    ``send`` gets the messages of the app. The client stays until the app has ended.
    """
    sent = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive():
        return sent.pop() if sent else await asyncio.get_running_loop().create_future()

    request = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http"}
    request |= {"path": path, "root_path": "", "query_string": b"", "headers": [*headers]}
    request |= {"client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {}, "app": app}
    await app(request | scope, receive, send)


def answer_of(engine, path, config=None, method="GET", **options):
    """Return the answer to one request to an app that nothing else uses."""

    async def ask():
        async with client_of(engine, config) as client:
            return await client.request(method, path, **options)

    return asks(ask())


async def generate(client, **body):
    """Wait for the end of a short completion, and return its body."""
    body = {"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, **body}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Running:
    """A server that runs in this event loop, and its client."""

    def __init__(self, server, client, task, url):
        self.server, self.client, self.task, self.url = server, client, task, url
        self.edge = server.app.state.edge

    async def stream(self, **body):
        """Begin a completion that streams, and return an iterator over its events."""
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, **body}
        request = self.client.build_request("POST", "/v1/completions", json=body)
        response = await self.client.send(request, stream=True)
        assert response.status_code == 200, await response.aread()
        return events_of(response)


async def events_of(response):
    """The events of a stream: parsed JSON, and at last "[DONE]"."""
    try:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)
    finally:
        await response.aclose()


@contextmanager
def without_steps(engine):
    """Let an engine compute three more steps. Then it executes commands only, until the end.

    Requests that run at that moment keep their seats until the end of the test.
    """
    loop, is_over, num_steps = loop_of(engine), threading.Event(), itertools.count()
    turn = loop.turn

    def turn_without_a_step():
        may_step = is_over.is_set() or not loop.engine.has_work or next(num_steps) < 3
        if not may_step:
            is_over.wait(0.001)  # yields the CPU
        turn(may_step=may_step)

    loop.turn = turn_without_a_step
    try:
        yield
    finally:
        is_over.set()


@asynccontextmanager
async def server_of(engine, **options):
    """A server on a free port, and its client. It is stopped if the test has not done so."""
    config = ServeConfig(**{"port": 0, "shutdown_timeout": PATIENCE, **options})
    server = Server(engine, config)
    ready = asyncio.get_running_loop().create_future()
    stack = ExitStack()
    task = asyncio.ensure_future(server.run(stack.enter_context(bound(config)), ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    url = await task if task.done() else ready.result()
    verify = config.ssl_certfile or True
    transport = None
    if config.uds is not None:
        transport, url = httpx2.AsyncHTTPTransport(uds=config.uds), "http://localhost"
    elif config.ssl_certfile is not None:
        import ssl

        verify = ssl.create_default_context(cafile=config.ssl_certfile)
    try:
        async with httpx2.AsyncClient(
            base_url=url, transport=transport, verify=verify, timeout=PATIENCE
        ) as client:
            yield Running(server, client, task, url)
    finally:
        if not task.done():
            config.__dict__["shutdown_timeout"] = 0.0
            if not server.is_ending:  # a second call would end the tests
                server.stop("the test is over")
        with stack:
            await asyncio.wait_for(task, PATIENCE)


class Hold:
    """An engine that computes three steps, and then waits for `release`."""

    def __init__(self, engine, then):
        self.is_reached, self._event = threading.Event(), threading.Event()
        self._steps, self._step = itertools.count(), engine_of(engine).step
        self._then = then or self._step
        engine_of(engine).step = self.step

    def step(self):
        if next(self._steps) < 3:
            return self._step()
        self.is_reached.set()
        assert self._event.wait(PATIENCE)
        return self._then()

    def release(self):
        self._event.set()

    async def reached(self):
        while not self.is_reached.is_set():
            await asyncio.sleep(0.01)


@contextmanager
def held(engine, then=None):
    """Hold an engine after three steps. Released, it goes on, or calls ``then`` for each step."""
    hold = Hold(engine, then)
    try:
        yield hold
    finally:
        hold.release()
