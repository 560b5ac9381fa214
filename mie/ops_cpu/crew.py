"""Decide in which steps helper processes share the work, and start them."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np

from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import CachingAllocator, shared_zeros
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.attention.shared import SharedAttention
from mie.ops_cpu.linear.shared import SharedProducts
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.processes import helpers
from mie.ops_cpu.processes.helpers import HelperProcesses, StepLostError, pack, unpack
from mie.ops_cpu.shared_tokens import SharedTokens
from mie.ops_cpu.threads.counts import Trials
from mie.ops_cpu.threads.workers import Workers
from mie.system.resources import available_cpus

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Maximum number of tokens of a small step, and of rows of logits of a large one."""
MAX_LARGE_TOKENS = 1 << 12
"""Maximum number of tokens of a large step."""
START_BYTES = 1 << 31
"""Bytes of weights that steps read before helpers start, which takes some milliseconds."""
MAX_INTS = 1 << 16
"""Maximum number of integers of a batch, which are block ids for the most part."""
Forward = Callable[[StepBatch], Floats]


class Crew:
    """Decides who shares the work of a step: helper processes or threads.

    Helpers share the products of a small step, and the tokens of a large one. The threads rest
    meanwhile, because both would spin-wait on the same CPUs.
    """

    def __init__(
        self, workers: Workers, plan: TiledPlan, attention: Attention, allocator: CachingAllocator
    ) -> None:
        self._workers, self._plan, self._attention = workers, plan, attention
        self._allocator = allocator
        # A helper that spins would hold up another one on the same CPU.
        self._may_start = helpers.IS_AVAILABLE and 1 < workers.num_threads <= available_cpus()
        self.may_share_tokens = True
        """Whether processes may share the tokens of large steps."""
        self._forward: Callable[[], Forward | None] = lambda: None
        self._num_bytes = 0
        self._team: _Team | None = None
        self._kind = 0
        """The kind of the last step: the number of bits of its number of tokens."""
        self._trials: dict[int, Trials[bool]] = {}
        """Trials of steps with and without helpers, by kind."""

    def run(self, forward: Forward, batch: StepBatch) -> Floats:
        """Return forward(batch), which helper processes may run as well."""
        num_tokens = len(batch.token_ids)
        team = self._find_team(forward) if num_tokens <= MAX_LARGE_TOKENS else None
        if team is None or team.helpers.are_paused():
            if self._team is not None:
                self._team.rest()
            return forward(batch)
        # A single small step of another kind does not wake up helpers or let them sleep.
        kind, is_large = num_tokens.bit_length(), num_tokens > MAX_TOKENS
        is_steady, self._kind = is_large or kind == self._kind, kind
        trials = self._trials.setdefault(kind, _new_trials(is_large))
        begin = perf_counter()
        wants_helpers = trials.choose() if is_steady else not team.is_resting
        message = team.prepare(batch) if wants_helpers else None
        if message is None:
            team.rest()
            logits = forward(batch)
        else:
            try:
                logits = team.helpers.run(message, partial(team.do, forward, batch))
                team.is_resting = False
            except StepLostError:
                team.rest()
                logits = forward(batch)
        if is_steady and trials.is_trial:
            trials.note((perf_counter() - begin) / (num_tokens if is_large else 1))
        return logits

    def close(self) -> None:
        """End the helper processes. More small steps may start others."""
        team, self._team, self._num_bytes = self._team, None, 0
        if team is not None:
            team.close()

    def __del__(self) -> None:
        if hasattr(self, "_team"):
            self.close()

    def _find_team(self, forward: Forward) -> _Team | None:
        """Return the helpers, started if it is time, or None if there are none."""
        if self._forward() != forward:
            self.close()
            self._forward = _weakly(forward)
            return None
        if self._team is not None and not self._team.helpers.are_usable:
            self._may_start = not self._team.helpers.have_failed
            self.close()
        if self._team is None and self._may_start:
            num_bytes = sum(matrix.nbytes for matrix in self._plan.matrices())
            self._num_bytes += num_bytes
            if num_bytes and self._num_bytes >= START_BYTES:
                self._start(forward)
        return self._team

    def _start(self, forward: Forward) -> None:
        try:
            self._team = _Team(
                forward,
                self._workers,
                self._plan,
                self._attention,
                self._allocator,
                may_share_tokens=self.may_share_tokens,
            )
        except (OSError, MemoryError) as error:
            self._may_start = False
            logger.warning(
                "helper processes could not be started; mie goes on without them: %r", error
            )


def _new_trials(is_large: bool) -> Trials[bool]:
    # The first steps of a turn are slower, because helpers slept. Large steps lose little by that,
    # so their turns are short.
    num_turns, length = (3, 2) if is_large else (2, 8)
    return Trials((True, False), num_turns, length)


class _Team:
    """Helper processes that run the same forward pass in lockstep, with what they share."""

    def __init__(
        self,
        forward: Forward,
        workers: Workers,
        plan: TiledPlan,
        attention: Attention,
        allocator: CachingAllocator,
        *,
        may_share_tokens: bool,
    ) -> None:
        """Start them. They know the weights and the KV cache that exist by now."""
        # Linux breaks a huge page up when this process writes to it after a fork. So the children
        # get no working memory, and this process takes new huge pages.
        for owner in (plan, attention, allocator):
            owner.release()
        self._workers, self._plan, self._attention = workers, plan, attention
        self.is_resting = True
        """Whether the helpers have not seen the last step."""
        self._batch = _SharedBatch()
        self.helpers = HelperProcesses(workers.num_threads)
        self._products = SharedProducts(plan, self.helpers, allocator, MAX_TOKENS)
        self._shared_attention: SharedAttention | None = None
        self._tokens: SharedTokens | None = None
        if attention.cache is not None:
            self._shared_attention = SharedAttention(attention, self.helpers, MAX_LARGE_TOKENS)
            if may_share_tokens:
                parts = self._products, self._shared_attention
                self._tokens = SharedTokens(plan, self.helpers, *parts, MAX_TOKENS)
        self.helpers.start(partial(self._do_message, forward))

    def prepare(self, batch: StepBatch) -> bytes | None:
        """Return the message for a step with this batch, or None if it cannot be shared."""
        if _is_large(batch) and (self._tokens is None or not self._tokens.takes(batch)):
            return None
        header = self._batch.write(batch)
        if header is None:
            return None
        if self.is_resting:
            self._begin()
        return pack(self.is_resting, *header)

    def do(self, forward: Forward, batch: StepBatch) -> Floats:
        """Run this process's part of a step, and return the logits of all tokens."""
        if self._tokens is None or not _is_large(batch):
            return forward(batch)
        logits = forward(self._tokens.begin(batch))
        assert self._plan.by_token is None, "the forward pass did not call take_rows"
        return logits

    def rest(self) -> None:
        """Leave the next steps to threads."""
        if self._tokens is not None:
            self._tokens.end()
        self.is_resting = True
        self._workers.are_resting = False
        self._plan.shared = self._attention.shared = None

    def close(self) -> None:
        """End the helpers, and free what the program no longer uses."""
        self.rest()
        self.helpers.close()
        self._products.close()

    def _begin(self) -> None:
        """Share the next steps. Plans have to be the same in all processes, and so begin anew."""
        self._workers.are_resting = True
        self._plan.shared, self._attention.shared = self._products, self._shared_attention
        self._attention.forget_plans()

    def _do_message(self, forward: Forward, message: bytes) -> None:
        """Do what a message says, in a helper."""
        is_first, *header = unpack(message)[:6]
        if is_first:
            self._begin()
        self.do(forward, self._batch.read(header))


def _is_large(batch: StepBatch) -> bool:
    return len(batch.token_ids) > MAX_TOKENS


def _weakly(forward: Forward) -> Callable[[], Forward | None]:
    """Return a weak reference, because the forward pass refers to the backend."""
    return weakref.WeakMethod(forward) if inspect.ismethod(forward) else weakref.ref(forward)


class _SharedBatch:
    """A batch in shared memory: all its integers, one array after another."""

    def __init__(self) -> None:
        self._memory = shared_zeros((MAX_INTS,), np.int64)
        self._header: Sequence[int] = ()
        self._copy = np.empty(0, np.int64)
        self._arrays: list[Ints] = []

    def write(self, batch: StepBatch) -> tuple[int, ...] | None:
        """Write a batch. Return what `read` needs to know, or None if there is no room for it."""
        tables = batch.block_tables
        arrays = (
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.logits_rows,
            tables.ravel(),
        )
        num_ints = sum(map(len, arrays))
        if num_ints > MAX_INTS:
            return None
        np.concatenate(arrays, out=self._memory[:num_ints])
        num_decodes = -1 if batch.num_decodes is None else batch.num_decodes
        return len(batch.token_ids), *tables.shape, len(batch.logits_rows), num_decodes

    def read(self, header: Sequence[int]) -> StepBatch:
        """Return the batch, whose arrays last until the next one is read."""
        num_tokens, num_sequences, num_blocks, num_rows, num_decodes = header
        if header != self._header:
            sizes = [num_tokens] * 3 + [num_sequences + 1, num_sequences, num_rows]
            ends = np.cumsum([*sizes, num_sequences * num_blocks]).tolist()
            self._copy = np.empty(ends[-1], np.int64)
            self._arrays = np.split(self._copy, ends[:-1])
            self._header = header
        np.copyto(self._copy, self._memory[: len(self._copy)])
        token_ids, positions, slot_mapping, cu_seqlens_q, seq_lens, logits_rows, tables = (
            self._arrays
        )
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_tables=tables.reshape(num_sequences, num_blocks),
            logits_rows=logits_rows,
            num_decodes=None if num_decodes < 0 else num_decodes,
        )
