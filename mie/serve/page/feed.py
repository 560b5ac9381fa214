"""The live stream of the page: one task follows the engine for all pages that are open."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from mie.engine.watch.look import Look
from mie.engine.watch.metrics import Snapshot
from mie.errors import EngineDeadError
from mie.frontend.async_llm import AsyncLLM
from mie.page.cells import Cells, encode
from mie.page.follow import Place
from mie.serve.errors import ApiError
from mie.serve.page.processes import Child, Worker

logger = logging.getLogger(__name__)

Line = tuple[str, bytes]
"""A page record: its kind, and its JSON."""

TICK_SECONDS = 0.1
"""Time between two looks at the engine."""
LINGER_TICKS = 50
"""Number of ticks that the engine is followed after the last page has left. It may come back."""
TRUTH_TICKS = 10
"""Ticks between two comparisons of the page, `/metrics` and the engine."""
MAX_BEHIND_TICKS = 20
MAX_BEHIND_BYTES = 4 << 20
"""Maximum backlog of one page. A page that is further behind gets the whole state instead."""
KEEP_ALIVE_SECONDS = 2.0
"""A page reports it if nothing arrives for more than twice this time."""
MAX_RECENT = 200
"""Events that are kept for a page that comes back."""
MAX_PAGES = 64
"""Pages that may be open at once."""

METRICS = {
    "num_running": ("vllm:num_requests_running", None),
    "num_waiting": ("vllm:num_requests_waiting", None),
    "num_blocks_used": ("mie:kv_blocks", "used"),
    "num_blocks_cached": ("mie:kv_blocks", "cached"),
    "num_blocks_free": ("mie:kv_blocks", "free"),
    "num_preemptions": ("vllm:num_preemptions", None),
    "num_hit_tokens": ("vllm:prefix_cache_hits", None),
    "num_copies": ("mie:cow_copies", None),
    "num_evicted": ("mie:blocks_evicted", None),
    "num_exported": ("mie:blocks_swapped_out", None),
    "num_imported": ("mie:blocks_swapped_in", None),
}
"""The counts of `Look`, and the metrics that must be equal: name and label ``state``."""


class Page:
    """One open page: the events that it has not read yet."""

    def __init__(self) -> None:
        self.needs_key = True
        """Whether it gets the whole state next, because it has none or was too slow."""
        self.is_reading = False
        """Whether it has read everything and waits."""
        self._queue: deque[bytes] = deque()
        self.num_bytes = 0
        """Bytes of the events that the page has yet to read."""
        self._news = asyncio.Event()

    @property
    def is_hungry(self) -> bool:
        """Whether it waits for the whole state."""
        return self.needs_key and self.is_reading

    def put(self, events: bytes) -> None:
        """Queue events. If too many wait, they are dropped, and it needs a key."""
        self._queue.append(events)
        self.num_bytes += len(events)
        if len(self._queue) > MAX_BEHIND_TICKS or self.num_bytes > MAX_BEHIND_BYTES:
            self._clear()
            self.needs_key = True
            return
        self.wake()

    def begin(self, key: bytes) -> None:
        """Give it the whole state, however large that is."""
        self._clear()
        self._queue.append(key)
        self.needs_key = False
        self.wake()

    def wake(self) -> None:
        """End the wait for events."""
        self._news.set()

    async def take(self) -> bytes:
        """Wait for events, and return all that came; nothing after a long time without any."""
        self.is_reading = True
        timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self.wake)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
            self.is_reading = False
        events = b"".join(self._queue)
        self._clear()
        return events

    def _clear(self) -> None:
        self._queue.clear()
        self.num_bytes = 0
        self._news.clear()


class Feed:
    """Follows the engine while a page is open. Nothing is computed while none is."""

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self._engine = engine
        self._name = name
        self.pages: set[Page] = set()
        """The pages that are open."""
        self.run_id = secrets.token_hex(4)
        """Distinguishes this run of the server from others at the same address."""
        self._number = 0  # the number of the last event
        self._recent: deque[tuple[int, bytes]] = deque()
        self.child: Child | None = None
        """The process that replays, while the engine is followed."""
        self._step: int | None = None  # the last step that the child has taken in
        self._head = b""
        self._why_ended = ""
        self._task: asyncio.Task[None] | None = None
        self._is_ready: asyncio.Future[None] | None = None
        self._worker = Worker("mie-page-feed")
        self._asker = Worker("mie-page-ask")  # self._worker sleeps between two looks
        self._num_idle_ticks = 0
        self._is_truth_due = True

    # Pages.

    async def events(self, last_event_id: str | None) -> AsyncGenerator[bytes, None]:
        """Return the stream of one page. It ends when the page leaves or the engine ends.

        Raises:
            ApiError: too many pages are open, or the engine cannot be followed.
            EngineDeadError: the engine cannot go on.
        """
        if len(self.pages) >= MAX_PAGES:
            raise ApiError(429, f"{MAX_PAGES} pages are open (close one)")
        await self.ready()
        return self._events(last_event_id)

    async def _events(self, last_event_id: str | None) -> AsyncGenerator[bytes, None]:
        page = Page()
        missed = self._since(last_event_id)
        if missed is not None:
            page.needs_key = False
            page.put(missed)
        if self._step is not None:
            yield _event("head", self._head)
        self.pages.add(page)
        try:
            while self._is_following:
                yield await page.take() or _event("alive", b'{"record":"alive"}')
            why = self._engine.dead_error or self._why_ended
            yield _event("end", encode({"record": "end", "reason": str(why)}).encode())
        finally:
            self.pages.discard(page)

    def _since(self, last_event_id: str | None) -> bytes | None:
        """Return the events after the last one of a page, or None if they are not here."""
        run_id, _, number = (last_event_id or "").partition(".")
        if run_id != self.run_id or not (number.isascii() and number.isdecimal()):
            return None
        seen = int(number[:20])
        if not self._number - len(self._recent) <= seen <= self._number:
            return None
        return b"".join(events for number, events in self._recent if number > seen)

    # The follower, also for other questions of the page.

    @property
    def _is_following(self) -> bool:
        return self._task is not None and not self._task.done()

    async def ready(self) -> None:
        """Wait until the engine is followed.

        Raises:
            ApiError: the engine keeps no event log.
            EngineDeadError: the engine cannot go on.
        """
        self._num_idle_ticks = 0
        if not self._is_following:
            self._is_ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.ensure_future(self._run(self._is_ready))
        assert self._is_ready is not None
        await asyncio.shield(self._is_ready)

    async def key(self) -> bytes:
        """Return the record of the state that the pages show.

        Raises:
            ApiError: the engine cannot be followed.
            EngineDeadError: the engine cannot go on.
        """
        return await self._ask("key")  # type: ignore[no-any-return]  # from `Follower.key`

    async def tokens(
        self, blocks: Sequence[int]
    ) -> tuple[int, dict[int, Sequence[int]], dict[int, Place]]:
        """Return the tokens of blocks, as `mie.page.follow.Follower.tokens` does.

        Raises:
            ApiError: the engine cannot be followed.
            EngineDeadError: the engine cannot go on.
        """
        return await self._ask("tokens", blocks)  # type: ignore[no-any-return]

    async def _ask(self, method: str, *arguments: Any) -> Any:
        await self.ready()
        child = self.child
        if child is None:
            raise EngineDeadError("the engine has ended")
        return await self._asker.call(lambda: child.call(method, *arguments))

    async def close(self) -> None:
        """End all streams, the process and the thread."""
        await self.stop_following()
        self._end_child()
        self._worker.close()
        self._asker.close()

    async def stop_following(self) -> None:
        """End all streams. A page that comes back begins again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _end_child(self) -> None:
        if self.child is not None:
            self.child.close()
        self.child = self._step = None

    # The task.

    async def _run(self, is_ready: asyncio.Future[None]) -> None:
        """Follow the engine until no page is open, or the engine ends."""
        tick = 0
        self._why_ended = "the server no longer follows the engine (reload the page)"
        try:
            while self._num_idle_ticks <= LINGER_TICKS:
                with_metrics = self._is_truth_due and tick % TRUTH_TICKS == 0
                await self.tick(TICK_SECONDS if tick else 0, with_metrics=with_metrics)
                if not is_ready.done():
                    is_ready.set_result(None)
                self._num_idle_ticks = 0 if self.pages else self._num_idle_ticks + 1
                tick += 1
        except Exception as error:
            self._why_ended = str(error)
            if not is_ready.done():
                is_ready.set_exception(error)
            elif not isinstance(error, EngineDeadError):
                logger.exception("the page's live stream ends: %r", error)
        finally:
            if not is_ready.done():
                is_ready.set_exception(EngineDeadError("the server ends"))
                is_ready.exception()  # it may be that nothing waits for it
            self._end_child()
            for page in self.pages:
                page.wake()

    async def tick(self, delay: float = 0, *, with_metrics: bool = False) -> None:
        """Look at the engine once, after a delay, and queue the new events for each page."""
        child = self.child = self.child or Child()
        step = self._step

        def follow() -> tuple[int, list[Line], bytes]:
            time.sleep(delay)  # here, so that the event loop wakes only once for each look
            look = self._engine.look_and_wait(step, with_metrics=with_metrics)
            needs_key = any(page.is_hungry for page in tuple(self.pages))
            return self._follow(child, look, needs_key=needs_key)

        self._step, lines, key = await self._worker.call(follow)
        first = self._number + 1
        if lines and lines[0][0] == "head":
            self._head = lines.pop(0)[1]
            self._recent.clear()
        is_change = any(kind != "truth" for kind, _ in lines)
        self._is_truth_due = is_change or (self._is_truth_due and not with_metrics)
        for line in lines:
            self._number += 1
            self._recent.append((self._number, self._numbered(line)))
        self._drop_old(first)
        events = b"".join(events for number, events in self._recent if number >= first)
        for page in self.pages:
            if page.is_hungry and key:
                page.begin(self._numbered(("key", key)))
                self._is_truth_due = True  # A state has no truth, and the last one may be past.
            elif not page.needs_key and events:
                page.put(events)

    def _follow(
        self, child: Child, look: Look, *, needs_key: bool
    ) -> tuple[int, list[Line], bytes]:
        """Pass a look at the engine to the child.

        Return the number of the last step, the records for every page, and the record of the whole
        state if a page needs it. A head comes first if the replay began again.

        Raises:
            ApiError: the engine keeps no event log, or the child has ended.
        """
        head = None
        if look.segments is not None:
            if not look.segments:
                raise ApiError(
                    409,
                    "the engine keeps no event log, which the page shows (start the server "
                    "without --event-log-steps 0)",
                    code="no_event_log",
                )
            last = look.segments[-1]
            log = (last.after, last.snapshot, last.steps)
            head = child.call("begin", *log, self._name, self.run_id)
        step, lines = child.call("follow", look.steps, look.rest, look.counts)
        key = child.call("key") if needs_key or head is not None else b""
        if head is not None:  # pages that were open begin again
            lines = [("head", head), ("key", key)]
        if look.metrics is not None:
            truth = self._truth(step, look.counts, look.metrics)
            lines.append(("truth", encode(truth).encode()))
        return step, lines, key

    def _drop_old(self, first: int) -> None:
        """Drop old events before ``first``. The events from ``first`` on are about to be sent."""
        num_bytes = sum(len(events) for _, events in self._recent)
        while self._recent and self._recent[0][0] < first:
            if len(self._recent) <= MAX_RECENT and num_bytes <= MAX_BEHIND_BYTES:
                break
            num_bytes -= len(self._recent.popleft()[1])

    def _truth(self, step: int, counts: Mapping[str, int], metrics: Snapshot) -> Cells:
        found = {(m.name, m.labels.get("state")): m for m in metrics.read(self._name)}
        named = {name: found[key].value for name, key in METRICS.items()}  # type: ignore[attr-defined]
        return {"record": "truth", "step": step, "server": counts, "metrics": named}

    def _numbered(self, line: Line) -> bytes:
        """Return a record as the event that has the last number."""
        return f"id: {self.run_id}.{self._number}\n".encode() + _event(*line)


def _event(kind: str, record: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), record)
