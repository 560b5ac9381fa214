"""Hand the outputs of requests to one asyncio task."""

import asyncio
from collections.abc import Callable
from functools import partial

from mie.base.stats.request import RequestMetrics
from mie.frontend.answer import Answer
from mie.frontend.collector import Collector
from mie.frontend.loop import EngineLoop
from mie.frontend.outputs import RequestOutput

Hold = Callable[[Callable[[], object]], object]
"""Calls its argument in the event loop's thread, at a moment that it chooses."""


class OutputStream(Collector):
    """The outputs of requests that were added together, for one task.

    while stream.num_unfinished:
        await stream.arrival
        for output in stream.take():
            …

    The future ``arrival`` costs half of an `asyncio.Event` that is cleared after every wait.
    """

    event_loop: asyncio.AbstractEventLoop

    def __init__(self, loop: EngineLoop, count: int) -> None:
        """Create a stream for the outputs of ``count`` requests that are still to be added."""
        super().__init__(loop.note_gone)
        self.answers: list[Answer] = []
        """The answers to the requests, once they are added to the engine."""
        self.num_unfinished = count
        """Requests with a final output that was not taken yet."""
        self.event_loop = asyncio.get_running_loop()
        self._loop = loop
        self._hold: Hold | None = None
        self._arrival: asyncio.Future[None] = self.event_loop.create_future()

    @property
    def arrival(self) -> asyncio.Future[None]:
        """The future that is done when there may be something to take.

        Raises:
            EngineDeadError: the engine cannot go on.
        """
        if not self.has_news:
            self._loop.check_alive()
        return self._arrival

    @property
    def num_generated(self) -> int:
        """The number of tokens that the requests got so far."""
        return sum(seq.num_generated for each in self.answers for seq in each.request.sequences)

    @property
    def metrics(self) -> list[RequestMetrics]:
        """The times and counts so far of each request that was added to the engine."""
        return [each.request.metrics for each in self.answers]

    def take(self) -> list[RequestOutput]:
        self._arrival = self.event_loop.create_future()
        outputs = super().take()
        for output in outputs:
            self.num_unfinished -= output.finished
        return outputs

    def close(self) -> None:
        if self.num_unfinished:
            self.num_unfinished = 0
            # A command, because the command that adds the requests may still be in the inbox.
            self._loop.post(partial(self._loop.processor.drop, self.request_ids))

    def arrive(self) -> None:
        if self._hold is None:
            self.nudge()
        else:
            self._hold(self.nudge)

    def delay(self, hold: Hold) -> None:
        """From now on, ``hold`` chooses when the task gets new outputs."""
        self._hold = hold

    def nudge(self) -> None:
        """End the wait for `arrival`, in the event loop's own thread."""
        if not self._arrival.done():
            self._arrival.set_result(None)

    def progress(self) -> tuple[int, int]:
        """Return the number of computed tokens of unfinished prompts, and of all their tokens."""
        requests = [answer.request for answer in self.answers]
        unfinished = [request for request in requests if not request.is_finished]
        computed = sum(min(r.sequences[0].num_computed, r.num_prompt) for r in unfinished)
        return computed, sum(request.num_prompt for request in unfinished)
