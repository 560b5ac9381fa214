"""A day of load in an hour: many short requests, one after another from each client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx2

from serve_checks.server import RunningServer


@dataclass
class Soak:
    """The latencies of all requests in seconds, in the order of their starts, and the failures."""

    seconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def run(
        self,
        server: RunningServer,
        num_requests: int,
        *,
        num_clients: int = 8,
        max_tokens: int = 4,
        at_request: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Send the requests; ``at_request`` is called before each of them."""
        self.seconds = [0.0] * num_requests
        numbers = iter(range(num_requests))
        headers = {"Authorization": f"Bearer {server.key}"}
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=600) as client:

            async def one_client() -> None:
                for number in numbers:
                    at_request(number)
                    body = {
                        "prompt": f"Request {number % 1000}",
                        "max_tokens": max_tokens,
                        "seed": number,
                        "ignore_eos": True,
                    }
                    began = time.perf_counter()
                    response = await client.post("/v1/completions", json=body)
                    self.seconds[number] = time.perf_counter() - began
                    usage = response.json().get("usage") or {}
                    if usage.get("completion_tokens") != max_tokens:
                        self.failed.append(f"{response.status_code}: {response.text[:200]}")

            await asyncio.gather(*(one_client() for _ in range(num_clients)))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which ``percent`` of the values are."""
    return sorted(values)[int(percent / 100 * (len(values) - 1))]


def p99_of_ends(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the p99 of the first and of the last tenth."""
    tenth = max(1, len(seconds) // 10)
    return percentile(seconds[:tenth], 99), percentile(seconds[-tenth:], 99)
