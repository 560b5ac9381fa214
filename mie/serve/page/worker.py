"""A thread of the page's own, so that its work never waits for, or delays, what requests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mie.system.threads import refusal_explained

T = TypeVar("T")


class Worker:
    """Calls functions one after the other in its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[object] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a function runs, even if its caller has left."""
        return self._last is not None and not self._last.done()

    async def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns. It is dropped if its caller leaves before it begins."""
        with refusal_explained(self._name):
            future = self._executor.submit(function)
        self._last = future  # type: ignore[assignment]  # its result is not read from here
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the function that runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
