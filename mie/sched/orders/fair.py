"""Admit the client that was served least, so that no client waits because another sends more.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024). A client without a row takes one from the client with the largest share (dominant
resource fairness, Ghodsi et al., NSDI 2011). docs/scheduling.md has the rules and the bounds.
"""

from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from weakref import WeakKeyDictionary

from mie.config.engine import ClientQuota, EngineConfig, quotas_of
from mie.memory.manager import KVCacheManager
from mie.sched.admission import find_allocation
from mie.sched.draft import Budget
from mie.sched.limits import max_chunk, watermark_blocks
from mie.sched.orders.parts import ClientBudget, split
from mie.sched.queue import WaitingQueue
from mie.sched.rows import RunningRows, insert, remove
from mie.sched.sequence import LOGPROBS_PER_TOKEN, Request, Sequence

TURN = 16
"""The default of ``fair_turn``."""

_NO_QUOTA = ClientQuota()


def cost(request: Request) -> int:
    """Return the cost of all tokens and log-probabilities that a request was served so far.

    A token of an answer counts twice, as in the paper, because each takes a step. Prompt tokens
    from the prefix cache cost nothing, and neither do tokens that a preemption lost.
    """
    num_generated = sum([seq.num_generated for seq in request.sequences])
    if not num_generated and not any(seq.table for seq in request.sequences):
        return 0
    num_computed = request.num_prompt - request.metrics.num_cached_tokens
    return num_computed + 2 * num_generated + request.num_logprobs // LOGPROBS_PER_TOKEN


class FairQueue(WaitingQueue):
    """The client that was served least first, and each client's requests in order of arrival."""

    victim = "last of the client with the largest share"

    def __init__(self, config: EngineConfig, rows: RunningRows, manager: KVCacheManager) -> None:
        super().__init__(config, rows, manager)
        self._quotas, self._turn = quotas_of(config.client_quotas), config.fair_turn or TURN
        self._watermark_blocks = watermark_blocks(config, manager)
        self._charged: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """The cost that each request was charged so far."""
        self.served: dict[str | None, float] = {}
        """The counter of each client: the charged costs, divided by the client's weight."""
        self._queues: dict[str | None, list[Sequence]] = {}
        """The waiting sequences of each client."""

    def _quota(self, client: str | None) -> ClientQuota:
        return self._quotas.get(client or "", _NO_QUOTA)

    def _charge(self, *seqs: Sequence) -> None:
        """Charge the requests of sequences for all that they were served since the last charge."""
        for request in dict.fromkeys([seq.request for seq in seqs]):
            client, due = request.client, cost(request)
            paid = (due - self._charged.get(request, 0)) / self._quota(client).weight
            self.served[client] = self.served.get(client, 0.0) + paid
            self._charged[request] = due

    # The queue.

    def clear(self) -> None:
        super().clear()
        self._queues.clear()

    def add(self, seq: Sequence) -> None:
        """Add a sequence. A client that begins to wait has saved nothing up."""
        super().add(seq)
        self._charge(seq)
        client = seq.request.client
        if client not in self._queues:
            self._charge(*self._rows.running)
            if not self._queues:
                self.served.clear()  # none was kept waiting, so none had too much
            floor = min([self.served[each] for each in self._queues], default=0.0)
            self.served = {each: num for each, num in self.served.items() if num >= floor}
            self.served.setdefault(client, floor)
        insert(self._queues.setdefault(client, []), seq)

    def remove(self, seq: Sequence) -> bool:
        self._charge(seq)
        is_there = super().remove(seq)
        if is_there:
            client = seq.request.client
            remove(self._queues[client], seq)
            if not self._queues[client]:
                del self._queues[client]
        return is_there

    def first(self) -> Sequence | None:
        """Return the first sequence of the client that was served least and may have a row.

        Among clients that were served equally, the client with the fewest rows is next.
        """
        num_rows = self._num_rows()
        order = [
            (self.served[client], num_rows[client], queue[0].key, queue[0])
            for client, queue in self._queues.items()
            if num_rows[client] < self._most_rows(client)
        ]
        return min(order)[-1] if order else None

    def _num_rows(self) -> Counter[str | None]:
        """Return the number of rows that each client has, or that its choices take."""
        return Counter([seq.request.client for seq in (*self._rows.running, *self._rows.forking)])

    def _most_rows(self, client: str | None) -> int:
        # Without a quota, a client that has every row may still be next.
        return self._quota(client).max_num_seqs or self._config.max_num_seqs + 1

    def num_forks(self, seq: Sequence) -> int:
        first, client = self.first(), seq.request.client
        if first and first.request.client != client:
            return 0
        num_allowed = self._most_rows(client) - self._num_rows()[client]
        return min(super().num_forks(seq), num_allowed)

    # Making way.

    def make_way(self, first: Sequence, step: int) -> Iterator[Sequence]:
        """Yield sequences to preempt until ``first`` has a place, if its client has no row.

        A sequence makes way after ``fair_turn`` steps, the largest share first.
        """
        running, client = self._rows.running, first.request.client
        has_row = any(seq.request.client == client for seq in running)
        if has_row or self._config.batching == "static":
            return
        for seq, (may_leave, _) in reversed(self._shares().items()):
            # Each sequence that continues may need a block before ``first`` is admitted.
            if not may_leave or self._has_place(first, num_spare=len(running)):
                return
            if step - seq.running_since[0] >= self._turn:
                yield seq

    def _has_place(self, first: Sequence, num_spare: int = 0) -> bool:
        """Whether a sequence can be admitted now, beside the tokens of all that run."""
        if not self._rows.num_free:
            return False
        num_reserved = self._watermark_blocks + num_spare if self._rows.running else 0
        found = find_allocation(self._manager, first, num_reserved)
        if found is None or self._config.enable_chunked_prefill:
            return found is not None
        num_left = self._config.max_num_batched_tokens - len(self._rows.running)
        return first.num_tokens - found.num_computed <= num_left

    def by_preemption(self) -> list[Sequence]:
        return [*self._shares()]

    def _shares(self) -> dict[Sequence, tuple[bool, float]]:
        """Return whether each running sequence may make way, and its client's share with it.

        Each client's first sequence is safe until it has got ``fair_turn`` tokens. The safe ones
        come first, the oldest first, and then the others by share, the smallest first.
        """
        shares: dict[Sequence, tuple[bool, float]] = {}
        most_rows, most_blocks = self._config.max_num_seqs, self._manager.num_blocks
        held: dict[str | None, tuple[int, int]] = {}
        for seq in self._rows.running:
            client, (since, num_tokens) = seq.request.client, seq.running_since
            num_rows, num_blocks = held.get(client, (0, 0))
            held[client] = num_rows, num_blocks = num_rows + 1, num_blocks + seq.num_blocks
            if num_rows == 1 and seq.num_tokens < num_tokens + self._turn:
                shares[seq] = False, since
            else:
                share = max(num_rows / most_rows, num_blocks / most_blocks)
                shares[seq] = True, share / self._quota(client).weight
        return dict(sorted(shares.items(), key=itemgetter(1)))

    def budget(self, first: Sequence | None) -> Budget:
        """Divide a step's tokens between clients if they are too few for all."""
        if len(self._queues) > 1:
            self._charge(*self._rows.running)
        total, most = self._config.max_num_batched_tokens, max_chunk(self._config)
        wanted = Counter[str | None]()
        for seq in (*self._rows.running, *([first] if first and self._has_place(first) else ())):
            wanted[seq.request.client] += min(seq.num_missing, most)
        if not self._config.enable_chunked_prefill or sum(wanted.values()) <= total:
            return Budget(total)
        weights = {client: self._quota(client).weight for client in wanted}
        return ClientBudget(total, split(total, wanted, weights))
