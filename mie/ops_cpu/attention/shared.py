"""Share a step's attention among processes.

Each process plans the step itself, and so has the same items. It computes its own share of them.
The results have places in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import Scratch, shared_zeros
from mie.ops_cpu.attention.attention import Attention, Plan
from mie.ops_cpu.attention.items import Result, wholes_of
from mie.ops_cpu.attention.plan import Item
from mie.ops_cpu.processes.helpers import HelperProcesses

MAX_PARTS = 1 << 20
"""Numbers that the parts of a plan's items may compute."""


class SharedAttention:
    """Attention of steps with at most ``max_rows`` tokens over the KV cache of the last step."""

    def __init__(self, attention: Attention, helpers: HelperProcesses, max_rows: int) -> None:
        """Take the memory. ``helpers`` are forked afterwards."""
        cache = attention.cache
        assert cache is not None, "a step has run"
        self._helpers = helpers
        shape = max_rows, attention.num_heads, cache.shape[-1]
        # While one process still reads a result, another may compute the next one.
        self._places = [shared_zeros(shape, cache.dtype) for _ in range(2)]
        self._turn = 0
        self._queries = shared_zeros(shape, cache.dtype)
        self.part: tuple[slice, int] | None = None
        """The tokens whose queries this process has, and the number of all. None: it has all."""
        self._parts = shared_zeros((MAX_PARTS,), cache.dtype)
        self._head_dim = cache.shape[-1]

    def has_room_for(self, items: Sequence[Item]) -> bool:
        """Return whether several processes can compute parts of these items."""
        return sum(Result.size(each, self._head_dim) for each in wholes_of(items)) <= MAX_PARTS

    def new_parts(self) -> Callable[[], Scratch]:
        """Return what gives memory to a plan. All plans use the same, one after another."""
        parts = _Parts(self._parts)
        return lambda: parts

    def run(self, plan: Plan, q: Floats, layer: int) -> Floats:
        """Compute a layer for q [T, Hkv, G, Dh], and return its result [T, Hq, Dh].

        If this process has a part of the queries, the result is that of these.
        """
        own = slice(None)
        if self.part is not None:
            own, num_tokens = self.part
            queries = self._queries[:num_tokens].reshape(-1, *q.shape[1:])
            queries[own] = q
            # The others have written the keys and values of their tokens as well.
            self._helpers.meet()
            q = queries
        self._turn = turn = 1 - self._turn
        result = self._places[turn][: len(q)]
        run, number = partial(plan.run_items, q, layer, result.reshape(q.shape)), plan.num_threads
        idle: list[Callable[[], object]] = [_do_nothing] * self._helpers.number
        shares = [partial(run, i, range(i, plan.num_items, number)) for i in range(number)]
        self._helpers.share([*shares, *idle[number:]])
        if plan.has_parts:
            self._helpers.share([partial(plan.combine, result.reshape(q.shape)), *idle[1:]])
        return result[own]


class _Parts(Scratch):
    """Memory whose pieces are each taken once."""

    def __init__(self, memory: Floats) -> None:
        super().__init__(memory.dtype)
        self._rest = memory

    def take(self, name: str, *shape: int) -> Floats:
        size = math.prod(shape)
        own, self._rest = self._rest[:size], self._rest[size:]
        return own.reshape(shape)


def _do_nothing() -> None:
    """Stand in for the task of a process that has none."""
