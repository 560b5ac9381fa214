"""An app in this process, and a server on a free port of this machine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2

from mie import AsyncLLM
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.server import Server

PATIENCE = 120.0
"""Seconds after which something that should have happened has failed."""


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
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            client.app = app
            yield client


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
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
    await response.aclose()


@asynccontextmanager
async def server_of(engine, **options):
    """A server on a free port, and its client. It is stopped if the test has not done so."""
    config = ServeConfig(**{"port": 0, "shutdown_timeout": PATIENCE, **options})
    server = Server(engine, config)
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(server.run(ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    url = await task if task.done() else ready.result()
    verify = config.ssl_certfile or True
    transport = None
    if config.uds is not None:
        transport, url = httpx2.AsyncHTTPTransport(uds=config.uds), "http://server"
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
            server.stop("the test is over")
        await asyncio.wait_for(task, PATIENCE)
