"""The hit rates of routers: those of Ray, and vLLM's."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
from serve_checks.server import serving

from mie.ray.config import ROUTERS
from ray_checks.deployment import OPTIONS, Checks, Deployment
from ray_checks.load import Site, answers, client_of, eventually, labelled


async def hit_rate(site: Site, replicas: Sequence[Site] = ()) -> float:
    """Return which part of prompts is cached where three requests share each beginning.

    The caches are those of ``replicas``, or of the servers behind the site.
    """
    for each in replicas or (site,):
        async with client_of(each) as client:
            (await client.post("/reset_prefix_cache")).raise_for_status()

    async def counted(name: str) -> float:
        counts = [await labelled(each, name) for each in replicas or (site,)]
        return sum(sum(count.values()) for count in counts)

    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    before = [await counted(name) for name in names]
    for turn in range(3):
        prompts = ({"prompt": f"Topic {topic}. " * 60, "max_tokens": 1} for topic in range(30))
        await answers(site, [{**each, "prompt": f"{each['prompt']}{turn}"} for each in prompts])
    hits, queries = [await counted(name) - start for name, start in zip(names, before, strict=True)]
    return round(hits / queries, 3)


async def compare_routers(checks: Checks) -> None:
    """Measure the hit rate of every router by name."""
    for name in ROUTERS:
        # The application is another one each time: Ray keeps the handle of one, and its router.
        deployment = Deployment(f"with-{name}", num_replicas=3, request_router=name)
        checks.figures[f"hit rate, {name}"] = await hit_rate(await deployment.change())
        await deployment.end()


async def measure_vllm_router(checks: Checks, directory: Path, command: str) -> None:
    """Measure the hit rate of three servers behind vLLM's router, which is no part of Ray."""
    with ExitStack() as stack:
        logs = (directory / f"server {number}" for number in range(3))
        servers = [Site.of(stack.enter_context(serving(log, OPTIONS))) for log in logs]
        for policy in ("cache_aware", "random"):
            with behind(servers, directory / policy, [command, "--policy", policy]) as router:
                assert await eventually(lambda router=router: answers_models(router))
                rate = await hit_rate(router, servers)
            checks.figures[f"hit rate, vllm-router {policy}"] = rate


@contextmanager
def behind(servers: Sequence[Site], log: Path, command: Sequence[str]) -> Iterator[Site]:
    """Run vLLM's router in front of servers."""
    port = free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    urls = ["--worker-urls", *(server.url for server in servers)]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *options, *urls], stdout=file, stderr=file)
        try:
            yield Site(url=f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait()


async def answers_models(site: Site) -> bool:
    """Return whether a server behind the router answers."""
    try:
        async with client_of(site) as client:
            return (await client.get("/v1/models")).status_code == 200
    except httpx2.TransportError:
        return False


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
