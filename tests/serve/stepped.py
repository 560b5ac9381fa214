"""An engine whose steps a test allows one by one."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from audit import engine_of, loop_of
from deadlines import PATIENCE

from mie import AsyncLLM


class Stepped:
    """Holds an engine before each of its steps."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.llm = engine
        self.engine = engine_of(engine)
        self.scheduler = self.engine.scheduler
        self._asked = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._is_free = False
        self._is_held = False
        self._original: Callable[[], Any] = self.engine.step
        self.engine.step = self._step  # type: ignore[method-assign]

    def _step(self) -> Any:
        if not self._is_free:
            self._asked.release()
            self._allowed.acquire()
        return self._original()

    def hold(self) -> None:
        """Wait until the engine is about to compute a step."""
        if not self._is_held:
            assert self._asked.acquire(timeout=PATIENCE), "the engine does not step"
            self._is_held = True

    def step(self) -> None:
        """Let the engine compute its next step and the calls that are posted then."""
        self.hold()
        self._is_held = False
        self._allowed.release()

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """Let the engine step until something is so, and hold it before the next step."""
        for _ in range(500):
            self.hold()
            if is_so():
                return
            self.step()
        raise AssertionError("it does not come so far")

    def between_steps(self, function: Callable[[], Any]) -> Any:
        """Call a function in the engine's thread, after all that was posted before it. The engine
        must not be held."""
        return asyncio.run(loop_of(self.llm).call_async(function))

    def free(self) -> None:
        """Hold the engine no longer."""
        self._is_free = True
        self._allowed.release()


def eventually(is_so: Callable[[], bool]) -> None:
    """Wait until something that another thread does is so."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def state_of(stepped: Stepped, request_id: str) -> str:
    """Where a request is: queued, prefilling, decoding, preempted or swapped."""
    request = stepped.engine.request(request_id)
    assert request is not None
    [*sequences] = request.sequences
    if any(sequence in stepped.scheduler.running for sequence in sequences):
        first = sequences[0]
        return "decoding" if first.num_generated else "prefilling"
    if any(sequence.host is not None for sequence in sequences):
        return "swapped"
    return "preempted" if request.metrics.num_preemptions else "queued"
