"""Share the engine fairly between clients: seats, blocks, and the tokens of a step.

Who is admitted next follows the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024). Each client has a counter of the tokens that it was served, and the
client with the smallest counter is next. A client saves nothing up while it does not wait. No
length of an answer has to be known in advance.

If the next client finds no seat or too few blocks, it takes them from the client that holds the
largest share. A client's share is the larger one of its shares of seats and blocks (dominant
resource fairness, Ghodsi et al., NSDI 2011). `FairPolicy.victims` says who may be preempted, and
docs/scheduling.md says within how many steps a client is served.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from mie.config.engine import ClientQuota, EngineConfig, quotas_of
from mie.memory.manager import KVCacheManager
from mie.memory.table import Emit
from mie.sched.policy import Budget, Policy
from mie.sched.seats import dequeue, enqueue
from mie.sched.sequence import LOGPROBS_PER_TOKEN, Request, Sequence

K = TypeVar("K")

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Weights of tokens; the paper counts those of an answer twice, because each takes a step."""

NOT_RANKED = 2**53
"""The rank of requests that were never admitted: behind all that were."""

TURN = 16
"""The default of ``fair_turn``."""

MOST_ACCOUNTS = 1024
"""Counters that are kept before superfluous ones are dropped."""


def cost(request: Request) -> int:
    """Return the weighted number of tokens and log-probabilities that a request was served so far.

    Prompt tokens from the prefix cache cost nothing, and neither do tokens that a preemption lost.
    """
    if request.rank == NOT_RANKED:
        return 0
    num_generated = sum(seq.num_generated for seq in request.sequences)
    num_computed = request.num_prompt - request.metrics.num_cached_tokens
    tokens = PROMPT_WEIGHT * num_computed + OUTPUT_WEIGHT * num_generated
    return tokens + request.num_logprobs // LOGPROBS_PER_TOKEN


class FairPolicy(Policy):
    """Admits the client that was served least, and takes places from those that hold most.

    Counters outlast a rebuild of the queues.
    """

    is_shared = True

    def __init__(self, config: EngineConfig, emit: Emit, manager: KVCacheManager) -> None:
        super().__init__(config, emit, manager)
        self.served: defaultdict[str | None, float] = defaultdict(float)
        """The weighted tokens that each client was served, divided by the client's weight."""
        self._quotas = quotas_of(config.client_quotas)
        self._turn = config.fair_turn or TURN
        self._num_admitted = 0
        self._most_accounts = MOST_ACCOUNTS

    def clear(self) -> None:
        super().clear()
        self._queues: dict[str | None, list[Sequence]] = {}
        """The waiting sequences of each client."""

    def _quota(self, client: str | None) -> ClientQuota:
        return self._quotas.get(client or "", _NO_QUOTA)

    # Counters.

    def rank(self, request: Request, step: int) -> int:
        """Lift the counter of a client that begins to wait. Its request is ranked later."""
        client = request.client
        if client not in self._queues:
            self._charge_all()
            if not self._queues:
                self.served.clear()  # no client was kept waiting, so none was served too much
            else:
                floor = self._floor()
                self.served[client] = max(self.served[client], floor)
                if len(self.served) > self._most_accounts:
                    self._drop_superfluous(floor)
        return NOT_RANKED

    def _floor(self) -> float:
        return min(self.served[client] for client in self._queues)

    def settle(self) -> None:
        """Charge the running sequences. Clients that do not wait save nothing up."""
        if self._queues:
            self._charge_all()
            floor = self._floor()
            for client in {seq.request.client for seq in self.seats.running} - self._queues.keys():
                self.served[client] = max(self.served[client], floor)

    def _charge_all(self) -> None:
        for request in dict.fromkeys(seq.request for seq in self.seats.running):
            self.charge(request)

    def charge(self, request: Request) -> None:
        """Charge the tokens that a request was served since it was last charged."""
        due = cost(request) - request.num_charged
        if due:
            request.num_charged += due
            self.served[request.client] += due / self._quota(request.client).weight

    def _drop_superfluous(self, floor: float) -> None:
        """Forget counters that do not exceed ``floor``: their clients would be lifted to it."""
        for client, served in [*self.served.items()]:
            if served <= floor and client not in self._queues:
                del self.served[client]
        self._most_accounts = max(MOST_ACCOUNTS, 2 * len(self.served))

    # The queue.

    def enqueue(self, seq: Sequence) -> None:
        super().enqueue(seq)
        enqueue(self._queues.setdefault(seq.request.client, []), seq)

    def dequeue(self, seq: Sequence) -> bool:
        is_there = super().dequeue(seq)
        if is_there:
            queue = self._queues[seq.request.client]
            dequeue(queue, seq)
            if not queue:
                del self._queues[seq.request.client]
        return is_there

    def first(self) -> Sequence | None:
        """Return the first sequence of the client served least, of those that may have a seat.

        Of clients that were served alike, the one that holds the fewest seats is next.
        """
        held = self.seats.held
        heads = [each[0] for name, each in self._queues.items() if self._has_right(name, held)]

        def order(seq: Sequence) -> tuple[object, ...]:
            client = seq.request.client
            return self._level(seq), held[client] / self._quota(client).weight, seq.key

        return min(heads, key=order, default=None)

    def _level(self, seq: Sequence) -> float:
        """Return the counter of a waiting sequence's client.

        A prompt that was preempted before its first token does not count against it.
        """
        served = self.served[seq.request.client]
        if any(each.num_generated for each in seq.request.sequences):
            return served
        own = seq.request.num_charged / self._quota(seq.request.client).weight
        return max(served - own, self._floor())

    def _has_right(self, client: str | None, held: Mapping[str | None, int]) -> bool:
        most = self._quota(client).max_num_seqs
        return most is None or held[client] < most

    def num_forks(self, seq: Sequence) -> int:
        """Return the number of seats for choices that fork: none if another client is next."""
        client, first, seats = seq.request.client, self.first(), self.seats
        if first is not None and (first.request.client != client or first.key < seq.key):
            return 0
        most = self._quota(client).max_num_seqs
        return seats.num_free if most is None else min(seats.num_free, most - seats.held[client])

    def admit(self, seq: Sequence) -> None:
        """Rank a request that is admitted for the first time."""
        if seq.request.rank == NOT_RANKED:
            self._num_admitted += 1
            seq.request.set_rank(self._num_admitted)
            self._emit(("rank", seq.seq_id, seq.request.rank))

    # Shares.

    def order(self, step: int) -> list[Sequence]:
        """Return the running sequences; those at the end are preempted if blocks run out.

        Each client's first sequence is safe until it had its turn. The others follow by the share
        that their client holds with them, so that the largest one ends the list.
        """
        running = self.seats.running
        queues = _by_client(running)
        if len(queues) < 2:
            return running[:]
        keys: dict[tuple[int, int], tuple[float, ...]] = {}
        for client, queue in queues.items():
            num_blocks = 0
            for index, seq in enumerate(queue):
                num_blocks += seq.num_blocks
                if index == 0 and not self._had_turn(seq, step, is_first=True):
                    keys[seq.seq_id] = (0, seq.turn[0])
                else:
                    keys[seq.seq_id] = (1, self._share(client, index + 1, num_blocks))
        return sorted(running, key=lambda seq: (keys[seq.seq_id], seq.key))

    def victims(self, head: Sequence, step: int) -> list[Sequence]:
        """Return the sequences that may be preempted for ``head``, in this order.

        The client that holds the largest share loses its last sequence, if that had its turn. If
        the client of ``head`` holds any seats, it may not come to hold more than the other keeps.
        """
        queues = _by_client(self.seats.running)
        client = head.request.client
        own = queues.pop(client, [])
        num_blocks = _num_blocks(own) + self._manager.blocks_needed(head.num_tokens)
        wanted = self._share(client, len(own) + 1, num_blocks) if own else 0.0
        victims: list[Sequence] = []
        while queues:
            shares = {each: self._share_of(each, queue) for each, queue in queues.items()}
            richest = max(shares, key=lambda each: (shares[each], self.served[each]))
            queue = queues[richest]
            victim = queue.pop()
            has_had_turn = self._had_turn(victim, step, is_first=not queue)
            if has_had_turn and wanted <= self._share_of(richest, queue):
                victims.append(victim)
                if queue:
                    continue
            del queues[richest]
        return victims

    def _had_turn(self, seq: Sequence, step: int, *, is_first: bool) -> bool:
        """Whether it had its seat for long enough; a client's first one, whether it progressed."""
        first_step, num_tokens = seq.turn
        gone = seq.num_tokens - num_tokens if is_first else step - first_step
        return gone >= self._turn

    def _share_of(self, client: str | None, seqs: list[Sequence]) -> float:
        return self._share(client, len(seqs), _num_blocks(seqs))

    def _share(self, client: str | None, num_seats: int, num_blocks: int) -> float:
        """Return the larger share of seats and blocks, divided by the client's weight."""
        share = max(num_seats / self._config.max_num_seqs, num_blocks / self._manager.num_blocks)
        return share / self._quota(client).weight

    def budget(self, head: Sequence | None) -> Budget:
        """Divide a step's tokens between clients if they want more than there are.

        ``head`` is the sequence that will be admitted, if any.
        """
        budget = super().budget(head)
        wanted: defaultdict[str | None, int] = defaultdict(int)
        for seq in (*self.seats.running, *([head] if head else ())):
            count = seq.num_missing
            wanted[seq.request.client] += min(count, self.max_chunk)
        if not self._config.enable_chunked_prefill or sum(wanted.values()) <= budget.left:
            return budget
        in_order = sorted(wanted, key=lambda client: -self.served[client])
        weights = {client: self._quota(client).weight for client in in_order}
        budget.parts = split(budget.left, {each: wanted[each] for each in in_order}, weights)
        return budget


_NO_QUOTA = ClientQuota()


def split(total: int, wanted: Mapping[K, int], weights: Mapping[K, float]) -> dict[K, int]:
    """Return parts of ``total`` in proportion to the weights, but none larger than wanted.

    Tokens that one does not want go to the others (weighted max-min fairness).
    """
    parts: dict[K, int] = {}
    weight = sum(weights[key] for key in wanted)
    in_order = sorted(wanted, key=lambda key: wanted[key] / weights[key])
    for key in in_order:
        is_last = key == in_order[-1]
        part = total if is_last else int(total * weights[key] / weight)
        parts[key] = min(wanted[key], part)
        total -= parts[key]
        weight -= weights[key]
    return parts


def _by_client(seqs: Iterable[Sequence]) -> dict[str | None, list[Sequence]]:
    queues: dict[str | None, list[Sequence]] = {}
    for seq in seqs:
        queues.setdefault(seq.request.client, []).append(seq)
    return queues


def _num_blocks(seqs: Iterable[Sequence]) -> int:
    return sum(seq.num_blocks for seq in seqs)
