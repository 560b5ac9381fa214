"""Compute how many tokens the best choice of snapshots saves, if the future is known.

Requests come one after another, and ``num_slots`` snapshots may be kept from each to the next. A
request may begin with the state after any full block that it has in common with an earlier one, if
that state was kept since the last request that passed there. So each such state is an interval of
requests with a gain in tokens. At most ``num_slots`` intervals may overlap, and a request ends at
most one. The best choice is a flow of the least cost, in which each unit is a slot.

Real rules cannot reach it for another reason, too: it takes states at no cost where a request
begins behind them. Given that, no rule can save more.
"""

from collections import deque
from collections.abc import Sequence

Interval = tuple[int, int, int]
"""The requests that leave and use a state, and the tokens that it saves."""


def reuses(
    histories: Sequence[Sequence[int]], prompt_lengths: Sequence[int], block_size: int
) -> list[Interval]:
    """Return the intervals for the tokens that each request stores: of its prompt and its answer.

    Of the states that were passed by the same request last, only the longest can be the best.
    """
    intervals = []
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    passed: dict[int, int] = {}  # the last request that passed each node
    for number, (history, num_prompt) in enumerate(zip(histories, prompt_lengths, strict=True)):
        node, best = -1, {}
        for end in range(block_size, len(history) + 1, block_size):
            node = nodes.setdefault((node, tuple(history[end - block_size : end])), len(nodes))
            if node in passed and end < num_prompt:
                best[passed[node]] = end
            passed[node] = number
        intervals += [(start, number, gain) for start, gain in best.items()]
    return intervals


def most_saved(intervals: Sequence[Interval], num_requests: int) -> list[int]:
    """Return the most tokens that 0, 1, 2, … slots can save, until more slots save no more."""
    network = _Network(2 * num_requests)
    for number in range(1, num_requests):  # node 2 i is request i, node 2 i + 1 the use of a state
        network.join(2 * number - 2, 2 * number, len(intervals), 0)
        network.join(2 * number + 1, 2 * number, 1, 0)
    for start, end, gain in intervals:
        network.join(2 * start, 2 * end + 1, 1, -gain)
    saved = [0]
    while gain := -network.push(2 * num_requests - 2):
        saved.append(saved[-1] + gain)
    return saved


class _Network:
    """A flow from node 0. Each `push` increases it by the cheapest path (Bellman and Ford)."""

    def __init__(self, num_nodes: int) -> None:
        self._leaving: list[list[int]] = [[] for _ in range(num_nodes)]
        self._edges: list[list[int]] = []  # end, capacity, cost; each is next to its reverse

    def join(self, start: int, end: int, capacity: int, cost: int) -> None:
        self._leaving[start].append(len(self._edges))
        self._leaving[end].append(len(self._edges) + 1)
        self._edges += [[end, capacity, cost], [start, 0, -cost]]

    def push(self, sink: int) -> int:
        """Send one more unit to the sink, and return its cost."""
        costs: dict[int, int] = {0: 0}
        last: dict[int, int] = {}
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for edge in self._leaving[node]:
                end, capacity, cost = self._edges[edge]
                if capacity and (end not in costs or costs[node] + cost < costs[end]):
                    costs[end], last[end] = costs[node] + cost, edge
                    if end not in queue:
                        queue.append(end)
        node = sink
        while node:
            edge = last[node]
            self._edges[edge][1] -= 1
            self._edges[edge ^ 1][1] += 1
            node = self._edges[edge ^ 1][0]
        return costs[sink]
