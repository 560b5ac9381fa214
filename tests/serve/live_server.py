"""A server in a thread of the test's own process, on a free port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from deadlines import join

from mie import AsyncLLM
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.http_protocol import LimitedProtocol
from mie.serve.router import ModelsEdge, create_router
from mie.serve.server import bound, listen

INVARIANT: dict[str, Any] = {"batch_invariant": True}
"""The settings under which two engines give the same bits in every batch."""


@contextmanager
def live(engine: AsyncLLM | ModelsEdge, config: ServeConfig | None = None) -> Iterator[str]:
    """Serve an engine, or a folder of models, and return the address.

    Connections wait until the server accepts them.
    """
    is_folder = isinstance(engine, ModelsEdge)
    options = uvicorn.Config(
        create_router(engine) if is_folder else create_app(engine, config),
        http=LimitedProtocol,
        log_config=None,
        timeout_keep_alive=60,
        ws="none",  # as `mie serve` has it, whether a library for sockets is installed or not
    )
    server = uvicorn.Server(options)
    with bound(ServeConfig(port=0)) as listener:
        listen(listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            join(thread)


@contextmanager
def live_bundled(config: ServeConfig | None = None, **settings: Any) -> Iterator[str]:
    """Serve the bundled model, and return the address."""
    engine = AsyncLLM("bundled", **{**INVARIANT, **settings})
    try:
        with live(engine, config) as url:
            yield url
    finally:
        engine.shutdown()
