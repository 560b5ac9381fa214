"""Collect the answers of one caller."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from mie.frontend.outputs import RequestOutput

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from mie.frontend.answer import Answer


class Collector:
    """The answers of one caller, where the thread that turns the loop files them.

    A request exists as long as its collector. When the caller drops the collector, the request is
    aborted.
    """

    event_loop: AbstractEventLoop | None = None
    """The event loop of a task that waits for outputs, to which `arrive` belongs."""

    def __init__(self, note_gone: Callable[[set[str]], object] = lambda request_ids: None) -> None:
        """``note_gone`` gets the ids of unfinished requests when the caller is gone."""
        self.request_ids: set[str] = set()
        """The ids of its unfinished requests. The engine's thread writes."""
        self.process_id = os.getpid()
        self._note_gone = note_gone
        self.ref: CollectorRef = weakref.ref(self)
        """The reference that requests hold. Nothing in the engine holds the collector itself."""
        hash(self.ref)  # it cannot be hashed for the first time once the collector is gone
        self._news: deque[Answer] = deque()
        self._lock = threading.Lock()  # Several threads may call `LLM.step`.

    def close(self) -> None:
        """End the requests before the next step. It never waits."""
        # An exception may have come before the first line of ``__init__``.
        request_ids = getattr(self, "request_ids", None)
        if request_ids and self.process_id == os.getpid():
            self._note_gone(request_ids)

    __del__ = close

    def arrive(self) -> None:
        """Mark that outputs have arrived. It is called in the thread of ``event_loop``."""

    @property
    def has_news(self) -> bool:
        """Whether `take` returns anything."""
        return bool(self._news)

    def take(self) -> list[RequestOutput]:
        """Return one output for each request with news, merged since the last call."""
        outputs = []
        with self._lock:
            while self._news:
                output = self._news[0].take()
                self._news.popleft()
                if output is not None:
                    outputs.append(output)
        return outputs

    def file(self, answer: Answer) -> None:
        """Note that an answer has news."""
        self._news.append(answer)


CollectorRef: TypeAlias = "weakref.ref[Collector]"
