"""File the results of the engine's steps under the callers of their requests."""

from collections import deque
from collections.abc import Callable, Sequence

from mie.base.stats.step import QueueState
from mie.base.threads import is_of_the_request
from mie.engine.engine import Engine
from mie.engine.step import StepOutput
from mie.errors import RequestError
from mie.frontend.request_state import Collector, CollectorRef, PreparedRequest
from mie.text.tokenizer import Tokenizer


class OutputProcessor:
    """The unfinished requests of an engine. One thread at a time may call it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._states: dict[str, PreparedRequest] = {}
        self.gone: deque[set[str]] = deque()
        """The request ids of each caller that is gone. Any thread may append."""
        self.changed: set[CollectorRef] = set()
        """Collectors with news. The code that notifies their callers clears it."""

    def add_all(
        self,
        prepared: Sequence[PreparedRequest],
        collector: Collector,
        check: Callable[[QueueState], object] | None = None,
    ) -> list[str]:
        """Queue requests in the engine, all or none, and return their ids.

        ``check`` gets their client's queue, and may refuse them. This method may be called again
        after an interrupt at any line.

        Raises:
            RequestError: one of them could never be served; nothing was added.
        """
        self.retract(prepared)
        if check is not None:
            check(self._engine.queue(prepared[0].client))
        try:
            for each in prepared:
                self._engine.add(each)
                collector.request_ids.add(each.request_id)
                each.begin(self._tokenizer, collector.ref)
                self._states[each.request_id] = each
        except RequestError:
            self.retract(prepared)
            raise
        return [each.request_id for each in prepared]

    def retract(self, prepared: Sequence[PreparedRequest]) -> None:
        """End those of the requests that were added, without outputs."""
        for each in prepared:
            if self._engine.request(each.request_id) is each:
                self._engine.abort(each.request_id)
            if self._states.get(each.request_id) is each:
                del self._states[each.request_id]
            each.sequences = []

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
        """Drop the requests whose callers are gone."""
        while self.gone:
            self.drop(self.gone[0])
            self.gone.popleft()

    def drop(self, request_ids: set[str]) -> None:
        """End a caller's requests without outputs."""
        for request_id in list(request_ids):
            self._engine.abort(request_id)
            self._states.pop(request_id, None)
        request_ids.clear()

    def catch_up(self) -> None:
        """Process everything that an exception has prevented from being processed."""
        self._engine.recover()
        for request in self._engine.requests:
            if request.request_id not in self._states:  # its caller did not get its id
                self._engine.abort(request.request_id)
        for request_id in list(self._states):
            self._advance(request_id)

    @property
    def has_requests(self) -> bool:
        """Whether any request is not answered yet."""
        return bool(self._states)

    def fail_largest(self) -> None:
        """End the request that takes the most memory, so that the others can go on."""
        if not self._states:
            return
        largest = max(self._states.values(), key=lambda state: (state.size, state.number))
        error = MemoryError(
            "the memory did not suffice for the next step, and this request of "
            f"{largest.num_prompt} prompt tokens was the largest (try again later, shorten the "
            "prompt, or ask for fewer choices or log-probabilities)"
        )
        self._fail(largest, error)
        self._file(largest)

    def drop_all(self) -> None:
        """Forget every request, in a forked child whose parent serves them."""
        self._states.clear()
        self.gone.clear()
        self.changed.clear()
        self._engine.drop_all()

    def collectors(self) -> set[CollectorRef]:
        """Return the collectors of unfinished requests."""
        return {state.collector for state in self._states.values()}

    def _advance(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is None:
            return
        try:
            state.advance()
        except Exception as error:
            if not is_of_the_request(error):
                raise
            self._fail(state, error)
        self._file(state)

    def _file(self, state: PreparedRequest) -> None:
        """Hand a request's news to its caller, and forget the request if it is answered."""
        request_id = state.request_id
        for choice in state.stopped():
            self._engine.finish(request_id, choice.sequence.index, "stop", choice.stop_reason)
        collector = state.collector()
        if collector is not None and state.file(collector):
            self.changed.add(state.collector)
        if state.is_answered:
            if collector is not None:
                collector.request_ids.discard(request_id)
            del self._states[request_id]

    def _fail(self, state: PreparedRequest, error: Exception) -> None:
        """End a request with an error, also if the engine has computed its last step."""
        self._engine.fail(state, error)
        state.fail(error)
