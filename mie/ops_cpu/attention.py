"""Attention over the paged KV cache, in tiles that the threads share out: what
`mie.ops.attention` defines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu.attention_cache import head_major
from mie.ops_cpu.attention_decode import Parts, decode
from mie.ops_cpu.attention_kernels import Scratch, equals_in_part
from mie.ops_cpu.attention_plan import (
    PREFILL_ROWS,
    DecodePlan,
    Geometry,
    Tiles,
    plan_decodes,
)
from mie.ops_cpu.attention_prefill import Prefill, PrefillJob, Products, plan_prompts, share_out
from mie.ops_cpu.workers import Workers

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


class Attention:
    """Attends with the threads of ``workers``; keeps its scratch, and the plans of the last step.

    A query's result depends on nothing but itself and what it sees, bit for bit, where
    ``is_batch_invariant`` (a decode's does always). Otherwise prefills take products of more rows.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._scratch: dict[str, list[Scratch]] = {}
        self._batch: StepBatch | None = None
        self._plans: dict[tuple[Geometry, int | None, bool], Plan] = {}
        self._widths: dict[tuple[Geometry, str], bool] = {}

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
        shortens = not is_batch_invariant or self._equals_in_part(geometry, q.dtype)
        plan = self._plan(batch, geometry, window, is_batch_invariant, shortens)
        planes = head_major(cache)[layer]
        out = np.empty(q.shape, q.dtype)
        parts = Parts(geometry, plan.decodes.num_parts, q.dtype)
        decodes = iter(plan.decodes.jobs)

        def work(thread: int) -> None:
            scratch = self._scratch_of(q, thread)
            prefill = Prefill(q, planes, geometry, plan.products, scratch)
            for job in plan.prefills[thread]:
                prefill.run(job, window, out)
            for decode_job in decodes:  # each is taken by one thread
                decode(decode_job, q, planes, geometry, scratch, out, parts)

        if plan.is_shared:
            self._workers.run(work)
        else:
            work(0)
        for row, own in plan.decodes.combinations:
            out[row] = parts.combined(own, geometry.group)
        return out

    def _equals_in_part(self, geometry: Geometry, dtype: np.dtype[Any]) -> bool:
        """Whether products with a part of a tile's positions equal those with all of them, bit for
        bit: tried once, for that is up to the kernels, which know some shapes and not others."""
        key = geometry, dtype.name
        if key not in self._widths:
            self._widths[key] = equals_in_part(geometry, dtype)
        return self._widths[key]

    def _scratch_of(self, q: Floats, thread: int) -> Scratch:
        dtype = q.dtype.name
        if dtype not in self._scratch:
            self._scratch[dtype] = [Scratch(dtype) for _ in range(self._workers.num_threads)]
        return self._scratch[dtype][thread]

    def _plan(
        self,
        batch: StepBatch,
        geometry: Geometry,
        window: int | None,
        is_batch_invariant: bool,
        shortens: bool,
    ) -> Plan:
        """The step's plan, which its layers share."""
        if self._batch is not batch:
            self._batch = batch
            self._plans.clear()
        key = geometry, window, is_batch_invariant
        if key not in self._plans:
            self._plans[key] = self._new_plan(batch, *key, shortens)
        return self._plans[key]

    def _new_plan(
        self,
        batch: StepBatch,
        geometry: Geometry,
        window: int | None,
        is_batch_invariant: bool,
        shortens: bool,
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
        products = scores * geometry.num_kv_heads * geometry.num_rows * geometry.head_dim
        is_shared = num_threads > 1 and products > WORTH_SHARING
        if not is_shared:
            num_threads = 1
        decodes = plan_decodes(
            batch, single, tiles, geometry, window, num_threads, shortens=shortens
        )
        most_rows = geometry.num_rows if is_batch_invariant else PREFILL_ROWS
        shape = Products.of(geometry, most_rows)
        shares = share_out(prompts, geometry, shape, num_threads)
        return Plan(decodes=decodes, prefills=shares, products=shape, is_shared=is_shared)
