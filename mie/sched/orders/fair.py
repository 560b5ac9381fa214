"""Admit the client that was served least, so that no client waits because another sends more.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024): each client has a counter of the tokens that it was served. `mie.sched.orders.shares`
finds who makes way, and docs/scheduling.md has the rules and the bounds.
"""

from collections import Counter
from weakref import WeakKeyDictionary

from mie.config.engine import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.memory.table import Emit
from mie.sched.draft import Budget
from mie.sched.orders.shares import Client, Shares
from mie.sched.queue import WaitingQueue
from mie.sched.rows import RunningRows, insert, remove
from mie.sched.sequence import LOGPROBS_PER_TOKEN, Request, Sequence

NOT_RANKED = 2**53
"""The rank of requests that were never admitted: behind all admitted requests."""


def cost(request: Request) -> int:
    """Return the cost of all tokens and log-probabilities that a request was served so far.

    A token of an answer counts twice, as in the paper, because each takes a step. Prompt tokens
    from the prefix cache cost nothing, and neither do tokens that a preemption lost.
    """
    if request.rank == NOT_RANKED:
        return 0
    num_generated = sum(seq.num_generated for seq in request.sequences)
    num_computed = request.num_prompt - request.metrics.num_cached_tokens
    return num_computed + 2 * num_generated + request.num_logprobs // LOGPROBS_PER_TOKEN


class FairQueue(WaitingQueue):
    """The client that was served least first, and each client's requests in order of arrival."""

    victim = "last of the client with the largest share"

    def __init__(
        self, config: EngineConfig, rows: RunningRows, manager: KVCacheManager, emit: Emit
    ) -> None:
        super().__init__(config, rows, manager, emit)
        self._shares = Shares(config, rows, manager)
        self._charged: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """The cost that each request was charged so far."""
        self.served: dict[Client, float] = {}
        """The counters above the floor: the cost of each client, divided by the client's weight."""
        self._floor = 0.0
        """The smallest counter of the clients that wait. No client's counter is below it."""
        self._num_ranked = 0
        self._queues: dict[Client, list[Sequence]] = {}
        """The waiting sequences of each client."""

    def clear(self) -> None:
        super().clear()
        self._queues.clear()

    # Counters.

    def _counter(self, client: Client) -> float:
        return self.served.get(client, self._floor)

    def _charge(self, request: Request) -> None:
        charged = self._charged.get(request, 0)
        due = cost(request) - charged
        if due:
            self._charged[request] = charged + due
            weight = self._shares.quota(request.client).weight
            self.served[request.client] = self._counter(request.client) + due / weight

    def _charge_running(self) -> None:
        """Charge the running requests. A client saves nothing up while it does not wait."""
        for request in dict.fromkeys(seq.request for seq in self._rows.running):
            self._charge(request)
        if self._queues:
            self._floor = floor = min(map(self._counter, self._queues))
            self.served = {each: n for each, n in self.served.items() if n > floor}

    # The queue.

    def rank(self, request: Request, step: int) -> int:
        """Raise the counter of a client that begins to wait. The request gets its rank later."""
        if request.client not in self._queues:
            self._charge_running()
        if not self._queues:
            self.served, self._floor = {}, 0.0  # none was kept waiting, so none had too much
        return NOT_RANKED

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        insert(self._queues.setdefault(seq.request.client, []), seq)

    def remove(self, seq: Sequence) -> bool:
        is_there = super().remove(seq)
        if is_there:
            queue = self._queues[seq.request.client]
            remove(queue, seq)
            if not queue:
                del self._queues[seq.request.client]
        return is_there

    def first(self) -> Sequence | None:
        """Return the first sequence of the client that was served least and may have a row.

        Among clients that were served equally, the client with the fewest rows is next. A prompt
        that was preempted before its first token does not count against its client.
        """
        num_rows = self._num_rows()
        floor = min(map(self._counter, self._queues), default=0.0)

        def order(seq: Sequence) -> tuple[object, ...]:
            request, client = seq.request, seq.request.client
            weight, served = self._shares.quota(client).weight, self._counter(client)
            if not any(each.num_generated for each in request.sequences):
                served = max(served - self._charged.get(request, 0) / weight, floor)
            return served, num_rows[client] / weight, seq.key

        heads = [queue[0] for queue in self._queues.values()]
        allowed = [seq for seq in heads if self._num_allowed(seq.request.client, num_rows) > 0]
        return min(allowed, key=order, default=None)

    def _num_rows(self) -> Counter[Client]:
        """Return the number of rows that each client has, or that its choices take."""
        return Counter(seq.request.client for seq in (*self._rows.running, *self._rows.forking))

    def _num_allowed(self, client: Client, num_rows: Counter[Client]) -> int:
        """Return how many more rows a client's quota allows."""
        most = self._shares.quota(client).max_num_seqs
        return self._config.max_num_seqs if most is None else most - num_rows[client]

    def num_forks(self, seq: Sequence) -> int:
        allowed = self._num_allowed(seq.request.client, self._num_rows())
        return min(super().num_forks(seq), allowed)

    def admit(self, seq: Sequence) -> None:
        """Remove a sequence. Rank a request that is admitted for the first time, and charge it."""
        super().admit(seq)
        request = seq.request
        if request.rank == NOT_RANKED:
            self._num_ranked += 1
            request.set_rank(self._num_ranked)
            self._emit(("rank", seq.seq_id, request.rank))
        self._charge(request)

    def end(self, seq: Sequence) -> bool:
        self._charge(seq.request)
        return super().end(seq)

    # The step.

    def next(self, step: int) -> tuple[Sequence | None, list[Sequence]]:
        """Return the next sequence, unless it finds no place, and those that make way for it."""
        if self._queues:
            self._charge_running()
        first = self.first()
        if first is None or self._config.batching == "static" or self._shares.has_place(first):
            return first, []
        victims = self._shares.victims(first, self._counter, step)
        return (first, victims) if victims else (None, [])

    def budget(self, first: Sequence | None) -> Budget:
        return self._shares.budget(first, self._counter)

    def by_preemption(self, step: int) -> list[Sequence]:
        return self._shares.by_preemption(step)
