"""Share the engine fairly between clients: each backlogged client is served as many tokens.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024). Each client has a counter of the tokens that it was served, and the client with the
smallest counter is admitted next. A client that begins to wait is lifted to the smallest counter
among those that wait, so that it cannot save up service while it is idle. No length of an answer
has to be known in advance.

A request is ranked when it is admitted, behind all that were admitted before it. From then on its
key is fixed, as under every policy: the request that was admitted last is preempted first, and
preempted sequences come back before new requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from mie.config.engine import EngineConfig
from mie.memory.moves import Emit
from mie.sched.policy import Policy
from mie.sched.sequence import Request, Sequence

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Weights of tokens; the paper counts those of an answer twice, because each takes a step."""

NOT_RANKED = 2**53
"""The rank of requests that were never admitted: behind all that were."""

MOST_ACCOUNTS = 1024
"""Counters that are kept before superfluous ones are dropped."""


def cost(request: Request) -> int:
    """Return the weighted number of tokens that a request was served so far.

    Prompt tokens from the prefix cache cost nothing, and neither does what a preemption lost.
    """
    if request.rank == NOT_RANKED:
        return 0
    num_computed = request.num_prompt - request.metrics.num_cached_tokens
    num_generated = sum(seq.num_generated for seq in request.sequences)
    return PROMPT_WEIGHT * num_computed + OUTPUT_WEIGHT * num_generated


class FairPolicy(Policy):
    """Admits the client that was served least. Counters outlast a rebuild of the queues."""

    def __init__(self, config: EngineConfig, emit: Emit) -> None:
        super().__init__(config, emit)
        self.served: Counter[str | None] = Counter()
        """The weighted tokens that each client was served."""
        self._last: str | None = None
        """The client whose request was admitted last."""
        self._num_admitted = 0
        self._most_accounts = MOST_ACCOUNTS
        # Requests that were never admitted, by client. Those that have left are dropped lazily.
        self._new: defaultdict[str | None, deque[Request]] = defaultdict(deque)

    def rank(self, request: Request, step: int, running: Iterable[Sequence]) -> int:
        """Lift the counter of a client that begins to wait. Its request is ranked later."""
        client, heads = request.client, self._heads()
        if client not in heads:
            self._charge(running)
            others = heads.keys() or (self._last,)
            floor = min(self.served[other] for other in others)
            self.served[client] = max(self.served[client], floor)
            if len(self.served) > self._most_accounts:
                self._drop_superfluous(floor)
        self._new[client].append(request)
        return NOT_RANKED

    def first(self, waiting: list[Sequence]) -> Sequence:
        """Return the first sequence that comes back, or the head of the client served least."""
        if waiting[0].request.rank != NOT_RANKED:
            return waiting[0]
        heads = self._heads()
        client = min(heads, key=lambda client: (self.served[client], heads[client].number))
        leader = heads[client].leader
        assert leader is not None, "a request that waits has a leader"
        return leader

    def _heads(self) -> dict[str | None, Request]:
        """Return the first request of each client that was never admitted."""
        for client in list(self._new):
            requests = self._new[client]
            while requests and (requests[0].rank != NOT_RANKED or requests[0].is_finished):
                requests.popleft()
            if not requests:
                del self._new[client]
        return {client: requests[0] for client, requests in self._new.items()}

    def restart(self, requests: Iterable[Request]) -> None:
        """Note the requests anew. `_heads` drops those that are not new."""
        self._new.clear()
        for request in requests:
            self._new[request.client].append(request)

    def settle(self, running: Iterable[Sequence]) -> None:
        """Charge what the running requests were served since they were last charged."""
        if self._new:
            self._charge(running)

    def _charge(self, running: Iterable[Sequence]) -> None:
        for request in dict.fromkeys(seq.request for seq in running):
            self.leave(request)

    def admit(self, seq: Sequence) -> None:
        """Rank a request that is admitted for the first time, and charge its prompt."""
        request = seq.request
        if request.rank == NOT_RANKED:
            self._num_admitted += 1
            request.set_rank(self._num_admitted)
            self._emit(("rank", seq.seq_id, request.rank))
            self._last = request.client
            self.leave(request)

    def leave(self, request: Request) -> None:
        """Charge what a request was served since it was last charged."""
        due = cost(request) - request.num_charged
        if due:
            request.num_charged += due
            self.served[request.client] += due

    def _drop_superfluous(self, floor: int) -> None:
        """Forget counters that do not exceed ``floor``: their clients would be lifted to it."""
        kept = {*self._new, self._last}
        for client, served in [*self.served.items()]:
            if served <= floor and client not in kept:
                del self.served[client]
        self._most_accounts = max(MOST_ACCOUNTS, 2 * len(self.served))
