"""Divide rows, blocks and the tokens of a step between clients.

A client's share is the larger one of its shares of rows and blocks, divided by its weight (dominant
resource fairness, Ghodsi et al., NSDI 2011). The client with the largest share makes way for a
client without a place, and no sequence is preempted for nothing.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeVar

from mie.config.engine import ClientQuota, EngineConfig, quotas_of
from mie.memory.manager import KVCacheManager
from mie.sched.admission import allocation_in_empty_pool, find_allocation
from mie.sched.draft import Budget
from mie.sched.limits import max_chunk, watermark_blocks
from mie.sched.rows import RunningRows
from mie.sched.sequence import Request, Sequence

TURN = 16
"""The default of ``fair_turn``."""

_NO_QUOTA = ClientQuota()

Client = str | None
K = TypeVar("K")


class Shares:
    """The shares that clients hold, and the turns of their running sequences."""

    def __init__(self, config: EngineConfig, rows: RunningRows, manager: KVCacheManager) -> None:
        self._config, self._rows, self._manager = config, rows, manager
        self._quotas = quotas_of(config.client_quotas)
        self._turn = config.fair_turn or TURN
        self._watermark_blocks = watermark_blocks(config, manager)

    def quota(self, client: Client) -> ClientQuota:
        """Return the weight of a client and the maximum number of its rows."""
        return self._quotas.get(client or "", _NO_QUOTA)

    def by_preemption(self, step: int) -> list[Sequence]:
        """Return the running sequences. The last one is preempted first if blocks run out.

        Each client's first sequence is safe until it had its turn. The others follow by the share
        that their client holds with them.
        """
        running, clients = self._rows.running, self._by_client()
        if len(clients) < 2:
            return running[:]
        order: dict[Sequence, tuple[float, ...]] = {}
        for client, seqs in clients.items():
            for seq, share in zip(seqs, self._shares(client, seqs), strict=True):
                order[seq] = (1, share)
            if not self._had_turn(seqs[0], step, is_first=True):
                order[seqs[0]] = (0, seqs[0].running_since[0])
        return sorted(running, key=lambda seq: (order[seq], seq.key))

    # Making way.

    def has_place(self, first: Sequence) -> bool:
        """Whether ``first`` could be admitted now, or only its own client's sequences run."""
        running = self._rows.running
        if all(seq.request.client == first.request.client for seq in running):
            return True
        if not self._rows.num_free:
            return False
        allocation = find_allocation(self._manager, first, self._watermark_blocks)
        return allocation is not None and self._fits(first, allocation.num_computed, len(running))

    def _fits(self, first: Sequence, num_computed: int, num_running: int) -> bool:
        """Whether the budget has room for an unchunked prompt beside the decodes of others."""
        num_left = self._config.max_num_batched_tokens - num_running
        return self._config.enable_chunked_prefill or first.num_tokens - num_computed <= num_left

    def victims(
        self, first: Sequence, counter: Callable[[Client], float], step: int
    ) -> list[Sequence]:
        """Return the sequences to preempt for ``first``, or none if all are not enough.

        A client loses its last sequences, as far as they had their turn. If the client of ``first``
        holds any rows, the client may not come to hold more than the other client keeps. The
        largest share makes way first, and of equal shares the client with the largest counter.
        """
        clients = self._by_client()
        own, wanted = clients.pop(first.request.client, []), 0.0
        if own:
            num_blocks = sum(seq.num_blocks for seq in own)
            num_blocks += self._manager.blocks_needed(first.num_tokens)
            wanted = self._share(first.request.client, len(own) + 1, num_blocks)
        found: list[tuple[float, float, Sequence]] = []
        for client, seqs in clients.items():
            shares = [0.0, *self._shares(client, seqs)]
            while seqs and self._had_turn(seqs[-1], step, is_first=len(seqs) == 1):
                share, victim = shares.pop(), seqs.pop()
                if shares[-1] < wanted:
                    break
                found.append((share, counter(client), victim))
        found.sort(key=lambda each: each[:2], reverse=True)
        victims = [victim for _, _, victim in found]
        return victims[: self._num_enough(first, victims)] if victims else []

    def _num_enough(self, first: Sequence, victims: list[Sequence]) -> int:
        """Return how many victims let ``first`` be admitted, or 0 if all are not enough."""
        manager, needed = self._manager, allocation_in_empty_pool(self._manager, first)

        def is_enough(count: int) -> bool:
            kept = [seq for seq in self._rows.running if seq not in victims[:count]]
            num_held = len({block_id for seq in kept for block_id in seq.held_ids})
            # Each sequence that continues may need a block before ``first`` is admitted.
            num_reserved = self._watermark_blocks + len(kept) if kept else 0
            num_left = manager.num_blocks - manager.pool.num_reserved - num_held - num_reserved
            fits = self._fits(first, needed.num_computed, len(kept))
            return fits and needed.num_taken <= num_left

        counts = range(1, len(victims) + 1)
        index = bisect_left(counts, True, key=is_enough)
        return counts[index] if index < len(counts) else 0

    def _had_turn(self, seq: Sequence, step: int, *, is_first: bool) -> bool:
        """Whether a sequence had its row for a turn: in steps, or in tokens if it is the first."""
        first_step, num_tokens = seq.running_since
        gone = seq.num_tokens - num_tokens if is_first else step - first_step
        return gone >= self._turn

    def _by_client(self) -> dict[Client, list[Sequence]]:
        """Return the running sequences of each client."""
        clients: dict[Client, list[Sequence]] = {}
        for seq in self._rows.running:
            clients.setdefault(seq.request.client, []).append(seq)
        return clients

    def _shares(self, client: Client, seqs: list[Sequence]) -> list[float]:
        """Return the shares of a client with its first sequence, with its first two, and so on."""
        num_blocks = accumulate(seq.num_blocks for seq in seqs)
        return [self._share(client, count, num) for count, num in enumerate(num_blocks, start=1)]

    def _share(self, client: Client, num_rows: int, num_blocks: int) -> float:
        most_rows, most_blocks = self._config.max_num_seqs, self._manager.num_blocks
        return max(num_rows / most_rows, num_blocks / most_blocks) / self.quota(client).weight

    # The tokens of a step.

    def budget(self, first: Sequence | None, counter: Callable[[Client], float]) -> Budget:
        """Divide a step's tokens between clients if they want more than there are.

        ``first`` is the sequence that will be admitted, if any.
        """
        total, most = self._config.max_num_batched_tokens, max_chunk(self._config)
        wanted: defaultdict[Client, int] = defaultdict(int)
        for seq in (*self._rows.running, *([first] if first else ())):
            wanted[seq.request.client] += min(seq.num_missing, most)
        if not self._config.enable_chunked_prefill or sum(wanted.values()) <= total:
            return Budget(total)
        clients = sorted(wanted, key=lambda client: -counter(client))
        weights = {client: self.quota(client).weight for client in clients}
        return SharedBudget(total, split(total, {each: wanted[each] for each in clients}, weights))


class SharedBudget(Budget):
    """The tokens that a step has left, and the part of each client."""

    def __init__(self, left: int, parts: dict[Client, int]) -> None:
        super().__init__(left)
        self._parts = parts

    def most(self, request: Request) -> int:
        return min(self.left, self._parts.get(request.client, 0))

    def take(self, request: Request, count: int) -> None:
        self.left -= count
        self._parts[request.client] -= count


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
