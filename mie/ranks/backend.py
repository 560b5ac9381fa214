"""Put a backend with a rank's part of a model among the other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mie.model.config import ModelConfig
from mie.ops.adapters.low_rank import SlotShape
from mie.ops.backend import (
    Array,
    Backend,
    Form,
    HeadWeights,
    KVCacheShape,
    Memory,
    Progress,
    StepBatch,
    StepSize,
)
from mie.ops.numpy_backend import NumpyLinear
from mie.ranks.exchange import Exchange, memory_bytes
from mie.ranks.results import HostResults, Results
from mie.ranks.share import Share


class RankBackend:
    """Passes every call on to ``inner``, the backend of one rank, and gathers results.

    A product with a divided matrix gives a part of the outputs. The part is gathered where an
    operator needs the whole: the inputs of a product, and results that are added to the hidden
    states. Attention, gates and activations compute with the parts. Hidden states are whole in
    every rank.

    In rank 0 the runner calls this backend. `run_step` and the methods that change caches also
    make the other ranks do the same (`mie.load.ranks`).
    """

    is_asynchronous = False  # each exchange waits for the other ranks

    def __init__(self, inner: Backend, share: Share, model: ModelConfig) -> None:
        """``model`` has the sizes of the whole model. `connect` must come before any operator."""
        self.inner, self.share = inner, share
        self.exchange: Exchange
        self.caches: list[Array] = []
        """The KV cache and the host's cache, in the order of their allocation."""
        self._vocab_size = model.vocab_size
        self.model = model
        """The sizes of the whole model."""
        make: Any = getattr(inner, "new_gathers", None)  # a GPU has its own way
        given = share.rank, share.num_ranks, model.vocab_size
        self.results: Results = (
            make(*given) if make else HostResults(inner, share, model.vocab_size)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.share.num_ranks

    def connect(self, exchange: Exchange) -> None:
        """Set the memory that the ranks share."""
        self.exchange = exchange
        self.results.connect(exchange)

    @contextmanager
    def command(self, name: str, *arguments: object) -> Iterator[None]:
        """Run a command in the other ranks, while the body runs it in this rank.

        Before the first command, and after a command that was interrupted, the ranks first join.

        Raises:
            WorkerError: a rank has ended or is silent, or this process is a fork.
        """
        if self.share.rank == 0:
            if not self.exchange.is_clean:
                self.exchange.start_over(self.results.leave)
            invitation = self.results.invite()
            if invitation is not None:
                with self.exchange.command("join", invitation):
                    self.results.join(invitation, self.exchange.wait)
        with self.exchange.command(name, *arguments):
            yield

    def numerics(self) -> dict[str, str | int]:
        """Return the facts that select how numbers are rounded. On jit, ranks are no such fact."""
        facts = self.inner.numerics()
        if self.inner.name != "jit":
            facts["tensor_parallel_size"] = self.share.num_ranks
        return facts

    # Sizes. Ranks on one machine have equal shares of the host's memory.

    def memory(self) -> Memory:
        memory = self.inner.memory()
        if not memory.is_shared:  # each rank has a GPU
            return memory
        return replace(memory, available_bytes=memory.available_bytes // self.share.num_ranks)

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        """Return the bytes of a tensor. The plan has whole tables of the vocabulary."""
        if len(shape) == 2 and shape[0] == self._vocab_size:
            shape = (len(self.share.part(shape[0])), shape[1])
        return self.inner.weight_bytes(shape, form)

    def step_bytes(self, size: StepSize) -> int:
        """Return the bytes of a step, in which results are whole once they are gathered."""
        ranks, model = self.share.num_ranks, self.model
        whole = replace(
            size,
            num_heads=ranks * size.num_heads,
            intermediate_size=ranks * size.intermediate_size + ranks,
            expert_size=model.experts.size if model.experts else 0,
            cache=replace(size.cache, num_kv_heads=model.num_kv_heads),
        )
        return self.results.step_bytes(whole) + self.exchange_bytes() // ranks

    def exchange_bytes(self) -> int:
        """Return the size of the shared memory."""
        model = self.model
        inner = max(map(model.mlp_size, range(model.num_layers)))
        inner = max(inner, model.experts.size if model.experts else 0)
        widest = max(model.vocab_size, model.hidden_size, inner, model.num_heads * model.head_dim)
        return memory_bytes(self.share.num_ranks, self.results.host_bytes(widest))

    # Caches.

    def new_kv_cache(self, shape: KVCacheShape) -> Array:
        self.caches.append(self.inner.new_kv_cache(shape))
        return self.caches[-1]

    def new_host_cache(self, shape: KVCacheShape) -> Array:
        self.caches.append(self.inner.new_host_cache(shape))
        return self.caches[-1]

    def move_blocks(
        self, source: Array, target: Array, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        numbers = map(self._number_of, (source, target))
        with self.command("move_blocks", *numbers, src, dst):
            self.inner.move_blocks(source, target, src, dst)

    def export_blocks(self, cache: Array, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of blocks: the parts of all ranks, one after the other."""
        if not block_ids:
            return []
        with self.command("export_blocks", self._number_of(cache), block_ids):
            parts = self.export_own_blocks(cache, block_ids)
        size = len(parts[0]) // len(block_ids)
        return [
            b"".join(part[at : at + size] for part in parts) for at in range(0, len(parts[0]), size)
        ]

    def export_own_blocks(self, cache: Array, block_ids: Sequence[int]) -> list[bytes]:
        """Send the rank's parts of blocks to all ranks, and return the parts of each rank."""
        return self.exchange.collect(b"".join(self.inner.export_blocks(cache, block_ids)))

    def import_block(self, cache: Array, block_id: int, data: bytes) -> None:
        with self.command("import_block", self._number_of(cache), block_id, data):
            self.import_own_block(cache, block_id, data)

    def import_own_block(self, cache: Array, block_id: int, data: bytes) -> None:
        """Write the rank's part of the bytes of all ranks to a block."""
        own = self.share.part(len(data))
        self.inner.import_block(cache, block_id, data[own.start : own.stop])

    def _number_of(self, cache: Array) -> int:
        return next(number for number, each in enumerate(self.caches) if each is cache)

    # Operators.

    def embed(self, token_ids: Array, embedding: Array, scale: float = 1.0) -> Array:
        """Look up the embeddings that the rank has, and gather the rows of the others."""
        return self.results.embed(token_ids, embedding, scale)

    def linear(self, x: Array, weight: Array, residual: Array | None = None) -> Array:
        num_outputs, num_inputs = _shape(weight)
        x = self.whole(x, num_inputs)
        if residual is None or residual.shape[-1] == num_outputs:
            return self.inner.linear(x, weight, residual)
        width = residual.shape[-1]
        if getattr(weight, "slots", None) is not None:  # adapters add to the sum with the residual
            own = self.results.own(residual, num_outputs)
            return self.whole(self.inner.linear(x, weight, own), width)
        return self.results.whole(self.inner.linear(x, weight), width, residual)

    def norm_add(self, x: Array, weight: Array, eps: float, residual: Array) -> Array:
        return self.inner.norm_add(self.whole(x, residual.shape[-1]), weight, eps, residual)

    def norm_heads(
        self,
        x: Array,
        weights: HeadWeights,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: StepBatch,
    ) -> Array:
        """Return the rotated queries of the rank's heads, and write their keys and values.

        A norm of all heads at once needs the heads of all ranks.
        """
        w, size = weights, weights.head_dim
        q_norm, k_norm = w.q_norm, w.k_norm
        if q_norm is None or k_norm is None or self.model.qk_norm != "projection":
            return self.inner.norm_heads(x, weights, rope, kv_cache, layer, batch)
        num_keys_end = w.num_heads + w.num_kv_heads
        qkv = self.inner.norm_linear(x, w.norm, w.eps, w.qkv)
        norms = (0, q_norm, self.model.num_heads), (w.num_heads, k_norm, self.model.num_kv_heads)
        for first, norm, number in norms:
            own = self.share.heads(number, size)
            qkv = self._normed_together(qkv, first * size, own, norm, w.eps)
        qkv = qkv.reshape(len(qkv), num_keys_end + w.num_kv_heads, size)
        return self.inner.rope_write_kv(qkv, rope, kv_cache, layer, batch)

    def _normed_together(
        self, qkv: Array, first: int, own: range, norm: Array, eps: float
    ) -> Array:
        """Normalise columns from ``first`` on, the ``own`` columns of the heads of all ranks."""
        heads = self.results.columns(qkv, first, own, norm.size)
        return self.results.replace(qkv, first, own, self.inner.rms_norm(heads, norm, eps))

    def whole(self, x: Array, width: int) -> Array:
        """Return a result [T, width], of which each rank may have a part."""
        return x if x.shape[-1] == width else self.results.whole(x, width)

    @property
    def experts(self) -> Any:
        experts = copy.copy(self.inner.experts)
        experts.backend, experts.whole = self, self.whole
        return experts

    @property
    def adapters(self) -> Any:
        return _Adapters(self.inner.adapters, self.model.hidden_size, self.share.num_ranks)

    @property
    def recurrent(self) -> Any:
        return _Recurrent(self.inner.recurrent, self.command)

    # Steps.

    def prepare(
        self, progress: Progress, forward: Callable[[StepBatch], Array], size: StepSize
    ) -> None:
        """Compile the code of steps in all ranks."""
        if self.share.rank:
            self.results.prepare(progress, forward, size)
            return
        with self.command("prepare"):
            self.results.prepare(progress, forward, size)

    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        """Run a step in all ranks, and return its logits [R, V]."""
        batch = batch.with_tokens()
        with self.command("run_step", batch):
            return self.results.run_step(forward, batch)


class _Adapters:
    """The operators of adapters. The plan of a rank has parts of the inputs of some matrices."""

    def __init__(self, inner: Any, hidden_size: int, num_ranks: int) -> None:
        self._inner, self._hidden_size, self._num_ranks = inner, hidden_size, num_ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def slot_bytes(self, shape: SlotShape) -> int:
        """Return at least the bytes of all slots of a matrix, with whole inputs."""
        if shape.num_inputs != self._hidden_size:
            shape = replace(shape, num_inputs=self._num_ranks * (shape.num_inputs + 1))
        num_bytes: int = self._inner.slot_bytes(shape)
        return num_bytes


class _Recurrent:
    """The operators of layers with states. All ranks have the states whole, and change them."""

    def __init__(self, inner: Any, command: Callable[..., AbstractContextManager[None]]) -> None:
        self._inner, self._command = inner, command

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy_states(self, states: Any, src: Sequence[int], dst: Sequence[int]) -> None:
        with self._command("copy_states", src, dst):
            self._inner.copy_states(states, src, dst)

    def import_state(self, states: Any, slot: int, data: bytes) -> None:
        with self._command("import_state", slot, data):
            self._inner.import_state(states, slot, data)


def _shape(weight: Any) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a loaded matrix."""
    if isinstance(weight, NumpyLinear):
        weight = weight.weight.T if isinstance(weight.weight, np.ndarray) else weight.weight
    elif hasattr(weight, "parts"):  # on a GPU
        return len(weight), weight.parts[0].shape[1]
    num_outputs, num_inputs = weight.shape
    return num_outputs, num_inputs
