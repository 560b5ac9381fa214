"""Implement the Backend contract with compiled kernels, and replay forward passes as programs."""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import KVCacheShape, Progress, StepBatch, StepSize
from mie.ops.kv_cache import HALVES, LARGEST, SCALE_BYTES
from mie.ops.layers.expert_operators import ACTIVATIONS, Activation
from mie.ops.linear import check_kept
from mie.ops.numpy_backend import with_tokens
from mie.ops.weights.quantised import Form, Part, QuantisedRows, Rows, dequantise
from mie.ops_jit import layout
from mie.ops_jit.environment import version_of
from mie.ops_jit.kernel_cache import Kernels, kernel_names
from mie.ops_jit.layout import LANES, NUM_ROWS, NUM_TOKENS, ROW_TILE, SUMS_BYTES
from mie.ops_jit.memory import (
    Arena,
    JitCache,
    Matrix,
    move_blocks,
    padded,
    padded_rows,
    segments_of,
)
from mie.ops_jit.program import Program, Value, operator
from mie.ops_jit.recurrent import KERNELS, JitRecurrent
from mie.ops_jit.step import StepHeader, attention_scratch, largest_step_bytes
from mie.ops_jit.team import Team

Forward = Callable[[StepBatch], Any]
SEGMENT = 16
"""Instructions of a large step between two moments in which an interrupt can arrive."""
LARGE_STEP = 64
"""Tokens from which a step is large."""
SCRATCH_BYTES = 2 * SUMS_BYTES + layout.WIDE_BYTES
"""Memory of a thread at first, which is enough for products."""


class JitBackend(JitRecurrent):
    """Computes in float32 with compiled kernels.

    ``weight_dtype`` "auto" keeps a checkpoint's matrices as they are, and "float32" widens them at
    load. "bfloat16" and "float16" require matrices of that dtype. Each gives the same results.
    ``weights_dtype`` is the widest dtype of the checkpoint's matrices, by which sizes are planned.
    ``batch_invariant`` changes nothing: results always are invariant.

    The first step is recorded: each operator appends instructions to a program. Later steps replay
    it. Outside a step, an operator runs at once.

    Results do not depend on the batch, on chunks, on threads, or on the process, bit for bit.
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
        super().__init__(dtype, num_threads=num_threads, kv_cache_dtype=kv_cache_dtype)
        self._weight_dtype = weight_dtype
        self._planned_dtype = weights_dtype if weight_dtype == "auto" else weight_dtype
        self._formats: set[str] = set()
        self._arena = Arena()
        self._enforce_eager = enforce_eager
        self._kernels = Kernels()
        self._header = StepHeader()
        self._recorded: tuple[Callable[[], Any], tuple[Program, Value]] | None = None
        self._team = Team(self._kernels, self.num_threads, SCRATCH_BYTES)

    def _team_for(self, program: Program) -> Team:
        """Return a team whose threads have enough memory for a program."""
        if program.scratch_bytes > self._team.scratch_bytes:
            self._team = Team(self._kernels, self.num_threads, program.scratch_bytes)
        return self._team

    @property
    def description(self) -> str:
        """The compiler, the CPU and the threads, such as "Numba 0.68.1, znver4, 2 threads"."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"Numba {version_of('numba')}, {self._kernels.cpu.name}, {threads}"

    def numerics(self) -> dict[str, str | int]:
        """Return the facts that select how numbers are rounded.

        The CPU is no such fact: each operation of a kernel is rounded once by IEEE 754, and the
        order is the same for all tiles and registers. NumPy computes the rotations.
        """
        return {
            "backend": self.name,
            "dtype": self.dtype.name,
            "kv_cache_dtype": self.kv_dtype.name,
            "weight_dtype": self.stored_dtype.name,
            "numpy": np.__version__,
            "batch_invariant": True,
        }

    # Sizes.

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        num_rows, num_columns = shape
        if form is not None and self._weight_dtype != "float32":
            return form.num_bytes(padded_rows(num_rows), num_columns)
        itemsize = 2 if self._planned_dtype in HALVES else 4
        return padded_rows(num_rows) * num_columns * itemsize

    def step_bytes(self, size: StepSize) -> int:
        """Count every buffer of a step's program, the threads' memory, and attention's parts."""
        return largest_step_bytes(size, self.num_threads, SCRATCH_BYTES)

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        scale_bytes = SCALE_BYTES if self.kv_dtype in LARGEST else 0
        elements = shape.num_elements // shape.head_dim * padded(shape.head_dim)
        return elements * self.itemsize + shape.num_scales * scale_bytes

    # Weights and caches.

    def load_embedding(  # type: ignore[override]  # an opaque weight is a backend's own
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> Matrix:
        return self.load_linear(shape, blocks, parts=[(shape[0], form)])

    def load_linear(  # type: ignore[override]  # as above
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> Matrix:
        dtype = None
        if self._weight_dtype == "float32":
            dtype, parts = np.dtype(np.float32), ()
        parts = parts or [(shape[0], None)]
        segments = segments_of(parts, map(self._kept, blocks), shape[1], self._arena, dtype)
        self._formats.update(panels.format for panels in segments)
        return Matrix(shape, segments, None if bias is None else bias.astype(np.float32))

    def _kept(self, block: Rows) -> Rows:
        """Return a block as ``weight_dtype`` keeps it."""
        if isinstance(block, QuantisedRows):
            return dequantise(block) if self._weight_dtype == "float32" else block
        return check_kept(block, self._weight_dtype) if self._weight_dtype in HALVES else block

    def tie_linear(self, embedding: Matrix) -> Matrix:  # type: ignore[override]  # as above
        return embedding

    def new_kv_cache(self, shape: KVCacheShape) -> JitCache:  # type: ignore[override]  # as above
        return JitCache.new(shape, self.kv_dtype)

    def prepare(
        self, progress: Progress, forward: Callable[[StepBatch], Any], size: StepSize
    ) -> None:
        names = kernel_names(self._formats, [self.kv_dtype.name])
        own = KERNELS if self._has_states else ()
        self._kernels.prepare([*names, *own], progress)

    # Operators. The functions of `mie.ops` define them. Arguments of a kernel are in the order that
    # its docstring in `kernels` gives.

    @operator
    def embed(self, token_ids: Ints, embedding: Matrix, scale: float = 1.0) -> Value:
        self._header.point(layout.TOKEN_IDS, token_ids)
        program, width, (table,) = self._program, embedding.shape[1], embedding.segments
        out = program.value(NUM_TOKENS, width)
        program.need_scratch(min(width, layout.K_BLOCK) * LANES * 4)
        arguments = table.memory, out, width, NUM_TOKENS, float(scale)
        program.emit(f"embed[{table.format}]", NUM_TOKENS, ROW_TILE, 1, *arguments)
        return out

    @operator
    def rms_norm(
        self, x: Value, weight: Floats, eps: float, residual: Value | Floats | None = None
    ) -> Value:
        program, rows, width = self._program, x.storage.rows, x.storage.width
        out = program.value(rows, *x.tail)
        residual = program.maybe_given(residual)
        arguments = x, weight, out, width, width, float(eps), rows, 0, 1, residual
        program.emit("rms_norm", rows, ROW_TILE, 1, *arguments)
        return out

    @operator
    def norm_add(self, x: Value, weight: Floats, eps: float, residual: Value | Floats) -> Any:
        return self.rms_norm(x, weight, eps, residual)

    @operator
    def head_norm(self, qkv: Value, first: int, last: int, weight: Floats, eps: float) -> None:
        rows, head_dim, dim = qkv.storage.rows, qkv.tail[-1], weight.size
        place = first * head_dim, (last - first) * head_dim // dim, None
        arguments = qkv, weight, qkv, qkv.storage.width, dim, eps, rows, *place
        self._program.emit("rms_norm", rows, ROW_TILE, 1, *arguments)

    @operator
    def linear(self, x: Value, weight: Matrix, residual: Value | Floats | None = None) -> Value:
        program, rows, (num_outputs, num_inputs) = self._program, x.storage.rows, weight.shape
        out = program.value(rows, num_outputs)
        residual = program.maybe_given(residual)
        first = 0
        for panels in weight.segments:
            program.need_scratch(SUMS_BYTES + panels.widened_bytes)
            program.emit(
                f"linear[{panels.format}]", rows, layout.BLOCK_ROWS, panels.num_groups,
                x, panels.memory, out, num_inputs, panels.shape[0], weight.bias, residual, rows,
                *self._products(panels), num_outputs, first,
            )  # fmt: skip
            first += panels.shape[0]
        return out

    @operator
    def silu_mul(self, gate_up: Value) -> Value:
        return self._gated(gate_up, "silu")

    @operator
    def gelu_mul(self, gate_up: Value) -> Value:
        return self._gated(gate_up, "gelu_tanh")

    @operator
    def clamped_silu_mul(self, gate_up: Value) -> Value:
        return self._gated(gate_up, "clamped_silu")

    def _gated(self, gate_up: Value, activation: Activation) -> Value:
        rows, width = gate_up.storage.rows, gate_up.storage.width // 2
        out, kind = self._program.value(rows, width), ACTIVATIONS.index(activation)
        self._program.emit("gate_mul", rows, ROW_TILE, 1, gate_up, out, width, rows, kind)
        return out

    @operator
    def norm_gate_up(
        self,
        x: Value,
        norm: Floats | None,
        eps: float,
        weight: Matrix,
        activation: Activation = "silu",
    ) -> Any:
        """Multiply by the matrix of gate and up, and activate while the sums are in the cache."""
        program, width = self._program, weight.shape[0] // 2
        normed = x if norm is None else self.rms_norm(x, norm, eps)
        panels, *others = weight.segments
        if others or width % LANES:  # the second half does not begin with a panel
            return self._gated(self.linear(normed, weight), activation)
        rows, num_groups = x.storage.rows, ceil_div(width, LANES * layout.PANELS)
        out = program.value(rows, width)
        program.need_scratch(2 * SUMS_BYTES + panels.widened_bytes)
        program.emit(
            f"gate_up[{panels.format}]", rows, layout.BLOCK_ROWS, num_groups,
            normed, panels.memory, out, weight.shape[1], width, weight.bias, rows,
            *self._products(panels), ACTIVATIONS.index(activation),
        )  # fmt: skip
        return out

    @operator
    def soft_cap(self, x: Value, cap: float) -> Value:
        rows, out = x.storage.rows, self._program.value(x.storage.rows, *x.tail)
        self._program.emit("soft_cap", rows, ROW_TILE, 1, x, out, x.storage.width, cap, rows)
        return out

    @operator
    def take_rows(self, x: Value, rows: Ints) -> Value:
        self._header.point(layout.LOGITS_ROWS, rows)
        program = self._program
        program.lengths[NUM_ROWS] = len(rows)
        out = program.value(NUM_ROWS, *x.tail)
        program.emit("take_rows", NUM_ROWS, ROW_TILE, 1, x, out, x.storage.width, NUM_ROWS)
        return out

    @operator
    def rope_write_kv(
        self, qkv: Value, rope_table: Floats, cache: JitCache, layer: int, batch: StepBatch
    ) -> Value:
        program, shape = self._program, cache.shape
        num_heads = qkv.tail[0] - 2 * shape.num_kv_heads
        out = program.value(NUM_TOKENS, num_heads, shape.head_dim)
        program.need_scratch(8 * padded(shape.head_dim))  # a head in float32, and narrowed
        program.emit(
            f"rope_write[{cache.elements.dtype.name}]", NUM_TOKENS, ROW_TILE, 1,
            qkv, rope_table, out, *cache.planes(layer),
            num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, NUM_TOKENS,
            shape.num_blocks, batch.group,
        )  # fmt: skip
        return out

    @operator
    def paged_attention(
        self,
        q: Value,
        cache: JitCache,
        layer: int,
        batch: StepBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Floats | None = None,
    ) -> Value:
        program, shape, num_heads = self._program, cache.shape, q.tail[0]
        program.heads = num_heads, shape.num_kv_heads, shape.head_dim
        program.need_scratch(attention_scratch(num_heads // shape.num_kv_heads, shape.head_dim))
        out, stored = program.value(NUM_TOKENS, *q.tail), cache.elements.dtype.name
        program.emit(
            f"attend[{stored}]", layout.NUM_ITEMS, 1, shape.num_kv_heads,
            q, *cache.planes(layer), out, shape.num_blocks,
            num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, window or 0,
            1 / math.sqrt(shape.head_dim),
            self._kernels[f"multiply[{stored}]"], self._kernels["multiply[float32]"],
            float(soft_cap or 0), sinks, batch.group,
        )  # fmt: skip
        program.emit("merge", layout.NUM_MERGES, 1, 1, out, num_heads, shape.head_dim, sinks)
        return out

    def _move_blocks(
        self, source: JitCache, target: JitCache, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        move_blocks(source, target, src, dst)

    def _run_now(
        self, append: Callable[..., Value | None], x: Any, *others: Any, **options: Any
    ) -> Floats | None:
        """Run an operator outside a recording, as a program of its own.

        A batch is then that of a group, whose tables are the only ones.
        """
        others = tuple(
            replace(each, group=0) if isinstance(each, StepBatch) else each for each in others
        )
        program = Program(self._kernels.__getitem__, len(x), len(x))
        first = program.given(x) if x.dtype.kind == "f" else x
        result = self._recorded_by(program, append, self, first, *others, **options)
        for each in others:
            if isinstance(each, StepBatch):
                self._header.set_batch(each, *program.heads)
        self._run(program, len(program))
        return None if result is None else program.array(result)

    # Steps.

    def run_step(self, forward: Forward, batch: StepBatch) -> Floats:
        batch = with_tokens(batch)
        if self._enforce_eager:
            logits: Floats = forward(batch)
            return logits
        program, result = self._program_of(forward, batch)
        program.set_step(len(batch.token_ids), len(batch.logits_rows))
        self._header.set_batch(batch, *program.heads)
        self._run(program, len(program) if len(batch.token_ids) < LARGE_STEP else SEGMENT)
        return program.array(result)

    def _run(self, program: Program, segment: int) -> None:
        """Run a program with the lengths that it has now."""
        program.bind()
        self._header.words[[*program.lengths]] = [*program.lengths.values()]
        team = self._team_for(program)
        for first in range(0, len(program), segment):
            end = min(first + segment, len(program))
            team.run(program.words, self._header.words, first, end)

    def _program_of(self, forward: Forward, batch: StepBatch) -> tuple[Program, Value]:
        """Return the program of the last step, or a new one if that step ran another function."""
        if self._recorded is None or self._recorded[0]() != forward:
            program = Program(
                self._kernels.__getitem__, len(batch.token_ids), len(batch.logits_rows)
            )
            recorded = program, self._recorded_by(program, forward, batch)
            # The function refers to a model, which may be deleted before the backend.
            refer = weakref.WeakMethod if hasattr(forward, "__self__") else weakref.ref
            self._recorded = refer(forward), recorded
        return self._recorded[1]

    def _recorded_by(
        self, program: Program, run: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Record the operators of a function as a program, and return the function's result."""
        self._recording = program
        try:
            result = run(*arguments, **options)
        finally:
            self._recording = None
        program.finish(result)
        return result
