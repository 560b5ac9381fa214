"""File the results of the engine's steps under the callers of their requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mie.engine.engine import Engine
from mie.engine.step import StepOutput
from mie.errors import RequestError
from mie.frontend.request_state import Collector, CollectorRef, PreparedRequest, RequestState
from mie.sched.sequence import Request
from mie.system.interrupts import is_of_the_request
from mie.text.tokenizer import Tokenizer


class OutputProcessor:
    """The state of every request of an engine. One thread at a time may call it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}
        self._gone: deque[CollectorRef] = deque()
        self.changed: set[CollectorRef] = set()
        """Collectors with news. The code that notifies their callers clears it."""
        self.when_gone: Callable[[], object] = lambda: None
        """Called when a caller is gone, in any thread and between any two lines of it."""

    @property
    def has_gone(self) -> bool:
        """Whether there are requests whose callers are gone."""
        return bool(self._gone)

    def new_collector(self) -> Collector:
        """Return a collector for the requests of one caller."""
        note, tell = self._gone.append, self.when_gone

        def is_gone(collector: CollectorRef) -> None:
            note(collector)
            tell()

        return Collector(is_gone)

    def add_all(self, prepared: Sequence[PreparedRequest], collector: Collector) -> list[str]:
        """Queue requests in the engine, all or none, and return their ids.

        It may be called again after an interrupt at any line.

        Raises:
            RequestError: one of them could never be served; nothing was added.
        """
        self.retract(prepared)
        try:
            return [self._add(each, collector.ref) for each in prepared]
        except RequestError:
            self.retract(prepared)
            raise

    def requests(self, request_ids: Sequence[str]) -> tuple[Request, ...]:
        """Return requests that were added."""
        return tuple(self._states[request_id].request for request_id in request_ids)

    def retract(self, prepared: Sequence[PreparedRequest]) -> None:
        """End those of the requests that were added, without outputs."""
        known = set(map(id, prepared))
        self._drop([i for i, state in self._states.items() if id(state.prepared) in known])

    def _add(self, prepared: PreparedRequest, collector: CollectorRef) -> str:
        """Queue a request in the engine.

        Raises:
            RequestError: the request could never be served; nothing was added.
        """
        request_id = self._engine.add_request(
            prepared.token_ids,
            prepared.params,
            prepared.request_id,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
            client=prepared.client,
            beam=prepared.beam,
            constraint=prepared.constraint,
        )
        request = self._engine.request(request_id)
        assert request is not None
        collector.request_ids.add(request_id)
        if prepared.beam is not None:
            collector.beam_ids.add(request_id)
        self._states[request_id] = RequestState(prepared, request, self._tokenizer, collector)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request, whose caller gets a final output; ignore an unknown id."""
        self._engine.abort(request_id)
        self._advance(request_id)

    def process(self, step: StepOutput) -> None:
        """Process the output of a step."""
        for request_id in {output.request_id: None for output in step.outputs}:
            self._advance(request_id)
        for request_id in step.failed:
            self._advance(request_id)

    def drop_orphans(self) -> None:
        """Abort the requests whose callers are gone."""
        while self._gone:
            self.drop(self._gone[0])
            self._gone.popleft()

    def drop(self, collector: CollectorRef) -> None:
        """End the requests of a caller that wants no more outputs."""
        self._drop(list(collector.request_ids))
        collector.request_ids.clear()
        self.release(collector)

    def release(self, collector: CollectorRef, keep: Sequence[str] = ()) -> None:
        """Free the blocks that a caller's finished beams keep, except for ``keep``."""
        dropped = collector.beam_ids - {*keep, *collector.request_ids}
        self._engine.release(list(dropped))
        collector.beam_ids -= dropped

    def catch_up(self) -> None:
        """Process everything that an exception has prevented from being processed."""
        self._engine.recover()
        for request in self._engine.requests:
            if request.request_id not in self._states:  # its caller did not get its id
                self._engine.abort(request.request_id)
        for request_id in list(self._states):
            self._advance(request_id)

    def drop_all(self) -> None:
        """Forget every request, in a forked child whose parent serves them."""
        self._states.clear()
        self._gone.clear()
        self.changed.clear()
        self._engine.drop_all()

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
            self._states.pop(request_id, None)

    def _advance(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is None:
            return
        try:
            state.advance()
        except Exception as error:
            if not is_of_the_request(error):
                raise
            state.fail()
            self._engine.fail(request_id, error)
            state.advance()
        for choice in state.stopped():
            self._engine.finish(request_id, choice.sequence.index, "stop", choice.stop_reason)
        collector = state.collector()
        if collector is not None and state.file(collector):
            self.changed.add(state.collector)
        if state.is_finished:
            state.collector.request_ids.discard(request_id)
            del self._states[request_id]
