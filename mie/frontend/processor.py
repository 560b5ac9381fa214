"""File the results of the engine's steps under the callers of their requests."""

from collections import deque
from collections.abc import Callable, Sequence

from mie.base.stats.step import QueueState
from mie.base.threads import is_of_the_request
from mie.engine.engine import Engine
from mie.engine.step import StepOutput
from mie.engine.watch.queue import queue_of
from mie.errors import RequestError
from mie.frontend.answer import Answer
from mie.frontend.collector import Collector, CollectorRef
from mie.frontend.prepare import PreparedRequest
from mie.sched.sequence import Request
from mie.text.tokenizer import Tokenizer


class OutputProcessor:
    """The unfinished requests of an engine. One thread at a time may call it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._answers: dict[str, Answer] = {}
        self.gone: deque[set[str]] = deque()
        """The request ids of each caller that is gone. Any thread may append."""
        self.changed: set[CollectorRef] = set()
        """Collectors with news. The code that notifies their callers clears it."""

    def add_all(
        self,
        prepared: Sequence[PreparedRequest],
        collector: Collector,
        answers: list[Answer],
        check: Callable[[QueueState], object] | None = None,
    ) -> None:
        """Queue requests in the engine, all or none, and fill ``answers`` with their answers.

        ``check`` gets their client's queue, and may refuse them. This method may be called again
        after an interrupt at any line.

        Raises:
            RequestError: one of them could never be served; nothing was added.
        """
        self.retract(answers)
        if check is not None:
            check(queue_of(self._engine, prepared[0].client))
        try:
            for each in prepared:
                each.check_adapter()
                request = self._engine.add(
                    each.token_ids,
                    each.params,
                    each.request_id,
                    priority=each.priority,
                    cache_salt=each.cache_salt,
                    client=each.client,
                    constraint=each.constraint,
                    prediction=each.prediction,
                    adapter=each.adapter.slot if each.adapter else 0,
                )
                answer = Answer(request, each, self._tokenizer, collector.ref)
                answers.append(answer)
                collector.request_ids.add(request.request_id)
                self._answers[request.request_id] = answer
        except RequestError:
            self.retract(answers)
            raise

    def retract(self, answers: list[Answer]) -> None:
        """End requests that were added, without outputs."""
        for answer in answers:
            request_id = answer.request_id
            if self._engine.request(request_id) is answer.request:
                self._engine.abort(request_id)
            if self._answers.get(request_id) is answer:
                del self._answers[request_id]
        answers.clear()

    def abort(self, request_id: str) -> None:
        """End a request; the caller gets a final output. Ignore an unknown id."""
        self._engine.abort(request_id)
        self._advance(request_id)

    def process(self, step: StepOutput) -> None:
        """Process the output of a step."""
        for request_id in (*step.request_ids, *step.failed):
            self._advance(request_id)

    def drop_orphans(self) -> None:
        """Drop the requests of callers that are gone."""
        while self.gone:
            self.drop(self.gone[0])
            self.gone.popleft()

    def drop(self, request_ids: set[str]) -> None:
        """End a caller's requests without outputs."""
        for request_id in list(request_ids):
            self._engine.abort(request_id)
            self._answers.pop(request_id, None)
        request_ids.clear()

    def catch_up(self) -> None:
        """Process everything that an exception has prevented from being processed."""
        self._engine.recover()
        for request in self._engine.requests:
            if request.request_id not in self._answers:  # its caller did not get its id
                self._engine.abort(request.request_id)
        for request_id in list(self._answers):
            self._advance(request_id)

    @property
    def has_requests(self) -> bool:
        """Whether any request is not answered yet."""
        return bool(self._answers)

    def fail_largest(self) -> None:
        """End the request that takes the most memory, so that the others can go on."""
        if not self._answers:
            return
        requests = {each.request: each for each in self._answers.values()}
        largest = max(requests, key=lambda request: (num_values(request), request.number))
        error = MemoryError(
            "the memory did not suffice for the next step, and this request of "
            f"{largest.num_prompt} prompt tokens was the largest (try again later, shorten the "
            "prompt, or ask for fewer choices or log-probabilities)"
        )
        self._fail(requests[largest], error)
        self._file(requests[largest])

    def drop_all(self) -> None:
        """Drop every request in a forked child. The parent serves them."""
        self._answers.clear()
        self.gone.clear()
        self.changed.clear()
        self._engine.drop_all()

    def collectors(self) -> set[CollectorRef]:
        """Return the collectors of unfinished requests."""
        return {answer.collector for answer in self._answers.values()}

    def _advance(self, request_id: str) -> None:
        answer = self._answers.get(request_id)
        if answer is None:
            return
        try:
            has_news = answer.advance()
        except Exception as error:
            if not is_of_the_request(error):
                raise
            self._fail(answer, error)
            has_news = True
        if has_news:
            self._file(answer)

    def _file(self, answer: Answer) -> None:
        """Pass a request's new output to its caller, and drop the request if it is answered."""
        request_id = answer.request_id
        for choice in answer.stopped() if answer.reads_steps else ():
            self._engine.finish(request_id, choice.sequence.index, "stop", choice.stop_reason)
        collector = answer.collector()
        if collector is not None and answer.file(collector):
            self.changed.add(answer.collector)
        if answer.is_answered:
            if collector is not None:
                collector.request_ids.discard(request_id)
            del self._answers[request_id]

    def _fail(self, answer: Answer, error: Exception) -> None:
        """End a request with an error, also if the engine has computed its last step."""
        self._engine.fail(answer.request, error)
        answer.fail(error)


def num_values(request: Request) -> int:
    """Return the number of tokens that a request holds, and of log-probabilities with tokens."""
    return sum(seq.num_tokens for seq in request.sequences) + 2 * request.num_logprobs
