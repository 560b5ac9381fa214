"""Implement the Backend contract with compiled kernels, and replay forward passes as programs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats, Ints
from mie.ops.backend import KVCacheShape, Progress, StepBatch, StepSize
from mie.ops.kv_cache import HALVES, LARGEST, SCALE_BYTES
from mie.ops.linear import check_kept
from mie.ops.numpy_backend import NumpyBackend
from mie.ops_jit import layout, operators
from mie.ops_jit.environment import version_of
from mie.ops_jit.kernel_cache import Kernels, kernel_names
from mie.ops_jit.kv_cache import JitCache, move_blocks, padded
from mie.ops_jit.panels import LANES, Panels, padded_rows
from mie.ops_jit.program import Program, Value, room_for
from mie.ops_jit.step import SUMS_BYTES, StepHeader, partial_bytes, scratch_bytes
from mie.ops_jit.team import Team
from mie.system.resources import available_cpus

Forward = Callable[[StepBatch], Any]
SEGMENT = 16
"""Instructions of a large step between two moments in which an interrupt can arrive."""
LARGE_STEP = 64
"""Tokens from which a step is large."""
SCRATCH_BYTES = 2 * SUMS_BYTES
"""Memory of a thread at first, which is enough for products."""


class JitBackend(NumpyBackend):
    """Computes in float32 with compiled kernels.

    ``weight_dtype`` "auto" keeps a checkpoint's matrices as they are, and "float32" widens them at
    load. "bfloat16" and "float16" require matrices of that dtype. Each gives the same results.
    ``weights_dtype`` is the widest dtype of the checkpoint's matrices, from which the size of
    loaded ones is planned. ``batch_invariant`` changes nothing: results always are invariant.

    The first step is recorded: each operator appends instructions to a program. Later steps replay
    it. Outside a step, an operator runs at once.

    Results do not depend on the rest of the batch, on the chunks of a prompt, on the number of
    threads, or on the process, bit for bit.
    """

    name = "jit"
    dtypes = ("auto", "float32", *HALVES)

    def __init__(
        self,
        dtype: str = "auto",
        *,
        num_threads: int | None = None,
        kv_cache_dtype: str = "auto",
        weight_dtype: str = "auto",
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        weights_dtype: str = "float32",
    ) -> None:
        """Start the threads.

        Raises:
            ConfigError: the dtype is none of ``dtypes``.
            CannotRun: the machine cannot run the kernels, or Numba cannot compile them.
            ThreadLimitError: the system starts no more threads.
        """
        super().__init__(dtype, kv_cache_dtype=kv_cache_dtype)
        self._weight_dtype = weight_dtype
        self._planned_dtype = weights_dtype if weight_dtype == "auto" else weight_dtype
        self._weight_dtypes: set[str] = set()
        self._enforce_eager = enforce_eager
        self._kernels = Kernels()
        self._header = StepHeader()
        self._recording: Program | None = None
        self._recorded: tuple[weakref.WeakMethod[Any], tuple[Program, Value]] | None = None
        self.num_threads = num_threads or available_cpus()
        self._team = self._new_team(SCRATCH_BYTES)

    def _new_team(self, scratch_bytes: int) -> Team:
        return Team(self._kernels, self.num_threads, scratch_bytes)

    def _team_for(self, program: Program) -> Team:
        """Return a team whose threads have enough memory for a program."""
        if program.scratch_bytes > self._team.scratch_bytes:
            self._team = self._new_team(program.scratch_bytes)
        return self._team

    @property
    def description(self) -> str:
        """What computes, such as "Numba 0.68.1, znver4, 2 threads"."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"Numba {version_of('numba')}, {self._kernels.cpu.name}, {threads}"

    def numerics(self) -> dict[str, str | int]:
        """Return the facts that select how numbers are rounded.

        The CPU is none of them: every operation of a kernel is rounded once by IEEE 754, and their
        order is the same for every shape of tiles and every width of registers. NumPy computes the
        rotations.
        """
        return super().numerics() | {
            "weight_dtype": self.stored_dtype.name,
            "batch_invariant": True,
        }

    # Sizes.

    def weight_bytes(self, shape: tuple[int, ...]) -> int:
        if len(shape) == 1:
            return 4 * shape[0]
        num_rows, num_columns = shape
        itemsize = 2 if self._planned_dtype in HALVES else 4
        return padded_rows(num_rows) * num_columns * itemsize

    def step_bytes(self, size: StepSize) -> int:
        """Count every buffer of a step's program, the threads' memory, and attention's parts."""
        cache, hidden, inner = size.cache, size.hidden_size, size.intermediate_size
        queries = size.num_heads * cache.head_dim
        heads = 3 * queries + 2 * cache.num_kv_heads * cache.head_dim
        is_fused = inner % LANES == 0
        of_a_token = 3 * hidden + heads + (inner if is_fused else 3 * inner)
        num_results = room_for(size.num_tokens) * of_a_token
        num_results += room_for(size.num_seqs) * (2 * hidden + size.vocab_size)
        scratch = scratch_bytes(size.num_heads, cache.num_kv_heads, cache.head_dim)
        partials = partial_bytes(size.num_seqs, size.max_len, size.num_heads, cache.head_dim)
        return 4 * num_results + self.num_threads * scratch + partials

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        scale_bytes = SCALE_BYTES if self.kv_dtype in LARGEST else 0
        elements = shape.num_elements // shape.head_dim * padded(shape.head_dim)
        return elements * self.itemsize + shape.num_scales * scale_bytes

    # Weights and caches.

    def load_embedding(self, shape: tuple[int, int], blocks: Iterable[NDArray[Any]]) -> Panels:  # type: ignore[override]  # an opaque weight is a backend's own
        return self._panels(shape, blocks, None)

    def load_linear(  # type: ignore[override]  # as above
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> Panels:
        return self._panels(shape, blocks, bias)

    def _panels(
        self, shape: tuple[int, int], blocks: Iterable[NDArray[Any]], bias: NDArray[Any] | None
    ) -> Panels:
        dtype = np.dtype(np.float32) if self._weight_dtype == "float32" else None
        if self._weight_dtype in HALVES:
            blocks = (check_kept(block, self._weight_dtype) for block in blocks)
        panels = Panels(shape, blocks, dtype, bias)
        self._weight_dtypes.add(panels.dtype.name)
        return panels

    def tie_linear(self, embedding: Panels) -> Panels:  # type: ignore[override]  # as above
        return embedding

    def new_kv_cache(self, shape: KVCacheShape) -> JitCache:  # type: ignore[override]  # as above
        return JitCache.new(shape, self.kv_dtype)

    def prepare(self, progress: Progress) -> None:
        names = kernel_names(self._weight_dtypes, [self.kv_dtype.name])
        self._kernels.prepare(names, progress)

    # Operators.

    def _do(
        self,
        record: Callable[..., Value | None],
        *arrays: Any,
        batch: StepBatch | None = None,
        rows: Ints | None = None,
    ) -> Any:
        """Append an operator to the program that is being recorded, or run it now."""
        if self._recording is not None:
            return record(self._recording, *arrays)
        num_tokens = len(arrays[0])
        num_rows = num_tokens if rows is None else len(rows)
        program = Program(self._kernels.__getitem__, num_tokens, num_rows)
        values = [
            None if each is None else program.given(each, layout.NUM_TOKENS) for each in arrays
        ]
        result = record(program, *values)
        program.finish(result)
        header = self._header
        if batch is not None:
            header.set_batch(batch, *program.heads)
        header.words[[layout.NUM_TOKENS, layout.NUM_ROWS]] = num_tokens, num_rows
        if rows is not None:
            header.point(layout.LOGITS_ROWS, rows)
        program.bind(num_tokens, num_rows)
        self._team_for(program).run(program.words, header.words, 0, len(program))
        return None if result is None else program.array(result)

    def embed(self, token_ids: Any, embedding: Panels) -> Any:  # type: ignore[override]  # as above
        if self._recording is None:
            self._header.point(layout.TOKEN_IDS, token_ids)
        return self._do(lambda program, _: operators.embed(program, embedding), token_ids)

    def rms_norm(self, x: Any, weight: Floats, eps: float) -> Any:
        return self._do(lambda program, x: operators.rms_norm(program, x, weight, eps), x)

    def linear(self, x: Any, weight: Panels, residual: Any = None) -> Any:  # type: ignore[override]  # as above
        return self._do(
            lambda program, x, residual: operators.linear(program, x, weight, residual), x, residual
        )

    def head_norm(self, qkv: Any, first: int, last: int, weight: Floats, eps: float) -> None:
        assert not isinstance(qkv, np.ndarray) or qkv.flags.c_contiguous
        self._do(
            lambda program, qkv: operators.head_norm(program, qkv, first, last, weight, eps), qkv
        )

    def rope_write_kv(
        self,
        qkv: Any,
        rope_table: Floats,
        cache: Any,
        layer: int,
        batch: StepBatch,
    ) -> Any:
        return self._do(
            lambda program, qkv: operators.rope_write_kv(program, qkv, rope_table, cache, layer),
            qkv,
            batch=batch,
        )

    def paged_attention(
        self,
        q: Any,
        cache: Any,
        layer: int,
        batch: StepBatch,
        window: int | None,
    ) -> Any:
        return self._do(
            lambda program, q: operators.paged_attention(program, q, cache, layer, window),
            q,
            batch=batch,
        )

    def silu_mul(self, gate_up: Any) -> Any:
        return self._do(operators.silu_mul, gate_up)

    def take_rows(self, x: Any, rows: Ints) -> Any:
        return self._do(operators.take_rows, x, rows=rows)

    def norm_gate_up(self, x: Any, norm: Floats, eps: float, weight: Panels) -> Any:
        x = self.rms_norm(x, norm, eps)
        return self._do(lambda program, x: operators.gate_up(program, x, weight), x)

    # Blocks.

    def copy_blocks(self, cache: Any, src: Sequence[int], dst: Sequence[int]) -> None:
        move_blocks(cache, cache, src, dst)

    def export_blocks(
        self,
        cache: Any,
        host_cache: Any,
        src: Sequence[int],
        dst: Sequence[int],
    ) -> None:
        move_blocks(cache, host_cache, src, dst)

    def import_blocks(
        self,
        host_cache: Any,
        cache: Any,
        src: Sequence[int],
        dst: Sequence[int],
    ) -> None:
        move_blocks(host_cache, cache, src, dst)

    # Steps.

    def run_step(self, forward: Forward, batch: StepBatch) -> Floats:
        if batch.drawn_rows is not None:
            token_ids = np.asarray(batch.drawn, np.int64)[batch.drawn_rows]
            batch = replace(batch, token_ids=token_ids, drawn=None, drawn_rows=None)
        if self._enforce_eager:
            logits: Floats = forward(batch)
            return logits
        num_tokens, num_rows = len(batch.token_ids), len(batch.logits_rows)
        program, logits_value = self._program_of(forward, batch)
        program.lengths = {layout.NUM_TOKENS: num_tokens, layout.NUM_ROWS: num_rows}
        program.bind(num_tokens, num_rows)
        self._header.set_batch(batch, *program.heads)
        step = len(program) if num_tokens < LARGE_STEP else SEGMENT
        team = self._team_for(program)
        for first in range(0, len(program), step):
            end = min(first + step, len(program))
            team.run(program.words, self._header.words, first, end)
        return program.array(logits_value)

    def _program_of(self, forward: Forward, batch: StepBatch) -> tuple[Program, Value]:
        """Return the program of the last step, or a new one if that step ran another function."""
        if self._recorded is None or self._recorded[0]() != forward:
            recorded = self._record(forward, batch)
            if not hasattr(forward, "__self__"):
                return recorded  # a function of its own for each step
            self._recorded = weakref.WeakMethod(forward), recorded
        return self._recorded[1]

    def _record(self, forward: Forward, batch: StepBatch) -> tuple[Program, Value]:
        program = Program(self._kernels.__getitem__, len(batch.token_ids), len(batch.logits_rows))
        self._recording = program
        try:
            logits = forward(batch)
        finally:
            self._recording = None
        program.finish(logits)
        return program, logits
