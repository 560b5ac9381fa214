"""Implement the Backend contract with compiled kernels, and replay forward passes as programs."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div, log
from mie.base.resources import available_bytes, available_cpus
from mie.ops import sampling
from mie.ops.activation import Activation
from mie.ops.arrays import Floats, Ints, check_dtype
from mie.ops.backend import Backend, KVCacheShape, Memory, Progress, StepBatch, StepSize
from mie.ops.kv_cache import HALVES, QUANTIZED, head_bytes
from mie.ops.linear import check_kept
from mie.ops.rope import FloatOrFloats
from mie.ops.sampling import RowControls
from mie.ops.weights.block_bytes import set_bytes, to_bytes
from mie.ops.weights.quantised import Form, Part, QuantisedRows, Rows, dequantise
from mie.ops_jit import layout
from mie.ops_jit.adapters import JitAdapters
from mie.ops_jit.environment import version_of
from mie.ops_jit.experts import JitExperts
from mie.ops_jit.kept_panels import KeptPanels
from mie.ops_jit.kernel_cache import kernel_names
from mie.ops_jit.layout import LANES, NUM_ROWS, NUM_TOKENS, ROW_TILE, inputs_together
from mie.ops_jit.memory import (
    HugePages,
    JitCache,
    JitMatrix,
    address,
    move_blocks,
    padded,
    padded_rows,
    planes_of,
    segments_of,
)
from mie.ops_jit.products import activate, multiply, multiply_gated
from mie.ops_jit.program import Value
from mie.ops_jit.recorder import SCRATCH_BYTES, Forward, Recorder, operator
from mie.ops_jit.recurrent import JitRecurrent
from mie.ops_jit.rotations import Rotations
from mie.ops_jit.step import attention_scratch, largest_step_bytes
from mie.ops_jit.team import function_at


class JitBackend(Backend):
    """Computes in float32 with compiled kernels.

    ``weight_dtype`` "auto" keeps a checkpoint's matrices as they are, and "float32" widens them at
    load. "bfloat16" and "float16" require matrices of that dtype. Each gives the same results.
    ``weights_dtype`` is the widest dtype of the checkpoint's matrices, by which sizes are planned.
    ``activations`` "int8" rounds the inputs of products with int4 and int8 weights, as
    `ops.weights.integer` defines.
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
        activations: str = "float32",
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
        check_dtype(dtype, self.dtypes, self.name)
        self._stored_dtype = HALVES.get(dtype, np.dtype(np.float32))
        self.kv_dtype: np.dtype[Any] = QUANTIZED.get(kv_cache_dtype, self._stored_dtype)
        self.num_threads = num_threads or available_cpus()
        self._weight_dtype = weight_dtype
        self._planned_dtype = weights_dtype if weight_dtype == "auto" else weight_dtype
        self.activations = activations
        self._formats: set[str] = set()
        self._rounded: dict[str, str] = {}  # the kernel that rounds rows, by format
        self._pages = HugePages()
        self.kept_panels: KeptPanels | None = None
        """The panels of an earlier load, if a caller sets them before the load."""
        self._rotations = Rotations()
        self.recorder = Recorder(self.num_threads, enforce_eager=enforce_eager)

    @property
    def description(self) -> str:
        """The compiler, the CPU and the threads, such as "Numba 0.68.1, znver4, 2 threads"."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"Numba {version_of('numba')}, {self.recorder.kernels.cpu.name}, {threads}"

    def numerics(self) -> dict[str, str | int]:
        """Return the facts that select how numbers are rounded.

        The CPU is no such fact: each operation of a kernel is rounded once by IEEE 754, and the
        order is the same for all tiles and registers. Nor is NumPy, because rotations consist of
        such operations too.
        """
        return {
            "backend": self.name,
            "dtype": "float32",
            "kv_cache_dtype": self.kv_dtype.name,
            "weight_dtype": self._stored_dtype.name,
            "activations": self.activations,
            "batch_invariant": True,
        }

    # Sizes.

    def memory(self) -> Memory:
        return Memory(available_bytes=available_bytes(), is_shared=True)

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        num_rows, num_columns = shape
        if form is not None and self._weight_dtype != "float32":
            together = inputs_together(form)
            columns = ceil_div(num_columns, together) * together
            size = form.num_bytes(padded_rows(num_rows), columns)
            has_sextets = form.has_six_bits and self.activations == "int8"
            return size - has_sextets * padded_rows(num_rows) * columns // 4
        itemsize = 2 if self._planned_dtype in HALVES else 4
        return padded_rows(num_rows) * num_columns * itemsize

    def step_bytes(self, size: StepSize) -> int:
        """Count every buffer of a step's program, the threads' memory, and attention's parts."""
        rounds = self.activations == "int8"
        return largest_step_bytes(size, self.num_threads, SCRATCH_BYTES, rounds_activations=rounds)

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        return shape.num_vectors * head_bytes(self.kv_dtype, padded(shape.head_dim))

    # Weights and caches.

    def load_vector(self, vector: NDArray[Any]) -> Floats:
        return vector.astype(np.float32)

    def load_embedding(
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> JitMatrix:
        return self.load_linear(shape, blocks, parts=[(shape[0], form)])

    def load_linear(
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> JitMatrix:
        dtype = None
        if self._weight_dtype == "float32":
            dtype, parts = np.dtype(np.float32), ()
        parts = parts or [(shape[0], None)]
        rounds = self.activations == "int8"
        segments = segments_of(
            parts, map(self._kept, blocks), shape[1], self._pages, dtype, rounds, self.kept_panels
        )
        for panels in segments:
            if panels.rounding is None:
                self._formats.add(panels.format)
            else:
                self._rounded[panels.format] = panels.rounding
        return JitMatrix(shape, segments, None if bias is None else bias.astype(np.float32))

    def _kept(self, block: Rows) -> Rows:
        """Return a block as ``weight_dtype`` keeps it."""
        if isinstance(block, QuantisedRows):
            return dequantise(block) if self._weight_dtype == "float32" else block
        return check_kept(block, self._weight_dtype) if self._weight_dtype in HALVES else block

    def tie_linear(self, embedding: JitMatrix) -> JitMatrix:
        return embedding

    def load_rope(
        self, inv_freq: NDArray[np.float64], scaling: FloatOrFloats, num_positions: int
    ) -> Floats:
        return self._rotations.new_table(inv_freq, scaling, num_positions)

    def new_kv_cache(self, shape: KVCacheShape) -> JitCache:
        return JitCache.new(shape, self.kv_dtype)

    def prepare(
        self, progress: Progress, forward: Callable[[StepBatch], Any], size: StepSize
    ) -> None:
        if self.kept_panels is not None:
            self.kept_panels.write()
            self.kept_panels = None
        recorder = self.recorder
        names = kernel_names(self._formats, [self.kv_dtype.name], self._rounded)
        recorder.kernels.prepare([*names, *recorder.more_kernels], progress)

    # Operators. The functions of `mie.ops` define them. Arguments of a kernel are in the order that
    # its docstring in `kernels` gives.

    @operator
    def embed(self, token_ids: Ints, embedding: JitMatrix, scale: float = 1.0) -> Value:
        self.recorder.header.point(layout.TOKEN_IDS, token_ids)
        program, width, (table,) = self.recorder.program, embedding.shape[1], embedding.segments
        out = program.value(NUM_TOKENS, width)
        program.need_scratch(min(width, layout.K_BLOCK) * LANES * 4)
        arguments = table.memory, out, width, NUM_TOKENS, float(scale)
        program.emit(f"embed[{table.format}]", NUM_TOKENS, ROW_TILE, 1, *arguments)
        return out

    @operator
    def rms_norm(
        self, x: Value, weight: Floats, eps: float, residual: Value | Floats | None = None
    ) -> Value:
        program, rows, width = self.recorder.program, x.storage.rows, x.storage.width
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
        self.recorder.program.emit("rms_norm", rows, ROW_TILE, 1, *arguments)

    @operator
    def linear(self, x: Value, weight: JitMatrix, residual: Value | Floats | None = None) -> Value:
        return multiply(self.recorder, x, weight, self.recorder.program.maybe_given(residual))

    @operator
    def activate(self, gate_up: Value, activation: Activation) -> Value:
        return activate(self.recorder, gate_up, activation)

    @operator
    def norm_gate_up(
        self,
        x: Value,
        norm: Floats | None,
        eps: float,
        weight: JitMatrix,
        activation: Activation = "silu",
    ) -> Any:
        normed = x if norm is None else self.rms_norm(x, norm, eps)
        return multiply_gated(self.recorder, normed, weight, activation)

    @operator
    def soft_cap(self, x: Value, cap: float) -> Value:
        rows, out = x.storage.rows, self.recorder.program.value(x.storage.rows, *x.tail)
        self.recorder.program.emit(
            "soft_cap", rows, ROW_TILE, 1, x, out, x.storage.width, cap, rows
        )
        return out

    @operator
    def take_rows(self, x: Value, rows: Ints) -> Value:
        self.recorder.header.point(layout.LOGITS_ROWS, rows)
        program = self.recorder.program
        program.lengths[NUM_ROWS] = len(rows)
        out = program.value(NUM_ROWS, *x.tail)
        program.emit("take_rows", NUM_ROWS, ROW_TILE, 1, x, out, x.storage.width, NUM_ROWS)
        return out

    @operator
    def rope_write_kv(
        self, qkv: Value, rope_table: Floats, cache: JitCache, layer: int, batch: StepBatch
    ) -> Value:
        self._rotations.fill(int(batch.positions.max()) + 1)
        program, shape = self.recorder.program, cache.shape
        num_heads = qkv.tail[0] - 2 * shape.num_kv_heads
        out = program.value(NUM_TOKENS, num_heads, shape.head_dim)
        program.need_scratch(8 * padded(shape.head_dim) + 64)  # a head in float32, and narrowed
        program.emit(
            f"rope_write[{cache.format}]", NUM_TOKENS, ROW_TILE, 1,
            qkv, rope_table, out, *cache.planes(layer),
            num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, NUM_TOKENS,
            cache.num_heads, batch.group,
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
        program, shape, num_heads = self.recorder.program, cache.shape, q.tail[0]
        program.heads = num_heads, shape.num_kv_heads, shape.head_dim
        program.need_scratch(attention_scratch(num_heads // shape.num_kv_heads, shape.head_dim))
        out, stored = program.value(NUM_TOKENS, *q.tail), cache.format
        multiplied = "float32" if stored == "int4" else stored
        program.emit(
            f"attend[{stored}]", layout.NUM_ITEMS, 1, shape.num_kv_heads,
            q, *cache.planes(layer), out, cache.num_heads,
            num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, window or 0,
            1 / math.sqrt(shape.head_dim),
            *self.recorder.multipliers(f"[{multiplied}]"), float(soft_cap or 0), sinks, batch.group,
        )  # fmt: skip
        program.emit("merge", layout.NUM_MERGES, 1, 1, out, num_heads, shape.head_dim, sinks)
        return out

    @operator
    def sigmoid_mul(self, x: Value, gate: Value | Floats) -> Value:
        program, width = self.recorder.program, x.storage.width
        out = program.value(NUM_TOKENS, width)
        gate_width = 1 if gate.shape[-1] == 1 else width
        arguments = x, program.maybe_given(gate), out, width, gate_width, NUM_TOKENS
        program.emit("sigmoid_mul", NUM_TOKENS, ROW_TILE, 1, *arguments)
        return out

    # Blocks, tokens and steps.

    def move_blocks(
        self, source: JitCache, target: JitCache, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        move_blocks(source, target, src, dst)

    def export_blocks(self, cache: JitCache, block_ids: Sequence[int]) -> list[bytes]:
        return [to_bytes(planes_of(cache, block_id)) for block_id in block_ids]

    def import_block(self, cache: JitCache, block_id: int, data: bytes) -> None:
        set_bytes(planes_of(cache, block_id), data)

    def sample(self, logits: Floats, rows: Sequence[RowControls]) -> list[int]:
        return sampling.sample(logits, rows)

    def top_logprobs(
        self, logits: Floats, row: int, token_id: int, num_top: int
    ) -> tuple[list[int], list[float], int]:
        return sampling.top_logprobs(logits[row], token_id, num_top, self._log_total)

    def _log_total(self, logits: Floats, largest: float) -> float:
        """Compute `sampling.log_total`, with the same bits on every CPU."""
        if not math.isfinite(largest):
            return math.nan
        logits, top = np.ascontiguousarray(logits, np.float32), np.array([largest], np.float32)
        sums, nothing = np.zeros(LANES), np.zeros(1, np.int64)
        arguments = np.array([address(logits), logits.size, address(top)], np.int64)
        self._sum_exponentials(address(nothing), None, address(arguments), 0, 0, address(sums))
        return log(math.fsum(sums.tolist()))

    @cached_property
    def _sum_exponentials(self) -> Callable[..., int]:
        return function_at(self.recorder.kernels["sum_exponentials"], 4)

    def run_step(self, forward: Forward, batch: StepBatch) -> Floats:
        self._rotations.fill(int(batch.positions.max()) + 1)  # The program may be recorded.
        return self.recorder.run_step(forward, batch)

    # Layers that not every model has.

    @property
    def experts(self) -> JitExperts:
        return JitExperts(self, self.recorder)

    @property
    def recurrent(self) -> JitRecurrent:
        return JitRecurrent(self.recorder)

    @property
    def adapters(self) -> JitAdapters:
        return JitAdapters(self.recorder, self._pages)
