"""Attention over the paged KV cache, in tiles that the threads share out: what
`mie.ops.attention` defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu.attention_cache import head_major
from mie.ops_cpu.attention_decode import Decode, Parts
from mie.ops_cpu.attention_kernels import Scratch, equals_in_part, rows_are_alike
from mie.ops_cpu.attention_plan import (
    PREFILL_ROWS,
    DecodePlan,
    Geometry,
    Tiles,
    plan_decodes,
)
from mie.ops_cpu.attention_prefill import Prefill, PrefillJob, Products, plan_prompts, share_out
from mie.ops_cpu.workers import Workers

Trial = Callable[[Geometry, DTypeLike], bool]

WORTH_SHARING = 1 << 22
"""Products of a layer below which a hand-over to other threads takes longer than it saves."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step's attention consists of, in every layer with the same window."""

    decodes: DecodePlan
    prefills: list[list[PrefillJob]]
    """By thread."""
    products: Products
    is_shared: bool
    """Whether it is worth more than one thread."""
    memory: Floats
    """The cache, [L, 2, Hkv, N, B, Dh]."""
    ready: list[dict[int, Decode]]
    """By thread, the decodes it has done in other layers, by their number among the jobs."""


class Attention:
    """Attends with the threads of ``workers``; keeps its scratch, and the plans of the last step,
    which hold on to its cache.

    A query's result depends on nothing but itself and what it sees, bit for bit, where
    ``is_batch_invariant`` (a decode's does always). Otherwise prefills take products of more rows.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._scratch: dict[str, list[Scratch]] = {}
        self._batch: StepBatch | None = None
        self._cache: Floats | None = None
        self._plans: dict[tuple[Geometry, int | None, bool], Plan] = {}
        self._tried: dict[tuple[Trial, Geometry, str], bool] = {}

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
        """`ops.attention.paged_attention` over a cache of `attention_cache`, scaled by
        1/sqrt(Dh): a new array [T, Hq, Dh]."""
        num_kv_heads, head_dim = cache.shape[-2:]
        geometry = Geometry(
            num_kv_heads=num_kv_heads,
            group=q.shape[1] // num_kv_heads,
            head_dim=head_dim,
            block_size=cache.shape[3],
        )
        plan = self._plan(batch, cache, geometry, window, is_batch_invariant)
        out = np.empty(q.shape, q.dtype)
        by_head = len(q), num_kv_heads, geometry.group, head_dim
        q_by_head, out_by_head = q.reshape(by_head), out.reshape(by_head)
        num_parts = plan.decodes.num_parts
        parts = Parts(geometry, num_parts, q.dtype) if num_parts else None
        indices = iter(range(len(plan.decodes.jobs)))

        def work(thread: int) -> None:
            scratch = self._scratch_of(q, thread)
            if plan.prefills[thread]:
                prefill = Prefill(q_by_head, plan.memory, layer, geometry, plan.products, scratch)
                for job in plan.prefills[thread]:
                    prefill.run(job, window, out_by_head)
            ready = plan.ready[thread]
            for i in indices:  # each is taken by one thread
                if i not in ready:
                    ready[i] = Decode(plan.decodes.jobs[i], plan.memory, geometry, scratch)
                ready[i].run(q_by_head, layer, out_by_head, parts)

        if plan.is_shared:
            self._workers.run(work)
        else:
            work(0)
        if parts is not None:
            for row, own in plan.decodes.combinations:
                out[row] = parts.combined(own, geometry.group)
        return out

    def _holds(self, trial: Trial, geometry: Geometry, dtype: np.dtype[Any]) -> bool:
        """What a trial of the kernels answers, which know some shapes and not others: made once."""
        key = trial, geometry, dtype.name
        if key not in self._tried:
            self._tried[key] = trial(geometry, dtype)
        return self._tried[key]

    def _scratch_of(self, q: Floats, thread: int) -> Scratch:
        dtype = q.dtype.name
        if dtype not in self._scratch:
            self._scratch[dtype] = [Scratch(dtype) for _ in range(self._workers.num_threads)]
        return self._scratch[dtype][thread]

    def _plan(
        self,
        batch: StepBatch,
        cache: Floats,
        geometry: Geometry,
        window: int | None,
        is_batch_invariant: bool,
    ) -> Plan:
        """The step's plan, which its layers share."""
        if self._batch is not batch or self._cache is not cache:
            self._batch, self._cache = batch, cache
            self._plans.clear()
        key = geometry, window, is_batch_invariant
        if key not in self._plans:
            self._plans[key] = self._new_plan(batch, cache, *key)
        return self._plans[key]

    def _new_plan(
        self,
        batch: StepBatch,
        cache: Floats,
        geometry: Geometry,
        window: int | None,
        is_batch_invariant: bool,
    ) -> Plan:
        num_threads = self._workers.num_threads
        tiles = Tiles(batch, geometry)
        starts = batch.cu_seqlens_q.tolist()
        counts = [stop - start for start, stop in pairwise(starts)]
        single = [s for s, count in enumerate(counts) if count == 1]
        several = [s for s, count in enumerate(counts) if count > 1]
        prompts = plan_prompts(starts, several, tiles, geometry, window)
        scores = sum(counts[s] * tiles.lengths[s] for s in several)
        scores += sum(tiles.lengths[s] for s in single)
        num_products = scores * geometry.num_kv_heads * geometry.num_rows * geometry.head_dim
        is_shared = num_threads > 1 and num_products > WORTH_SHARING
        if not is_shared:
            num_threads = 1
        shortens = not is_batch_invariant or self._holds(equals_in_part, geometry, cache.dtype)
        decodes = plan_decodes(
            batch, single, tiles, geometry, window, num_threads, shortens=shortens
        )
        if is_batch_invariant or max(counts) * geometry.group < PREFILL_ROWS:
            packs = self._holds(rows_are_alike, geometry, cache.dtype)
            products = Products.like_decode(geometry, packs=packs)
        else:
            products = Products.fast(geometry)
        return Plan(
            decodes=decodes,
            prefills=share_out(prompts, geometry, products, num_threads),
            products=products,
            is_shared=is_shared,
            memory=head_major(cache),
            ready=[{} for _ in range(num_threads)],
        )
