"""Compute attention over the paged KV cache with threads.

`mie.ops.attention` is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import CachingAllocator
from mie.ops_cpu.attention.cache import head_major
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.items import BoundItem, Readers, Result
from mie.ops_cpu.attention.plan import WORTH_SHARING, Item, Planner, Split
from mie.ops_cpu.attention.reader import Scratch, readers_of
from mie.ops_cpu.threads.workers import Workers


class Attention:
    """Computes attention with the threads of ``workers``.

    It keeps its scratch memory and the plans of the last step, which refer to that step's cache.

    With ``is_batch_invariant`` a query's result depends only on itself and what it sees, bit for
    bit. A decode's result always does. Otherwise prefills use products of more rows.
    """

    def __init__(self, workers: Workers, allocator: CachingAllocator | None = None) -> None:
        self._workers = workers
        self._allocator = allocator or CachingAllocator()
        self._geometry: Geometry | None = None
        self._scratch: list[Scratch] = []
        self._batch: StepBatch | None = None
        self._cache: Floats | None = None
        self._plans: dict[tuple[int, int | None, bool], Plan] = {}

    def __call__(
        self,
        q: Floats,
        cache: Floats,
        layer: int,
        batch: StepBatch,
        window: int | None,
        *,
        is_batch_invariant: bool,
    ) -> Floats:
        """Compute `ops.attention.paged_attention` over a cache of `attention.cache.new_cache`.

        The scale is 1/sqrt(Dh). Return a new array [T, Hq, Dh].
        """
        if self._batch is not batch or self._cache is not cache:
            self._batch, self._cache = batch, cache
            self._plans.clear()
        key = q.shape[1], window, is_batch_invariant
        if key not in self._plans:
            self._plans[key] = self._plan(cache, batch, *key)
        plan, num_kv_heads = self._plans[key], cache.shape[4]
        out = self._allocator.empty(q.shape, q.dtype)
        by_head = len(q), num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2]
        q_by_head, out_by_head = q.reshape(by_head), out.reshape(by_head)

        def work(thread: int, items: Iterable[int]) -> None:
            plan.compute(thread, items, q_by_head, layer, out_by_head)

        self._workers.share(work, range(plan.num_items), plan.num_threads)
        plan.write_wholes(out_by_head)
        return out

    def _plan(
        self,
        cache: Floats,
        batch: StepBatch,
        num_heads: int,
        window: int | None,
        is_batch_invariant: bool,
    ) -> Plan:
        """Return the plan of all layers with this window."""
        block_size, num_kv_heads, head_dim = cache.shape[-3:]
        new = Geometry(
            num_kv_heads=num_kv_heads,
            heads_per_kv=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=cache.dtype,
        )
        if self._geometry != new:  # the old one remembers the results of its trials
            self._geometry = new
            self._scratch = [Scratch(new.dtype) for _ in range(self._workers.num_threads)]
        g = self._geometry
        planner = Planner(batch, g, window, is_batch_invariant=is_batch_invariant)
        count = self._workers.at_most(2 * math.isqrt(planner.estimate() // WORTH_SHARING))
        return Plan(planner.items(count), g, head_major(cache), self._scratch[:count])


class Plan:
    """The items of a step, with what each thread has prepared for them."""

    def __init__(
        self, items: Sequence[Item], geometry: Geometry, memory: Floats, scratch: Sequence[Scratch]
    ) -> None:
        """Prepare nothing yet. ``memory`` [L, 2, Hkv, N, B, Dh]; ``scratch`` of each thread."""
        self.num_items, self.num_threads = len(items), len(scratch)
        self._items, self._geometry, self._memory, self._scratch = items, geometry, memory, scratch
        self._bound: list[dict[int, BoundItem]] = [{} for _ in scratch]
        self._readers: list[dict[tuple[Split, int], Readers]] = [{} for _ in scratch]
        wholes = {id(item.whole): item.whole for item in items if item.whole is not None}
        self._wholes = {
            key: Result(whole, geometry, Scratch(geometry.dtype)) for key, whole in wholes.items()
        }

    def compute(
        self, thread: int, numbers: Iterable[int], q: Floats, layer: int, out: Floats
    ) -> None:
        """Compute items by their numbers into ``out``. q and out [T, Hkv, G, Dh]."""
        bound = self._bound[thread]
        self._scratch[thread].held = None
        for i in numbers:
            if i not in bound:
                bound[i] = self._bind(self._items[i], thread)
            bound[i].run(q, layer, out)

    def write_wholes(self, out: Floats) -> None:
        """Put the results that several items computed together in ``out``."""
        for result in self._wholes.values():
            result.write(out)

    def _bind(self, item: Item, thread: int) -> BoundItem:
        g, scratch, known = self._geometry, self._scratch[thread], self._readers[thread]
        readers = []
        for span in item.spans:
            key = span.split, item.heads.start
            if key not in known:
                memory, transposes = self._memory[:, :, item.heads], item.form.transposes
                known[key] = readers_of(span.split, memory, scratch, transposes=transposes)
            readers.append(known[key])
        shared = item.whole is not None
        result = self._wholes[id(item.whole)] if shared else Result(item, g, scratch)
        return BoundItem(item, result, readers, g, scratch)
