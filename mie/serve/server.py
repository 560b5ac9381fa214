"""Runs the application under uvicorn."""

from __future__ import annotations

import asyncio
import sys
from socket import socket

import uvicorn

from mie.async_llm import AsyncLLM
from mie.sched.params import SamplingParams
from mie.serve.app import create_app
from mie.serve.config import ServeConfig


def serve(engine: AsyncLLM, config: ServeConfig) -> int:
    """Serve until a signal ends it, and return the exit code."""
    try:
        return asyncio.run(_serve(engine, config))
    finally:
        engine.shutdown()


async def _serve(engine: AsyncLLM, config: ServeConfig) -> int:
    options = uvicorn.Config(
        create_app(engine, config),
        host=config.host,
        port=config.port,
        root_path=config.root_path,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=65,
    )
    for line in await summary(engine, config):
        print(f"[{line}]", file=sys.stderr, flush=True)
    await _Server(options).serve()
    return 0


class _Server(uvicorn.Server):
    """Says where it listens as soon as it does: with port 0 nothing else knows."""

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"[listening on http://{host}:{port}]", file=sys.stderr, flush=True)


async def summary(engine: AsyncLLM, config: ServeConfig) -> list[str]:
    """Return what the server says when it starts: the model, its cache, and what is in force."""
    facts = await engine.get_model_config()
    neutral, defaults = SamplingParams(), await engine.get_default_sampling_params()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = ", ".join(f"{name}={getattr(defaults, name):g}" for name in names)
    source = "neutral" if defaults == neutral else engine.generation_config.source
    return [
        f"{facts.model} · {facts.backend} · {facts.dtype} · context of "
        f"{facts.max_model_len:,} tokens · {facts.num_blocks:,} blocks of {facts.block_size} "
        f"tokens · at most {facts.max_num_seqs} sequences at once",
        f"sampling defaults ({source}): {values}, max_tokens=16 (chat: the rest of the context)",
    ]
