"""Runs the application under uvicorn."""

from __future__ import annotations

import uvicorn

from mie.async_llm import AsyncLLM
from mie.serve.app import create_app
from mie.serve.config import ServeConfig


def serve(engine: AsyncLLM, config: ServeConfig) -> int:
    """Serve until a signal ends it, and return the exit code."""
    app = create_app(engine, config)
    options = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        root_path=config.root_path,
        log_level="info",
        access_log=False,
        timeout_keep_alive=65,
    )
    try:
        uvicorn.Server(options).run()
    finally:
        engine.shutdown()
    return 0
