"""Several models behind one server: loaded on demand within a budget, and unloaded after use.

Everything runs in the event loop, except work that reads files or waits for an engine. One task
loads and unloads models, one after the other, in the order in which requests asked for them.
"""

import asyncio
import gc
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from mie.base.threads import call_in_thread
from mie.config.arguments import format_size
from mie.errors import MieError, ThreadLimitError, TooLittleMemoryError
from mie.frontend.async_llm import AsyncLLM
from mie.load.directory import ModelsDirectory, PlannedModel
from mie.serve.app import EngineEdge
from mie.serve.catalogue import Catalogue, Model
from mie.serve.errors import ApiError, api_error, invalid, too_many, unavailable
from mie.serve.health import ending
from mie.serve.page.processes import Worker
from mie.serve.serving import without_paths

logger = logging.getLogger(__name__)

MAX_SECONDS = 1e8
"""From this number of seconds on, a time is forever."""

Job = Callable[[], Awaitable[object]]


class Models:
    """The models of a folder. Some of them are loaded."""

    def __init__(
        self,
        directory: ModelsDirectory,
        load: Callable[[PlannedModel], AsyncLLM],
        *,
        max_models: int | None,
        max_waiting: int,
        on_rejection: Callable[[str], object],
        new_edge: Callable[[str, AsyncLLM], Awaitable[EngineEdge]],
    ) -> None:
        """At most ``max_models`` are loaded at once, and ``max_waiting`` requests of a client wait.

        ``new_edge`` opens the routes of a model that was loaded.
        """
        self.catalogue = Catalogue(directory)
        self._load = load
        self._max_models = max_models
        self._max_waiting = max_waiting
        self._on_rejection = on_rejection
        self._new_edge = new_edge
        self._num_waiting: Counter[str | None] = Counter()
        self._num_uses = 0
        self._jobs: deque[Job] = deque()
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # a model idles, or a request waits no more
        self._loader = Worker("mie-load")
        self._lock = threading.Lock()  # held while a model is loaded
        self._engines: set[AsyncLLM] = set()
        self._loaded: list[AsyncLLM] = []  # the model that the thread has loaded last
        self._is_closed = False

    @property
    def edges(self) -> list[EngineEdge]:
        """The engines that are loaded, with their routes."""
        return [model.edge for model in self.catalogue.loaded if model.edge is not None]

    # Use.

    @asynccontextmanager
    async def using(self, model: Model, client: str | None) -> AsyncIterator[EngineEdge]:
        """Return a context in which a model stays loaded. It is loaded first if it is not.

        Raises:
            ApiError: it cannot be loaded, or too many requests of the client wait.
        """
        if model.is_ready:
            assert model.edge is not None
            edge = model.edge
            self._enter(model)
        else:
            edge = await self._wait(model, client)
        try:
            yield edge
        finally:
            self._leave(model)

    async def _wait(self, model: Model, client: str | None) -> EngineEdge:
        if self._is_closed:
            raise ending()
        if self._num_waiting[client] >= self._max_waiting:
            self._on_rejection("max_num_queued_reqs")
            raise too_many(
                f"the queue is full: {self._max_waiting} requests wait for models to be loaded "
                "(try again in 5 s)",
                "queue_full",
                5,
            )
        waiter: asyncio.Future[EngineEdge] = asyncio.get_running_loop().create_future()
        self.catalogue.keep(model)
        model.waiters.append(waiter)
        self._num_waiting[client] += 1
        if not model.is_coming:
            model.is_coming = True
            self._do(partial(self._bring, model))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(model)  # it was let in at the moment at which its client left
            raise
        finally:
            self._num_waiting[client] -= 1
            if waiter in model.waiters:
                model.waiters.remove(waiter)
            self._news.set()

    def _enter(self, model: Model) -> None:
        model.num_users += 1
        self._touch(model)
        if model.timer is not None:
            model.timer.cancel()
        model.timer = model.expires_at = None

    def _leave(self, model: Model) -> None:
        model.num_users -= 1
        self._touch(model)
        if not model.num_users and not self._is_closed:
            self.let_expire(model)
        self._news.set()

    def _touch(self, model: Model) -> None:
        self._num_uses += 1
        model.last_used = self._num_uses

    def _admit(self, model: Model) -> None:
        """Admit the requests that wait for a model."""
        assert model.edge is not None
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                self._enter(model)
                waiter.set_result(model.edge)

    def _refuse(self, model: Model, error: ApiError) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def let_expire(self, model: Model) -> None:
        """Unload a model after its ``keep_alive``, unless a request comes."""
        if model.timer is not None:
            model.timer.cancel()
            model.timer = model.expires_at = None
        if model.edge is not None and model.keep_alive < MAX_SECONDS and not model.num_users:
            loop = asyncio.get_running_loop()
            model.expires_at = loop.time() + model.keep_alive
            model.timer = loop.call_later(model.keep_alive, self.unload, model)

    def unload(self, model: Model) -> None:
        """Unload a model when no request uses it. Requests that come meanwhile wait."""
        if model.edge is not None and not model.is_leaving:
            model.is_leaving = True
            self._do(partial(self._go, model))

    # The task that loads and unloads.

    def _do(self, job: Job) -> None:
        self._jobs.append(job)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        while self._jobs:
            try:
                await self._jobs.popleft()()
            except Exception as error:
                logger.error("a model was not unloaded: %r", error, exc_info=error)

    async def _bring(self, model: Model) -> None:
        """Load a model, unless nothing waits for it any more."""
        try:
            if model.is_ready or not model.waiters or self._is_closed:
                return
            if model.edge is not None:  # its engine is dead
                await self._free(model)
            planned = await self._loader.call(partial(self.catalogue.directory.plan, model.path))
            self._check_budget(model, planned)
            if not await self._make_room(model, planned.num_bytes):
                return
            await self._loader.call(partial(self._load_here, planned))
            engine = self._loaded.pop()
            try:
                model.edge = await self._new_edge(model.name, engine)
            except BaseException:
                await call_in_thread(self._end, engine)
                raise
            model.num_bytes, model.has_failed, model.keep_alive = planned.num_bytes, False, math.inf
        except Exception as error:
            model.has_failed = True
            self._refuse(model, _failure(model, error))
        finally:
            model.is_coming = False
            if model.edge is not None:
                self._admit(model)
                self.let_expire(model)

    def _check_budget(self, model: Model, planned: PlannedModel) -> None:
        budget = self.catalogue.directory.memory_bytes
        if planned.num_bytes > budget:
            raise invalid(
                f"the model {model.name} takes {format_size(planned.num_bytes)}; all models may "
                f"take {format_size(budget)} together (raise --models-memory, or choose a smaller "
                "model or --kv-cache-memory-bytes)",
                "model",
                code="model_too_large",
            )

    async def _make_room(self, model: Model, num_bytes: int) -> bool:
        """Unload the models that were used least recently, idle ones first, until one fits.

        Return False if no request waits for it any more.
        """
        while self._lacks(num_bytes):
            victim = min(
                self.catalogue.loaded, key=lambda each: (each.num_users > 0, each.last_used)
            )
            victim.is_leaving = True
            if not await self._idle(victim, lambda: bool(model.waiters)):
                victim.is_leaving = False
                self._admit(victim)
                return False
            await self._free(victim)
        return True

    def _lacks(self, num_bytes: int) -> bool:
        """Return whether a model of this size needs room that others take."""
        loaded = self.catalogue.loaded
        num_all = sum(each.num_bytes for each in loaded) + num_bytes
        is_full = self._max_models is not None and len(loaded) >= self._max_models
        return bool(loaded) and (is_full or num_all > self.catalogue.directory.memory_bytes)

    async def _idle(self, model: Model, is_wanted: Callable[[], bool]) -> bool:
        """Wait until no request uses a model, or return False if that is not wanted any more."""
        while model.num_users:
            if self._is_closed or not is_wanted():
                return False
            self._news.clear()
            await self._news.wait()
        return not self._is_closed and is_wanted()

    async def _go(self, model: Model) -> None:
        if model.edge and model.is_leaving and await self._idle(model, lambda: True):
            await self._free(model)

    async def _free(self, model: Model) -> None:
        """Unload a model now."""
        assert model.edge is not None
        engine, page = model.edge.engine, model.edge.page
        model.edge, model.is_leaving, model.num_bytes = None, False, 0
        await page.close()
        await call_in_thread(self._end, engine)
        del engine, page
        await call_in_thread(gc.collect)  # routes and engine refer to each other
        logger.info("unloaded %s", model.name)

    def _load_here(self, planned: PlannedModel) -> None:
        with self._lock:
            if self._is_closed:
                raise ending()
            engine = self._load(planned)
            self._engines.add(engine)
            self._loaded.append(engine)  # the thread would remember a result

    def _end(self, engine: AsyncLLM) -> None:
        engine.shutdown()
        self._engines.discard(engine)

    # The end.

    def close(self) -> None:
        """Refuse the requests that wait for a model."""
        self._is_closed = True
        for model in self.catalogue.waited_for:
            self._refuse(model, ending())
        self._news.set()

    def shut_down(self) -> None:
        """End all engines. It waits, also for a model that is being loaded."""
        with self._lock:
            for engine in tuple(self._engines):
                self._end(engine)
        self._loader.close()


def _failure(model: Model, error: Exception) -> ApiError:
    """Return the error for the requests that wait for a model, and log the whole error."""
    if isinstance(error, ApiError):
        return error
    is_known = isinstance(error, MieError)
    logger.error("%s cannot be loaded: %s", model.name, error, exc_info=None if is_known else error)
    text = without_paths(api_error(error).message, [model.path])
    message = f"the model {model.name} cannot be loaded: {text}"
    if isinstance(error, (TooLittleMemoryError, ThreadLimitError)):
        return unavailable(message, 5)
    return ApiError(500, message, code="model_load_failed", param="model")
