"""Compute `mie.ops.attention` over the paged KV cache with threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import CachingAllocator, Scratch
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.items import BoundItem, Readers, Result, wholes_of
from mie.ops_cpu.attention.plan import WORTH_SHARING, Item, Planner, Split, estimate
from mie.ops_cpu.attention.reader import readers_of
from mie.ops_cpu.kv_cache import head_major
from mie.ops_cpu.threads.workers import Workers

if TYPE_CHECKING:
    from mie.ops_cpu.attention.shared import SharedAttention

SOONER = 4
"""Factor by which less work is worth sharing among processes, which meet sooner than threads."""
PlanKey = tuple[int, "int | None", bool]
"""The number of query heads, the window, and whether the bits may not depend on the batch."""
Blocks = tuple[bytes, list[int]]
"""The block tables of sequences that all decode, and how many blocks each fills."""


class Attention:
    """Computes attention with the threads of ``workers``.

    It keeps scratch memory and the plans of the last step. Plans of decodes without a window serve
    until a sequence needs another block. With ``is_batch_invariant`` a query's bits depend only on
    itself and what it sees. Otherwise prefills use products of more rows.
    """

    def __init__(self, workers: Workers, allocator: CachingAllocator | None = None) -> None:
        self._workers = workers
        self._allocator = allocator or CachingAllocator()
        self._geometry: Geometry | None = None
        self._scratch: list[Scratch] = []
        self._batch: StepBatch | None = None
        self.cache: Floats | None = None
        """The KV cache of the last step."""
        self._blocks: Blocks | None = None
        self._plans: dict[PlanKey, Plan] = {}
        self.shared: SharedAttention | None = None

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
        """Compute `ops.attention.paged_attention` over a cache of `kv_cache.new_cache`.

        The scale is 1/sqrt(Dh). Return [T, Hq, Dh], which lasts until the next layer.
        """
        if self._batch is not batch or self.cache is not cache:
            self._begin(batch, cache)
        key = q.shape[1], window, is_batch_invariant
        if key not in self._plans:
            self._plans[key] = self._plan(batch, cache, key)
        by_head = len(q), cache.shape[4], q.shape[1] // cache.shape[4], q.shape[2]
        plan, q_by_head = self._plans[key], q.reshape(by_head)
        if self.shared is not None and (plan.num_threads > 1 or self.shared.part is not None):
            return self.shared.run(plan, q_by_head, layer)
        out = self._allocator.empty(q.shape, q.dtype)
        plan.run(self._workers, q_by_head, layer, out.reshape(by_head))
        return out

    def forget_plans(self) -> None:
        """Plan the next step anew, because other processes have not seen the last one."""
        self._blocks = None

    @property
    def num_heads(self) -> int:
        """The number of query heads of the last plan."""
        g = self._geometry
        return 0 if g is None else g.num_kv_heads * g.heads_per_kv

    def release(self) -> None:
        """Free the working memory and the plans, between two steps."""
        self._plans, self._blocks = {}, None
        self._scratch = [Scratch(each.dtype) for each in self._scratch]

    def _begin(self, batch: StepBatch, cache: Floats) -> None:
        """Begin a step. Keep the plans of decodes whose blocks are those of the last step.

        A plan that reads a single decode in place also serves when the next block is added.
        """
        lengths: list[int] = batch.seq_lens.tolist()
        before = self._blocks if cache is self.cache else None
        blocks = _blocks_of_decodes(batch, lengths, cache.shape[3])
        is_same = before is not None and before == blocks
        is_next = not is_same and _adds_neighbour(before, blocks, batch.block_tables)
        self._plans = {
            key: plan
            for key, plan in self._plans.items()
            if key[1] is None and (is_same or (is_next and plan.may_grow(lengths[0])))
        }
        for plan in self._plans.values():
            plan.lengthen(lengths)
        self._batch, self.cache, self._blocks = batch, cache, blocks

    def _plan(self, batch: StepBatch, cache: Floats, key: PlanKey) -> Plan:
        """Return the plan of all layers with this window."""
        num_heads, window, invariant = key
        g = self._find_geometry(cache, num_heads)
        counts, lengths = np.diff(batch.cu_seqlens_q).tolist(), batch.seq_lens.tolist()
        num_products = estimate(counts, lengths, g)
        if self.shared is not None:
            num_products *= SOONER
        worth = 2 * math.isqrt(num_products // WORTH_SHARING)
        num_threads = self._workers.at_most(worth)
        planner = Planner(batch, g, window, is_batch_invariant=invariant)
        items = planner.items(num_threads)
        memory, scratch = head_major(cache), self._scratch[:num_threads]
        if self.shared is None:
            return Plan(items, g, memory, scratch, partial(Scratch, g.dtype))
        if not self.shared.has_room_for(items):
            items, scratch = planner.items(1), scratch[:1]
        return Plan(items, g, memory, scratch, self.shared.new_parts())

    def _find_geometry(self, cache: Floats, num_heads: int) -> Geometry:
        block_size, num_kv_heads, head_dim = cache.shape[-3:]
        g = Geometry(
            num_kv_heads=num_kv_heads,
            heads_per_kv=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=cache.dtype,
        )
        if self._geometry is None or self._geometry != g:
            self._geometry = g
            self._scratch = [Scratch(g.dtype) for _ in range(self._workers.num_threads)]
        return self._geometry  # which remembers the results of its trials


class Plan:
    """The items of a step, with what each thread has prepared for them."""

    def __init__(
        self,
        items: Sequence[Item],
        geometry: Geometry,
        memory: Floats,
        scratch: Sequence[Scratch],
        new_parts: Callable[[], Scratch],
    ) -> None:
        """Bind nothing yet. ``memory`` [L, 2, Hkv, N, B, Dh]; ``scratch`` of each thread.

        ``new_parts`` returns memory for what the parts of an item compute.
        """
        self._items, self._geometry, self._memory, self._scratch = items, geometry, memory, scratch
        self.num_items, self.num_threads = len(items), len(scratch)
        self._bound: list[dict[int, BoundItem]] = [{} for _ in scratch]
        self._readers: list[dict[tuple[Split, int, int], Readers]] = [{} for _ in scratch]
        self._wholes = {
            id(whole): Result(whole, geometry, new_parts()) for whole in wholes_of(items)
        }

    def may_grow(self, length: int) -> bool:
        """Return whether it serves a single decode of this length that has one more block.

        The block must be next to the one before and in the same tile, which is read in place.
        """
        spans = chain.from_iterable(item.spans for item in self._items)
        segments = chain.from_iterable(span.split.segments for span in spans)
        is_in_tile = (length - 1) % self._geometry.tile >= self._geometry.block_size
        return is_in_tile and any(segment.width_of is not None for segment in segments)

    def lengthen(self, lengths: Sequence[int]) -> None:
        """Go on with these lengths of the sequences, as `Span.lengthen` says."""
        for span in chain.from_iterable(item.spans for item in self._items):
            span.lengthen(lengths, self._geometry.tile)
        for item in chain.from_iterable(bound.values() for bound in self._bound):
            item.lengthen()

    def run(self, workers: Workers, q: Floats, layer: int, out: Floats) -> None:
        """Compute a layer into ``out``. q and out [T, Hkv, G, Dh]."""
        run = partial(self.run_items, q, layer, out)
        workers.share(run, range(self.num_items), self.num_threads)
        self.combine(out)

    @property
    def has_parts(self) -> bool:
        """Whether some items are parts of a whole, which `combine` has to put together."""
        return bool(self._wholes)

    def combine(self, out: Floats) -> None:
        """Combine what the parts of items have computed, and put it in ``out``."""
        for result in self._wholes.values():
            result.write(out)

    def run_items(
        self, q: Floats, layer: int, out: Floats, thread: int, numbers: Iterable[int]
    ) -> None:
        """Compute some of the items in one thread."""
        bound = self._bound[thread]
        self._scratch[thread].held = None
        for i in numbers:
            if i not in bound:
                bound[i] = self._bind(self._items[i], thread)
            bound[i].run(q, layer, out)

    def _bind(self, item: Item, thread: int) -> BoundItem:
        scratch, known = self._scratch[thread], self._readers[thread]
        readers = []
        for span in item.spans:
            key = span.split, item.heads.start, item.heads.stop
            if key not in known:
                memory, transposes = self._memory[:, :, item.heads], item.form.transposes
                known[key] = readers_of(span.split, memory, scratch, transposes=transposes)
            readers.append(known[key])
        own = None if item.whole is None else self._wholes[id(item.whole)]
        return BoundItem(item, own or Result(item, self._geometry, scratch), readers, scratch)


def _blocks_of_decodes(batch: StepBatch, lengths: Sequence[int], block_size: int) -> Blocks | None:
    """Return each sequence's blocks and how many it fills, or None if not all decode."""
    starts = batch.cu_seqlens_q.tolist()
    if starts != list(range(len(starts))):
        return None
    return batch.block_tables.tobytes(), [ceil_div(n, block_size) for n in lengths]


def _adds_neighbour(before: Blocks | None, now: Blocks | None, tables: Ints) -> bool:
    """Return whether a single sequence goes on in a block that is next to its last one."""
    if before is None or now is None or not len(before[1]) == len(now[1]) == 1:
        return False
    [count], is_longer = now[1], now[0].startswith(before[0])
    is_next = is_longer and count == before[1][0] + 1
    return is_next and bool(tables[0, count - 1] == tables[0, count - 2] + 1)
