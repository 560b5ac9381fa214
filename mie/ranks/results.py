"""Gather the results of ranks in the memory of the host, for backends of the CPU.

`Results` is the contract. `mie.ops_gpu.gathers` gathers on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mie.ops.arrays import Bools, Floats
from mie.ops.backend import Array, Backend, Progress, StepBatch, StepSize
from mie.ranks.exchange import Exchange
from mie.ranks.share import Share

Forward = Callable[[StepBatch], Array]
Wait = Callable[[Callable[[], bool]], None]
"""Waits until a function returns true (`Exchange.wait`)."""


class Results(Protocol):
    """Gathers the results of ranks, with the operators around the gathers."""

    def host_bytes(self, widest: int) -> int:
        """Return the shared memory that a row of at most ``widest`` numbers takes."""

    def connect(self, exchange: Exchange) -> None:
        """Set the memory that the ranks share."""

    def invite(self) -> object | None:
        """Return an argument of `join` for all ranks, or None if they need not join now."""

    def join(self, invitation: Any, wait: Wait) -> None:
        """Join the other ranks, at the same time as each of them."""

    def leave(self) -> None:
        """Abandon the gathers of a command that was interrupted, in this rank."""

    def step_bytes(self, size: StepSize) -> int:
        """Return the bytes of a step with the sizes of the whole model."""

    def prepare(self, progress: Progress, forward: Forward, size: StepSize) -> None:
        """Compile the code of steps."""

    def run_step(self, forward: Forward, batch: StepBatch) -> Array:
        """Return the logits [R, V] of all ranks."""

    def embed(self, token_ids: Array, embedding: Array, scale: float) -> Array:
        """Return the embeddings [T, D], each from the rank that has the token's row."""

    def whole(self, x: Array, width: int, added: Array | None = None) -> Array:
        """Return a result [T, width] of all ranks' parts, and ``added`` [T, width] in addition."""

    def own(self, x: Array, width: int) -> Array:
        """Return the rank's columns [T, width] of a whole result."""

    def columns(self, x: Array, first: int, own: range, width: int) -> Array:
        """Return [T, width], in which x's columns from ``first`` on are the columns ``own``.

        Ranks may have equal columns.
        """

    def replace(self, x: Array, first: int, own: range, y: Array) -> Array:
        """Return x with the columns ``own`` of y in place of x's columns from ``first`` on."""


class HostResults:
    """`Results` in the memory that the ranks share. In a program, a gather is a part of it."""

    def __init__(self, inner: Backend, share: Share, vocab_size: int) -> None:
        self._inner, self._share, self._vocab_size = inner, share, vocab_size
        self._exchange: Exchange
        self._is_own: Bools = np.empty(0, bool)  # whether the rank has each token's embedding

    def host_bytes(self, widest: int) -> int:
        return 8 * widest  # a float64 at most

    def connect(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def invite(self) -> object | None:
        return None

    def join(self, invitation: Any, wait: Wait) -> None:
        pass

    def leave(self) -> None:
        pass

    def step_bytes(self, size: StepSize) -> int:
        return self._inner.step_bytes(size)

    def prepare(self, progress: Progress, forward: Forward, size: StepSize) -> None:
        self._inner.prepare(progress, forward, size)

    def run_step(self, forward: Forward, batch: StepBatch) -> Array:
        rows = self._share.part(self._vocab_size)
        token_ids = batch.token_ids - rows.start
        self._is_own = (token_ids >= 0) & (token_ids < len(rows))
        own = replace(batch, token_ids=np.where(self._is_own, token_ids, 0))
        return self.whole(self._inner.run_step(forward, own), self._vocab_size)

    def embed(self, token_ids: Array, embedding: Array, scale: float) -> Array:
        x = self._inner.embed(token_ids, embedding, scale)
        return self._exchanged(self._pick, x, x.shape[-1])

    def _pick(self, out: Floats, x: Floats, added: None) -> None:
        is_own = np.full(len(out), self._share.rank == 0)  # of the rows that pad a step, too
        is_own[: len(self._is_own)] = self._is_own
        self._exchange.pick(out, x, is_own)

    def whole(self, x: Array, width: int, added: Array | None = None) -> Array:
        return self._exchanged(self._exchange.gather, x, width, added)

    def own(self, x: Array, width: int) -> Array:
        own = self._share.part(x.shape[-1])

        def take(out: Floats, x: Floats, added: None) -> None:
            out[...] = x[:, own.start : own.stop]

        return self._exchanged(take, x, width)

    def columns(self, x: Array, first: int, own: range, width: int) -> Array:
        columns = slice(first, first + len(own))

        def take(out: Floats, x: Floats, added: None) -> None:
            self._exchange.gather(out, x[:, columns], own=own)

        return self._exchanged(take, x, width)

    def replace(self, x: Array, first: int, own: range, y: Array) -> Array:
        columns = slice(first, first + len(own))

        def put(out: Floats, x: Floats, y: Floats) -> None:
            out[...] = x
            out[:, columns] = y[:, own.start : own.stop]

        return self._exchanged(put, x, x.shape[-1], y)

    def _exchanged(
        self, function: Callable[..., None], x: Array, width: int, added: Array | None = None
    ) -> Array:
        """Return a result [T, width] that ``function`` fills from x and ``added``.

        In a program that is being recorded, the function becomes a part of the program.
        """
        if not isinstance(x, np.ndarray):
            return x.program.call(function, x, width, added)
        out = np.empty((len(x), width), x.dtype)
        function(out, x, added)
        return out
