"""Share a small step's attention among processes.

Each process plans the step itself, and so has the same items. It computes its own share of them.
The results have places in shared memory.
"""

from __future__ import annotations

from functools import partial

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.attention.attention import Attention, Plan
from mie.ops_cpu.processes.helpers import HelperProcesses


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

    def run(self, plan: Plan, q: Floats, layer: int) -> Floats:
        """Compute a layer for q [T, Hkv, G, Dh], and return its result [T, Hq, Dh]."""
        self._turn = turn = 1 - self._turn
        result = self._places[turn][: len(q)]
        run, number = partial(plan.run_items, q, layer, result.reshape(q.shape)), plan.num_threads
        tasks = [partial(run, i, range(i, plan.num_items, number)) for i in range(number)]
        self._helpers.share(tasks + [_do_nothing] * (self._helpers.number - number))
        return result


def _do_nothing() -> None:
    """Do the task of a process that the attention of a step is not worth."""
