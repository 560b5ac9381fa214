"""When streams are written: all that have news at once, and not too often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pace:
    """The beat of all streams.

    Writing chunks takes time from the engine, which computes in the same process. Each chunk
    therefore postpones the next beat, and tokens that arrive before it are merged. Streams that are
    written together also wake the event loop only once.
    """

    def __init__(self, max_per_second: float) -> None:
        """``max_per_second`` is the number of chunks of all streams together; 0 is no limit."""
        self._seconds = 1 / max_per_second if max_per_second else 0.0
        self._waiting: list[Callable[[], object]] = []
        self._earliest = 0.0

    def hold(self, go: Callable[[], object]) -> None:
        """Call ``go`` at the next beat."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._earliest - loop.time()), self.beat)
        self._waiting.append(go)

    def beat(self) -> None:
        """Let everything go that is held."""
        waiting, self._waiting = self._waiting, []
        now = asyncio.get_running_loop().time()
        self._earliest = now + len(waiting) * self._seconds
        for go in waiting:
            go()
