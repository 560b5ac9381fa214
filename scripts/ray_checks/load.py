"""Send requests to a server, and read their answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from serve_checks.server import KEY, RunningServer
from starlette.types import ASGIApp

from mie.lab.metrics import RequestRecord, summarize

PATIENCE = 600.0
"""Seconds after which a request hangs, also on a machine that is busy with other programs."""
COMPLETIONS = "/v1/completions"
VOCAB_SIZE = 2000
"""Token ids below this number are in the bundled model's vocabulary."""
FIGURES = ("p99_itl_ms", "mean_tpot_ms", "p99_ttft_ms", "output_throughput")
"""The results of `mie.lab.metrics` that are stated."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where requests go: a server's address, or an application of this process."""

    url: str = "http://here"
    key: str = KEY
    app: ASGIApp | None = None

    @classmethod
    def of(cls, server: RunningServer) -> Site:
        """Return where a server is."""
        return cls(url=server.url, key=server.key)


def client_of(site: Site) -> httpx2.AsyncClient:
    """Return a client that may have 128 requests at once."""
    return httpx2.AsyncClient(
        base_url=site.url,
        headers={"Authorization": f"Bearer {site.key}"},
        timeout=PATIENCE,
        limits=httpx2.Limits(max_connections=128),
        transport=None if site.app is None else httpx2.ASGITransport(site.app),
    )


def seeded(number: int) -> dict[str, Any]:
    """Return one of many different requests. The seed fixes its answer."""
    if number % 3 == 0:
        content = f"Tell me story {number} of a fox."
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": number}
    return {"prompt": f"Story {number}: Once upon a time", "max_tokens": 8, "seed": number}


async def answers(site: Site, requests: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the choices of each answer; all run at once, 32 at a time."""
    gate = asyncio.Semaphore(32)

    async def ask(body: dict[str, Any]) -> Any:
        path = "/v1/chat/completions" if "messages" in body else COMPLETIONS
        async with gate:
            answer = await client.post(path, json=body)
        return answer.json()["choices"] if answer.status_code == 200 else answer.text

    async with client_of(site) as client:
        return await asyncio.gather(*map(ask, requests))


async def end_of_stream(client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    """Stream a completion, and return how it ended: complete, error, 503, or another fault."""
    last, has_reason = "", False
    try:
        async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                is_retried = response.headers.get("retry-after") is not None
                return str(response.status_code) if is_retried else "no retry-after"
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last, before = line[6:], last
                    has_reason |= '"finish_reason": "length"' in line
    except httpx2.TransportError as error:
        return f"cut: {error!r}"
    if last != "[DONE]":
        return "no [DONE]"
    if "error" in json.loads(before):
        return "error"
    return "complete" if has_reason else "no finish_reason"


async def latencies(site: Site) -> dict[str, float]:
    """Return the latencies of 64 streams at once in milliseconds, and tokens a second."""
    async with client_of(site) as client:
        start = time.perf_counter_ns()
        records = await asyncio.gather(*(_timed(client, start, number) for number in range(64)))
    found = summarize(records, max(record.end_ns or 0 for record in records))
    return {name: round(found[name] or 0.0, 1) for name in FIGURES}


async def _timed(client: httpx2.AsyncClient, start: int, number: int) -> RequestRecord:
    """Stream 48 tokens after a random prompt of 32, and record when each token arrives."""
    prompt = random.Random(number).choices(range(VOCAB_SIZE), k=32)
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    record = RequestRecord(request_id=str(number), num_prompt=len(prompt), arrival_ns=0)
    times: list[int] = []
    record.token_ns = [times]
    more = {"stream": True, "return_token_ids": True}
    async with client.stream("POST", COMPLETIONS, json={**body, **more}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter_ns() - start
                [choice] = json.loads(line[6:])["choices"]
                times += [now] * len(choice["token_ids"])
    return record


@asynccontextmanager
async def under_load(
    site: Site, num_clients: int = 8, pause: float = 0.1
) -> AsyncIterator[Counter[str]]:
    """Send requests all the time, and count the status of their answers.

    Each client pauses between its requests, to leave CPU time to replicas that start.
    """
    counts: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def ask(place: int) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            body = {"prompt": f"Client {place}, request {number}", "max_tokens": 8, "seed": 1}
            try:
                answer = await client.post(COMPLETIONS, json=body)
                counts[str(answer.status_code)] += 1
            except httpx2.TransportError as error:
                counts[repr(error)] += 1
            await asyncio.sleep(pause)

    async with client_of(site) as client:
        tasks = [asyncio.ensure_future(ask(place)) for place in range(num_clients)]
        try:
            yield counts
        finally:
            is_over.set()
            await asyncio.gather(*tasks)


async def labelled(site: Site, name: str) -> dict[str, float]:
    """Return a metric of each replica. The metric of a plain server has no name."""
    async with client_of(site) as client:
        text = (await client.get("/metrics")).raise_for_status().text
    values: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line.startswith(f"{name}{{"):
            _, label, rest = line.partition('{replica="')
            values[rest.partition('"')[0] if label else ""] += float(line.rpartition(" ")[2])
    return dict(values)


async def eventually(look: Any) -> bool:
    """Wait until ``look`` returns True, and return whether it did in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while loop.time() < end:
        if await look():
            return True
        await asyncio.sleep(0.1)
    return False


async def hit_rate(site: Site) -> float:
    """Return which part of prompts is cached where three requests share each beginning."""
    async with client_of(site) as client:
        (await client.post("/reset_prefix_cache")).raise_for_status()
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    before = [sum((await labelled(site, name)).values()) for name in names]
    for turn in range(3):
        prompts = ({"prompt": f"Topic {topic}. " * 60, "max_tokens": 1} for topic in range(30))
        await answers(site, [{**each, "prompt": f"{each['prompt']}{turn}"} for each in prompts])
    after = [sum((await labelled(site, name)).values()) for name in names]
    hits, queries = (now - start for now, start in zip(after, before, strict=True))
    return round(hits / queries, 3)
