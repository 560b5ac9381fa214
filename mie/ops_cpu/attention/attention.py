"""Compute attention over the paged KV cache in tiles that the threads share.

`mie.ops.attention` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import CachingAllocator
from mie.ops_cpu.attention.cache import head_major
from mie.ops_cpu.attention.decode import Decode, Parts
from mie.ops_cpu.attention.kernels import Scratch, equals_in_part, rows_are_alike
from mie.ops_cpu.attention.plan import (
    PREFILL_ROWS,
    DecodePlan,
    Geometry,
    Tiles,
    plan_decodes,
)
from mie.ops_cpu.attention.prefill import Prefills
from mie.ops_cpu.attention.prefill_plan import Products, plan_prefills
from mie.ops_cpu.threads.workers import Workers

Trial = Callable[[Geometry, DTypeLike], bool]

WORTH_SHARING = 1 << 22
"""Products of a layer below which helper threads, with their GIL hand-overs, do not pay."""
PRODUCTS_PER_KEY = 1 << 10
"""Products of a prefill that take as long as a decode takes for one key and value of a KV head.

That time is mostly spent reading both from memory, for any number of rows and any head size.
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of one step's attention in every layer with the same window."""

    geometry: Geometry
    decodes: DecodePlan
    prefills: list[Prefills]
    """One entry for each thread."""
    is_shared: bool
    """Whether the work is worth more than one thread."""
    memory: Floats
    """The cache, [L, 2, Hkv, N, B, Dh]."""
    scratch: list[Scratch]
    """One entry for each thread."""
    ready: list[dict[int, Decode]]
    """For each thread, the decodes it ran in other layers, by job number."""


class Attention:
    """Computes attention with the threads of ``workers``.

    It keeps its scratch memory and the plans of the last step, which refer to that step's cache.

    With ``is_batch_invariant`` a query's result depends only on itself and what it sees, bit for
    bit. A decode's result always does. Otherwise prefills use products of more rows.
    """

    def __init__(self, workers: Workers, allocator: CachingAllocator | None = None) -> None:
        self._workers = workers
        self._allocator = allocator or CachingAllocator()
        self._scratch: dict[np.dtype[Any], list[Scratch]] = {}
        self._batch: StepBatch | None = None
        self._cache: Floats | None = None
        self._plans: dict[tuple[int, int | None, bool], Plan] = {}
        self._geometries: dict[tuple[int, int, int, int], Geometry] = {}
        self._tried: dict[tuple[Trial, Geometry, np.dtype[Any]], bool] = {}

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
        """Compute `ops.attention.paged_attention` over a cache of `attention_cache`.

        The scale is 1/sqrt(Dh). Return a new array [T, Hq, Dh].
        """
        plan = self._plan(q.shape[1], cache, batch, window, is_batch_invariant)
        g, jobs, num_parts = plan.geometry, plan.decodes.jobs, plan.decodes.num_parts
        out = self._allocator.empty(q.shape, q.dtype)
        by_head = len(q), g.num_kv_heads, g.group, g.head_dim
        q_by_head, out_by_head = q.reshape(by_head), out.reshape(by_head)
        parts = Parts(g, num_parts, q.dtype) if num_parts else None
        others = iter(range(len(plan.ready), len(jobs)))

        def work(thread: int) -> None:
            scratch, ready = plan.scratch[thread], plan.ready[thread]
            plan.prefills[thread].run(q_by_head, layer, out_by_head)
            # A thread begins with the same job in every layer, because its data is still in the CPU
            # cache. Each of the other jobs is taken by one thread.
            for i in chain(range(thread, min(thread + 1, len(jobs))), others):
                if i not in ready:
                    ready[i] = Decode(jobs[i], plan.memory, g, scratch)
                ready[i].run(q_by_head, layer, out_by_head, parts)

        if plan.is_shared:
            self._workers.run(work)
        else:
            work(0)
        if parts is not None:
            for row, own in plan.decodes.combinations:
                out[row] = parts.combined(own, g.group)
        return out

    def _geometry(
        self, num_heads: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> Geometry:
        """Return the geometry, which is the same for every step and cached."""
        key = num_heads, block_size, num_kv_heads, head_dim
        if key not in self._geometries:
            self._geometries[key] = Geometry(
                num_kv_heads=num_kv_heads,
                group=num_heads // num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
            )
        return self._geometries[key]

    def _holds(self, trial: Trial, geometry: Geometry, dtype: np.dtype[Any]) -> bool:
        """Return the cached result of a trial of the kernels, which support some shapes only."""
        key = trial, geometry, dtype
        if key not in self._tried:
            self._tried[key] = trial(geometry, dtype)
        return self._tried[key]

    def _scratch_of(self, dtype: np.dtype[Any]) -> list[Scratch]:
        if dtype not in self._scratch:
            count = self._workers.num_threads
            self._scratch[dtype] = [Scratch(dtype) for _ in range(count)]
        return self._scratch[dtype]

    def _plan(
        self,
        num_heads: int,
        cache: Floats,
        batch: StepBatch,
        window: int | None,
        is_batch_invariant: bool,
    ) -> Plan:
        """Return the step's plan, which its layers share."""
        if self._batch is not batch or self._cache is not cache:
            self._batch, self._cache = batch, cache
            self._plans.clear()
        key = num_heads, window, is_batch_invariant
        if key not in self._plans:
            self._plans[key] = self._new_plan(num_heads, cache, batch, window, is_batch_invariant)
        return self._plans[key]

    def _new_plan(
        self,
        num_heads: int,
        cache: Floats,
        batch: StepBatch,
        window: int | None,
        is_batch_invariant: bool,
    ) -> Plan:
        geometry = self._geometry(num_heads, *cache.shape[-3:])
        num_threads = self._workers.num_threads
        tiles = Tiles(batch, geometry)
        starts = batch.cu_seqlens_q.tolist()
        counts = [stop - start for start, stop in pairwise(starts)]
        single = [s for s, count in enumerate(counts) if count == 1]
        several = [s for s, count in enumerate(counts) if count > 1]
        num_products = sum(tiles.lengths[s] for s in single) * PRODUCTS_PER_KEY
        scores = sum(counts[s] * tiles.lengths[s] for s in several)
        num_products += scores * geometry.num_rows * geometry.head_dim
        num_products *= geometry.num_kv_heads
        is_shared = num_threads > 1 and num_products > WORTH_SHARING
        if not is_shared:
            num_threads = 1
        shortens = not is_batch_invariant or self._holds(equals_in_part, geometry, cache.dtype)
        decodes = plan_decodes(
            batch, single, tiles, geometry, window, num_threads, shortens=shortens
        )
        if is_batch_invariant or max(counts) * geometry.group < PREFILL_ROWS:
            packs = self._holds(rows_are_alike, geometry, cache.dtype)
            products = Products.like_decode(geometry, packs=packs, shortens=shortens)
        else:
            products = Products.fast(geometry)
        shares = plan_prefills(starts, several, tiles, geometry, window, products, num_threads)
        is_shared = is_shared and (len(decodes.jobs) > 0 or any(shares[1:]))
        memory, scratch = head_major(cache), self._scratch_of(cache.dtype)
        ready = [
            {i: Decode(job, memory, geometry, scratch[i])}
            for i, job in enumerate(decodes.jobs[:num_threads])
        ]
        return Plan(
            geometry=geometry,
            decodes=decodes,
            prefills=[
                Prefills(share, memory, geometry, products, own)
                for share, own in zip(shares, scratch, strict=False)
            ],
            is_shared=is_shared,
            memory=memory,
            scratch=scratch,
            ready=ready + [{} for _ in range(num_threads - len(ready))],
        )
