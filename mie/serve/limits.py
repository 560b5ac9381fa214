"""Limits on the requests and tokens of a client that wait."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Scope

from mie.base.stats.step import QueueState
from mie.errors import RequestError
from mie.frontend.async_llm import AsyncLLM
from mie.frontend.prepare import PreparedRequest
from mie.sched.sequence import LOGPROBS_PER_TOKEN
from mie.serve.config import ServeConfig
from mie.serve.errors import MAX_RETRY_AFTER, invalid, too_many


class QueueFull(RequestError):
    """The queue has no room for a request."""

    def __init__(self, limit: str, message: str, wait: float) -> None:
        """``limit`` is the name of the limit, and ``wait`` how long requests wait now, in s."""
        super().__init__(message)
        self.limit = limit
        self.retry_after = max(1, min(math.ceil(wait), MAX_RETRY_AFTER))


class QueueLimit:
    """Refuses requests while too many of the same client wait.

    Waiting requests are counted in the engine's thread when requests are added, so that no burst
    passes between counting and adding. A request with a free seat does not count, because it does
    not wait. Under the fair policy each key has its own queue, so that a client that floods the
    server does not keep others out.
    """

    def __init__(
        self, engine: AsyncLLM, config: ServeConfig, on_rejection: Callable[[str], object]
    ) -> None:
        """``on_rejection`` gets the name of a limit that refused a request."""
        self._engine = engine
        self._max_num_seqs = engine.engine_config.max_num_seqs
        self._is_fair = engine.engine_config.scheduling_policy == "fair"
        self._max_reqs = config.max_waiting(self._max_num_seqs)
        self._max_tokens = config.max_num_queued_tokens
        self._on_rejection = on_rejection
        self._num_entering: Counter[str | None] = Counter()
        self._max_answer_bytes = config.max_answer_bytes
        self.answer_bytes: Counter[str | None] = Counter()
        """Memory of the log-probabilities of answers that are being made, by client."""

    def client_of(self, scope: Scope) -> str | None:
        """Return the client for which the engine counts a request."""
        return scope.get("mie.client") if self._is_fair else None

    @contextmanager
    def entering(self, client: str | None, num_reqs: int) -> Iterator[None]:
        """Return a context in which a client's requests are prepared and added.

        A flood is refused before its prompts are tokenized.

        Raises:
            ApiError: the queue is full, already before the requests are prepared or when they are
                added; or it could never take so many at once.
        """
        most, num_seats = self._max_reqs, self._max_num_seqs
        if num_reqs > most + num_seats:
            raise invalid(
                f"prompt has {num_reqs} prompts; the server takes {most} that wait and "
                f"{num_seats} that run (send fewer at once)",
                "prompt",
            )
        self._num_entering[client] += num_reqs
        try:
            queue = self._engine.queue(client)
            self._check_reqs(queue, num_reqs - queue.num_free_seats + queue.num_requests)
            self._check_reqs(queue, self._num_entering[client] - num_seats)
            yield
        except QueueFull as full:
            self._on_rejection(full.limit)
            message = f"{full} (try again in {full.retry_after} s)"
            raise too_many(message, "queue_full", full.retry_after) from None
        finally:
            self._num_entering[client] -= num_reqs

    def check(
        self, prepared: Sequence[PreparedRequest], num_logprobs: int, queue: QueueState
    ) -> None:
        """Raise `QueueFull` if there is no room for these. The engine's thread calls this.

        Their answers may have ``num_logprobs`` log-probabilities.
        """
        self._check_reqs(queue, len(prepared) - queue.num_free_seats + queue.num_requests)
        most = self._max_tokens
        got = queue.num_tokens + sum(len(each.token_ids) for each in prepared)
        got += num_logprobs // LOGPROBS_PER_TOKEN
        if most is not None and queue.num_requests and got > most:
            raise _full("max_num_queued_tokens", f"{got} prompt tokens", most, queue)

    def hold_answer(self, client: str | None, num_bytes: int, planned: int) -> None:
        """Count the memory of an answer with log-probabilities, until `release_answer`.

        Of several keys, each may take half of the memory. ``planned`` is the default limit.

        Raises:
            ApiError: the answer is too large, or the answers that are being made leave no room.
        """
        limit = planned if self._max_answer_bytes is None else self._max_answer_bytes
        own_limit = limit if client is None else limit // 2
        if num_bytes > own_limit:
            raise invalid(
                f"logprobs: the answer may take {num_bytes} bytes with its log-probabilities; the "
                f"limit is {own_limit} (ask for fewer of them, or for a shorter answer; "
                "--max-answer-bytes raises the limit)",
                "logprobs",
            )
        got = self.answer_bytes.total() + num_bytes
        if got > limit or self.answer_bytes[client] + num_bytes > own_limit:
            self._on_rejection("max_answer_bytes")
            raise too_many(
                "the answers that are being made leave no memory for another one with "
                f"{num_bytes} bytes of log-probabilities, and --max-answer-bytes is {limit} (try "
                "again in 1 s)",
                "queue_full",
                1,
            )
        self.answer_bytes[client] += num_bytes

    def release_answer(self, client: str | None, num_bytes: int) -> None:
        """Count an answer no more, because it was sent or given up."""
        self.answer_bytes[client] -= num_bytes
        if not self.answer_bytes[client]:
            del self.answer_bytes[client]

    def _check_reqs(self, queue: QueueState, num_queued: int) -> None:
        if num_queued > self._max_reqs:
            raise _full("max_num_queued_reqs", f"{num_queued} requests", self._max_reqs, queue)


def _full(limit: str, got: str, most: int, queue: QueueState) -> QueueFull:
    option = limit.replace("_", "-")
    message = f"the queue is full: {got} would wait, and --{option} is {most}"
    return QueueFull(limit, message, queue.longest_wait)
