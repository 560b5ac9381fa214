"""Implement the Backend contract with CUDA kernels, on a GPU through CuPy or emulated on a CPU.

Everything here chooses a kernel, a grid and arguments. The kernels are in ``kernels/``, and
docs/kernels.md explains each.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.errors import ConfigError, UnsupportedModelError
from mie.ops import rope
from mie.ops.activation import ACTIVATIONS, Activation
from mie.ops.backend import (
    Array,
    Backend,
    HeadWeights,
    KVCacheShape,
    Memory,
    Progress,
    StepBatch,
    StepSize,
)
from mie.ops.sampling import RowControls
from mie.ops.weights.quantised import Form, Part, Rows
from mie.ops_gpu import kv_cache, sampling, wide_rows
from mie.ops_gpu.adapters import CupyAdapters
from mie.ops_gpu.arena import fresh
from mie.ops_gpu.arrays import DTYPES, block_threads, element_type, kernel_type, rounded
from mie.ops_gpu.attention import PagedAttention
from mie.ops_gpu.batch import to_device
from mie.ops_gpu.chip import Chip, device_memory
from mie.ops_gpu.experts import CupyExperts
from mie.ops_gpu.few_rows import MAX_OUTPUTS, Heads, Norm, most_sums_bytes
from mie.ops_gpu.gathers import Gathers, Ranks
from mie.ops_gpu.gemm import Gemm
from mie.ops_gpu.integer import record_bytes
from mie.ops_gpu.kv_cache import HostCache, KVCache
from mie.ops_gpu.launcher import CupyLauncher, Launcher
from mie.ops_gpu.products import MAX_ROWS, WIDENED_BYTES, Products
from mie.ops_gpu.queue import Queue, in_queue
from mie.ops_gpu.ready import graph_bytes, kernels_beside_steps, make_ready
from mie.ops_gpu.recurrent import CupyRecurrent
from mie.ops_gpu.sampling import Drawn, Sampler
from mie.ops_gpu.steps import StepKind, Steps
from mie.ops_gpu.weights import CupyLinear, Matrix, check_size, load_parts, packed_bytes


class CupyBackend(Backend):
    """Runs where its launcher does, in ``dtype``: "float32", "float16" or "bfloat16".

    Weights and activations have that dtype. So does the cache unless ``kv_cache_dtype`` is "int8",
    "fp8" or "int4". Every sum is float32. With ``is_deterministic`` the result of a sequence does
    not depend on its batch. ``memory_share`` is the fraction of the device's memory to use,
    counting other processes. ``activations`` "int8" rounds the inputs of products with int4 and
    int8 weights, as `mie.ops.weights.integer` defines it. Ranks gather with the module ``nccl``.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        gemm: Gemm,
        dtype: str,
        chip: Chip,
        *,
        queue: Queue,
        enforce_eager: bool = False,
        is_deterministic: bool = False,
        memory_share: float = 1.0,
        kv_cache_dtype: str = "auto",
        activations: str = "float32",
        nccl: Any = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(
                f"dtype {dtype!r} is not supported by the {name} backend; "
                f"choose auto, {', '.join(DTYPES)}"
            )
        self.name = name
        self.is_asynchronous = queue.is_asynchronous
        self.has_decode_kernels = True
        self.dtype = DTYPES[dtype]
        is_rounded = kv_cache_dtype != "auto"
        self.kv_dtype = kv_cache.ELEMENTS[kv_cache_dtype] if is_rounded else self.dtype
        self.launcher = launcher
        self._xp = launcher.xp
        self._memory_share = memory_share
        self._queue = queue
        self._nccl = nccl
        self._fresh = fresh(launcher.xp)
        self._is_deterministic = is_deterministic
        self._chip = chip
        self.activations = activations
        self._attention = PagedAttention(launcher, chip, is_deterministic, self._empty)
        self._steps = Steps(
            launcher,
            queue,
            enforce_eager=enforce_eager,
            follows_lengths=lambda: self._attention.follows_lengths,
        )
        self._adapters = CupyAdapters(launcher, queue, self._empty, self._steps)
        how = self._empty, is_deterministic, activations == "int8", self._adapters
        self._products = Products(launcher, gemm, chip, *how)
        self._sampler = Sampler(launcher, queue)
        self._experts = CupyExperts(self, launcher, queue, self._products, self._empty)
        self._recurrent = CupyRecurrent(name, launcher, queue, self._empty, self._steps)

    def numerics(self) -> dict[str, str | int]:
        return {
            "backend": self.name,
            "dtype": self.dtype.name,
            "kv_cache_dtype": self.kv_dtype.name,
            "activations": self.activations,
            "batch_invariant": self._is_deterministic,
            "num_multiprocessors": self._chip.num_multiprocessors,
        }

    @property
    def step_counts(self) -> Counter[StepKind]:
        """The number of steps so far, by how they were launched. The backend counts on."""
        return self._steps.counts

    # Sizes.

    def memory(self) -> Memory:
        return device_memory(self._xp, self._memory_share)

    def weight_bytes(self, shape: tuple[int, ...], form: Form | None = None) -> int:
        return packed_bytes(shape, form) if form else math.prod(shape) * self.dtype.itemsize

    def kv_cache_bytes(self, shape: KVCacheShape) -> int:
        return kv_cache.cache_bytes(shape, self.kv_dtype)

    def step_bytes(self, size: StepSize) -> int:
        """Count attention's last buffers twice, because captured steps may keep earlier ones.

        `PagedAttention` doubles their sizes. Graphs count too, where they are CUDA's.
        """
        element, stored = element_type(self.dtype), element_type(self.kv_dtype)
        partial_bytes = self._attention.partial_bytes(
            size.num_seqs, size.max_len, size.num_heads, size.cache, element=element, stored=stored
        )
        width = (size.num_heads + 2 * size.cache.num_kv_heads) * size.cache.head_dim
        most_rows = size.num_tokens if self._is_deterministic else MAX_ROWS
        sums_bytes = most_sums_bytes(most_rows, width, self._chip)
        if size.is_quantised:
            sums_bytes = max(sums_bytes, wide_rows.most_sums_bytes(size.num_tokens, self._chip))
        kept_bytes = partial_bytes + sums_bytes
        widened_bytes = WIDENED_BYTES if size.is_quantised else 0
        captured_bytes = 0
        if isinstance(self.launcher, CupyLauncher) and not self._steps.enforces_eager:
            kernel = self._attention.decode_kernel(size.num_heads, size.cache, element, stored)
            captured_bytes = graph_bytes(size, kernel.kind != "stream")
        result_bytes = size.num_results * self.dtype.itemsize + self._rounded_bytes(size)
        return result_bytes + 2 * kept_bytes + widened_bytes + captured_bytes

    def _rounded_bytes(self, size: StepSize) -> int:
        """Return the bytes of the rounded rows of a step's widest product."""
        if self.activations != "int8":
            return 0
        widths = (size.hidden_size, size.num_heads * size.cache.head_dim, size.intermediate_size)
        width = max(*widths, size.num_chosen * size.hidden_size)  # experts round each choice
        width = max(width, size.num_chosen * size.expert_size, size.num_recurrent_results)
        return size.num_tokens * record_bytes(width)

    # Weights.

    @in_queue
    def load_vector(self, vector: NDArray[Any]) -> Array:
        return self._xp.asarray(rounded(vector, self.dtype))

    @in_queue
    def load_embedding(
        self, shape: tuple[int, int], blocks: Iterable[Rows], form: Form | None = None
    ) -> Matrix:
        check_size(shape, shape[0], self.name)
        [table] = load_parts(self._xp, shape, blocks, [(shape[0], form)], self.dtype)
        return table

    @in_queue
    def load_linear(
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        bias: NDArray[Any] | None = None,
        parts: Sequence[Part] = (),
    ) -> CupyLinear:
        check_size(shape, MAX_OUTPUTS, self.name)
        return CupyLinear(
            parts=load_parts(self._xp, shape, blocks, parts, self.dtype),
            bias=None if bias is None else self.load_vector(bias),
        )

    def tie_linear(self, embedding: Matrix) -> CupyLinear:
        check_size(embedding.shape, MAX_OUTPUTS, self.name)
        return CupyLinear(parts=(embedding,))

    @in_queue
    def load_rope(
        self, inv_freq: NDArray[np.float64], scaling: rope.FloatOrFloats, num_positions: int
    ) -> Array:
        return self._xp.asarray(rope.rope_table(inv_freq, scaling, num_positions, np.float32))

    @in_queue
    def prepare(
        self, progress: Progress, forward: Callable[[StepBatch], Array], size: StepSize
    ) -> None:
        """Compile the kernels, and capture common steps. The emulator builds at the first use."""
        if isinstance(self.launcher, CupyLauncher):
            parts = (self.launcher, self._steps, self._sampler, forward, size)
            make_ready(*parts, kernels_beside_steps(self.dtype, self.kv_dtype), progress)

    # Operators. Within a step, a result reuses the memory it had in the last step.

    def _empty(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Allocate a result: in a step from the arena by name, else as new memory."""
        steps = self._steps
        return (steps.arena.empty if steps.is_running else self._fresh)(name, shape, dtype)

    def embed(self, token_ids: Array, embedding: Array, scale: float = 1.0) -> Array:
        x = self._products.gather("embed", embedding, token_ids, self.dtype)
        if scale != 1:
            grid, args = (ceil_div(x.size, 256),), (x, np.int32(x.size), np.float32(scale))
            self._kernel("scale_rows", x, file="gather_rows.cu")(grid, (256,), args)
        return x

    def take_rows(self, x: Array, rows: Array) -> Array:
        return self._products.gather("rows", x, rows, x.dtype)

    def linear(self, x: Array, weight: CupyLinear, residual: Array | None = None) -> Array:
        out = self._product(x, weight) if residual is None else residual
        self._products.linear(x, weight, out, is_added=residual is not None)
        return out

    def norm_linear(self, x: Array, norm: Array, eps: float, weight: CupyLinear) -> Array:
        if norm is None or not self._products.takes_norm(x, weight):
            return super().norm_linear(x, norm, eps, weight)
        out = self._product(x, weight)
        self._products.linear(x, weight, out, norm=Norm(weight=norm, eps=eps))
        return out

    def norm_gate_up(
        self, x: Array, norm: Array, eps: float, weight: CupyLinear, activation: Activation = "silu"
    ) -> Array:
        if norm is not None and activation == "silu":
            out = self._empty("gated", (len(x), len(weight) // 2), x.dtype)
            if self._products.gated(x, weight, out, Norm(weight=norm, eps=eps)):
                return out
        return super().norm_gate_up(x, norm, eps, weight, activation)

    def norm_heads(
        self,
        x: Array,
        weights: HeadWeights,
        rope_table: Array,
        cache: KVCache,
        layer: int,
        batch: StepBatch,
    ) -> Array:
        # A quantised cache is written by a kernel of its own.
        w, head_dim = weights, weights.head_dim
        is_plain = w.norm is not None and (w.k_norm is None or len(w.k_norm) == head_dim)
        is_taken = is_plain and self._products.takes_heads(x, w.qkv, head_dim)
        if cache.is_quantized or not is_taken:
            return super().norm_heads(x, w, rope_table, cache, layer, batch)
        q = self._empty("q", (len(x), w.num_heads, head_dim), x.dtype)
        to = Heads(
            q=q,
            kv=cache.layers[layer],
            rope_table=rope_table,
            batch=batch,
            q_norm=w.q_norm,
            k_norm=w.k_norm,
        )
        self._products.heads(x, w.qkv, to, Norm(weight=w.norm, eps=w.eps))
        return q

    def _product(self, x: Array, weight: CupyLinear) -> Array:
        """Allocate the result of a product."""
        width = len(weight)  # the decoder's matrices without a residual differ in width
        return self._empty(f"linear {width}", (len(x), width), x.dtype)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = self._empty("norm", x.shape, x.dtype)
        self._normalise(x, weight, None, out, x.shape, eps)
        return out

    def norm_add(self, x: Array, weight: Array, eps: float, residual: Array) -> Array:
        self._normalise(x, weight, residual, residual, x.shape, eps)
        return residual

    def _normalise(
        self,
        x: Array,
        weight: Array,
        residual: Array | None,
        out: Array,
        shape: tuple[int, int],
        eps: float,
    ) -> None:
        """Normalise rows of a matrix of that shape: as many columns as there are weights."""
        (num_rows, stride), threads = shape, block_threads(len(weight) // 4)
        sizes = np.int32(len(weight)), np.int32(stride), np.float32(eps)
        kernel = self.launcher.kernel("rms_norm.cu", f"rms_norm<{kernel_type(x)}>")
        kernel((num_rows,), (threads,), (x, weight, residual, out, *sizes))

    def head_norm(self, qkv: Array, first: int, last: int, weight: Array, eps: float) -> None:
        num_tokens, num_heads, head_dim = qkv.shape
        if len(weight) != head_dim:
            heads = qkv.reshape(-1)[first * head_dim :]
            self._normalise(heads, weight, None, heads, (num_tokens, num_heads * head_dim), eps)
            return
        count, warps = last - first, 4
        sizes = (np.int32(n) for n in (num_tokens, num_heads, first, count, head_dim))
        kernel = self.launcher.kernel("rms_norm.cu", f"head_norm<{kernel_type(qkv)}>")
        grid = (ceil_div(num_tokens * count, warps),)
        kernel(grid, (32 * warps,), (qkv, weight, *sizes, np.float32(eps)))

    def activate(self, gate_up: Array, activation: Activation) -> Array:
        num_tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty("gated", (num_tokens, dim), gate_up.dtype)
        threads = block_threads(dim)
        kernel = self.launcher.kernel("gated_mul.cu", f"gated_mul<{kernel_type(gate_up)}>")
        numbers = np.int32(dim), np.int32(ACTIVATIONS.index(activation))
        kernel((num_tokens, ceil_div(dim, threads)), (threads,), (gate_up, out, *numbers))
        return out

    def soft_cap(self, x: Array, cap: float) -> Array:
        """Bound ``x`` itself."""
        (num_rows, dim), threads = x.shape, block_threads(x.shape[1])
        kernel = self.launcher.kernel("gated_mul.cu", f"soft_cap<{kernel_type(x)}>")
        grid = (num_rows, ceil_div(dim, threads))
        kernel(grid, (threads,), (x, np.int32(dim), np.float32(cap)))
        return x

    def sigmoid_mul(self, x: Array, gate: Array) -> Array:
        num_tokens, dim = x.shape
        out = self._empty("sigmoid", x.shape, x.dtype)
        threads = block_threads(dim)
        kernel = self.launcher.kernel("gated_mul.cu", f"sigmoid_mul<{kernel_type(x)}>")
        numbers = np.int32(dim), np.int32(gate.shape[1])
        kernel((num_tokens, ceil_div(dim, threads)), (threads,), (x, gate, out, *numbers))
        return out

    def rope_write_kv(
        self, qkv: Array, rope_table: Array, cache: KVCache, layer: int, batch: StepBatch
    ) -> Array:
        kv = cache.layers[layer]
        num_tokens, num_heads_all, head_dim = qkv.shape
        num_kv_heads, block_size = kv.shape[2:4]
        num_heads = num_heads_all - 2 * num_kv_heads
        q = self._empty("q", (num_tokens, num_heads, head_dim), qkv.dtype)
        sizes = (np.int32(n) for n in (num_heads, num_kv_heads, head_dim, block_size))
        arrays = [qkv, rope_table, batch.positions, batch.slot_mapping, q, kv]
        if cache.is_quantized:
            name = f"rope_quantize_kv<{kernel_type(qkv)}, {kernel_type(kv)}>"
            kernel = self.launcher.kernel("rope_quantize_kv.cu", name)
            threads = min(256, 32 * num_heads_all)  # one warp for each head
            arrays.append(cache.scales[layer])
        else:
            kernel = self._kernel("rope_write_kv", qkv)
            threads = block_threads(num_heads_all * head_dim // 4)
        kernel((num_tokens,), (threads,), (*arrays, *sizes))
        return q

    def paged_attention(
        self,
        q: Array,
        cache: KVCache,
        layer: int,
        batch: StepBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Any = None,
    ) -> Array:
        scales = cache.scales[layer] if cache.is_quantized else None
        on_device = to_device(self._xp, batch)
        return self._attention(q, cache.layers[layer], on_device, window, scales, soft_cap, sinks)

    # Blocks.

    @in_queue
    def new_kv_cache(self, shape: KVCacheShape) -> KVCache:
        if shape.head_dim % 8 or shape.head_dim > 256:
            raise UnsupportedModelError(
                f"head_dim is {shape.head_dim}; the {self.name} backend takes multiples of 8 up to "
                "256 (choose backend numpy)"
            )
        return kv_cache.new_cache(shape, self.kv_dtype, self._xp.zeros)

    def new_host_cache(self, shape: KVCacheShape) -> HostCache:
        return kv_cache.new_host_cache(shape, self.kv_dtype, self._queue)

    @in_queue
    def move_blocks(
        self,
        source: KVCache | HostCache,
        target: KVCache | HostCache,
        src: Sequence[int],
        dst: Sequence[int],
    ) -> None:
        kv_cache.move_blocks(self.launcher, self._queue, source, target, src, dst)

    @in_queue
    def export_blocks(self, cache: KVCache, block_ids: Sequence[int]) -> list[bytes]:
        return kv_cache.export_blocks(self.launcher, cache, block_ids)

    @in_queue
    def import_block(self, cache: KVCache, block_id: int, data: bytes) -> None:
        kv_cache.import_block(self.launcher, cache, block_id, data)

    # Tokens.

    def sample(self, logits: Array, rows: Sequence[RowControls]) -> list[int]:
        return self.finish_sample(self.start_sample(logits, rows))

    @in_queue
    def start_sample(self, logits: Array, rows: Sequence[RowControls]) -> Drawn:
        return self._sampler.start(logits, rows)

    def finish_sample(self, drawn: Drawn) -> list[int]:
        return self._sampler.finish(drawn)

    @in_queue
    def top_logprobs(
        self, logits: Array, row: int, token_id: int, num_top: int
    ) -> tuple[list[int], list[float], int]:
        return sampling.top_logprobs(self.launcher, logits[row], token_id, num_top)

    @in_queue
    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        """Run a step as `steps.Steps` describes. The logits last until the next step.

        A chunk of one token is computed like a decode to be faster, unless its result must not
        depend on how its prompt was cut.
        """
        if not self._is_deterministic and batch.num_decodes != len(batch.seq_lens):
            batch = replace(batch, num_decodes=None)
        return self._steps.run(forward, batch)

    def _kernel(self, name: str, array: Array, file: str | None = None) -> Callable[..., None]:
        """Return the kernel of that name for the array's element type."""
        return self.launcher.kernel(file or f"{name}.cu", f"{name}<{kernel_type(array)}>")

    def new_gathers(self, rank: int, num_ranks: int, vocab_size: int) -> Gathers:
        """Return the gathers of a rank of several."""
        parts = self.launcher, self._queue, self._steps, self._empty, self._nccl
        return Gathers(self, *parts, Ranks(rank, num_ranks, vocab_size))

    # Layers that not every model has.

    @property
    def experts(self) -> CupyExperts:
        return self._experts

    @property
    def recurrent(self) -> CupyRecurrent:
        return self._recurrent

    @property
    def adapters(self) -> CupyAdapters:
        return self._adapters
