"""Predict the times of kernels and of decode steps on GPUs, from counts and data sheets.

Nothing here is a measurement. `Chip.microseconds` has the formula. Instructions come from the
ledger of machine code, bytes and launches from the shapes, rates from `mie.sim.devices`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu import sass_ledger
from gpu.sass_ledger import Profile
from mie.base.arithmetic import ceil_div
from mie.checkpoint.config import ModelConfig
from mie.ops_gpu.arrays import block_threads
from mie.ops_gpu.dispatch import WARPS, decode_kernel, prefill_kernel, prefill_splits
from mie.ops_gpu.few_rows import MAX_WARPS, UNIT
from mie.ops_gpu.products import MAX_ROWS
from mie.ops_gpu.sampling import CHOOSING_THREADS, PART, PART_THREADS
from mie.sim.devices import Device, find_device

SCHEDULERS = 4
"""Warp instructions that a multiprocessor issues in a clock."""
MMA_FLOPS = 2 * 16 * 8 * 16
"""Operations of a product on tensor cores, m16n8k16."""
RUN_US = 1.8
"""Time of a run of tiles with an empty ring: dependent loads, and the merge of the warps (assumed).

A run is the part of one sequence and KV head that a block of `paged_decode_stream` does at a time.
"""
L2_US = 0.2
"""Time of a load from the L2 cache that must end before the next begins (assumed).

The block that merges the parts of a split prefill loads four of them at a time.
"""
SCALE_BYTES = 4
STORED = {"auto": "f16", "int8": "int8", "fp8": "e4m3"}


@dataclass(frozen=True)
class Chip:
    """A GPU: its data sheet in the simulator's table, and the numbers of kernels besides."""

    title: str
    name: str
    """A part of the name that CUDA gives."""
    device: str
    target: str
    """The target of the ledger of machine code that stands for this chip."""
    num_multiprocessors: int
    clock_hz: float
    stream_share: float
    """Share of the bandwidth that a kernel reaches which only reads (assumed)."""
    launch_us: float
    """Time from one kernel of a graph to the next (assumed)."""

    @property
    def sheet(self) -> Device:
        """The data sheet."""
        return find_device(self.device)

    @property
    def bytes_per_us(self) -> float:
        """The bandwidth that a kernel reaches."""
        return self.sheet.bandwidth * self.stream_share * 1e-6

    @property
    def slots_per_us(self) -> float:
        """Warp instructions that the chip issues in a microsecond."""
        return self.num_multiprocessors * SCHEDULERS * self.clock_hz * 1e-6

    def limits(self, work: Work) -> dict[str, float]:
        """Return the microseconds that each limit alone would let a launch take."""
        share = self.sheet.gemm_percent / 100 if work.is_gemm else 1.0
        return {
            "bytes": work.bytes / self.bytes_per_us,
            "issue": work.slots / (self.slots_per_us * work.busy),
            "tensor cores": 1e6 * work.flops / (self.sheet.flops * share * work.busy),
        }

    def microseconds(self, work: Work) -> float:
        """Return the time of a launch: one launch, its largest limit, and its runs' latency."""
        return self.launch_us + max(self.limits(work).values()) + work.latency_us

    def limited_by(self, work: Work) -> str:
        """Return the limit that takes the largest part of a launch's time."""
        limits = self.limits(work)
        slowest = max(limits, key=limits.__getitem__)
        return slowest if limits[slowest] > self.launch_us + work.latency_us else "launch"

    def issue_share(self, work: Work) -> float:
        """Return the share of issue slots that the launch needs while its bytes stream."""
        limits = self.limits(work)
        return limits["issue"] / limits["bytes"]


CHIPS = (
    Chip("H200 SXM", "H200", "h200", "13.4 sm_90", 132, 1.755e9, 0.9, 2.5),
    Chip("A100 SXM 80 GB", "A100", "a100", "13.4 sm_80", 108, 1.41e9, 0.87, 2.5),
    Chip("Jetson Orin Nano Super", "Orin", "jetson-orin-nano", "12.6 sm_87", 8, 1.02e9, 0.85, 5.0),
    Chip("RTX 5090", "RTX 5090", "rtx-5090", "13.4 sm_120", 170, 2.407e9, 0.9, 2.5),
)


def find_chip(name: str) -> Chip | None:
    """Return the chip whose name is in CUDA's name of a device, if there is one."""
    return next((chip for chip in CHIPS if chip.name.lower() in name.lower()), None)


class Work(NamedTuple):
    """The work of a launch."""

    name: str
    bytes: float
    slots: float = 0.0
    """Warp instructions."""
    flops: float = 0.0
    """Operations on tensor cores."""
    latency_us: float = 0.0
    count: int = 1  # type: ignore[assignment]
    """How often the launch occurs in a step."""
    is_gemm: bool = False
    """Whether cuBLAS does it. Its instructions are not known."""
    busy: float = 1.0
    """Share of the multiprocessors that have a block."""


@functools.cache
def _ledger() -> dict[str, sass_ledger.Profiles]:
    return sass_ledger.read()


def _profile(chip: Chip, kernel: str) -> Profile:
    return _ledger()[chip.target][kernel]


def row_work(
    chip: Chip, kernel: str, num_bytes: float, warps: int, *, name: str = "", count: int = 1
) -> Work:
    """Return the work of a kernel that passes over rows: ``warps`` warps touch the bytes once.

    A loop's instructions count for the share of the bytes that its requests have among the loops.
    """
    profile = _profile(chip, kernel)
    looped = [loop for loop in profile.loops if loop.bytes]
    per_byte = sum(loop.instructions for loop in looped) / max(1, sum(x.bytes for x in looped))
    slots = warps * profile.outside.instructions + num_bytes / 32 * per_byte
    short = kernel.partition(" ")[2].partition("<")[0]
    return Work(name or short, num_bytes, slots, count=count)


def gemm_work(name: str, rows: int, columns: int, depth: int, count: int = 1) -> Work:
    """Return the work of a 16-bit matrix product ``[rows, depth] · [columns, depth]ᵀ``."""
    num_bytes = 2 * (columns * depth + rows * (columns + depth))
    return Work(name, num_bytes, flops=2 * rows * columns * depth, count=count, is_gemm=True)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The shape of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_cache_dtype: str = "auto"
    element: str = "f16"

    @property
    def group(self) -> int:
        """Number of query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored(self) -> str:
        """The kernels' name of the cache's elements."""
        return self.element if self.kv_cache_dtype == "auto" else STORED[self.kv_cache_dtype]

    @property
    def vector_bytes(self) -> int:
        """The bytes of a key, and of a value."""
        return 2 * self.head_dim if self.stored == self.element else self.head_dim + SCALE_BYTES


def few_rows_work(
    chip: Chip, kernel: str, name: str, rows: int, columns: int, depth: int, count: int = 1
) -> Work:
    """Return the work of a product of `few_rows.cu`, of up to 16 rows.

    The kernel's name ends with + if its rows are not normalised. Each loop but that of the products
    counts once for each warp.
    """
    tiles, norm = 1 if rows <= 8 else 2, "false" if kernel.endswith("+") else "true"
    parameters = f"<f16, f16, {UNIT}, false, {tiles}, {norm}, true>"
    profile = _profile(chip, f"few_rows.cu few_rows_{kernel.rstrip('+')}{parameters}")
    inner = next(loop for loop in profile.loops if loop.mma)
    around = sum(loop.instructions for loop in profile.loops if not loop.mma)
    blocks, units = ceil_div(columns, 32), ceil_div(depth, UNIT)
    warps = blocks * min(MAX_WARPS, units)
    slots = blocks * units * inner.instructions
    slots += warps * (profile.outside.instructions + around)
    num_bytes = 2 * (columns * depth + rows * (columns + depth))
    return Work(name, num_bytes, slots, 2 * 8 * tiles * columns * depth, count=count)


def decode_work(chip: Chip, shape: Attention, lengths: Sequence[int], count: int = 1) -> Work:
    """Return the work of `paged_decode_stream`, whose last blocks merge the parts."""
    kernel = decode_kernel(
        shape.element, shape.head_dim, shape.group, 16, stored=shape.stored, may_stream=True
    )
    assert kernel.kind == "stream", "only streamed decodes are predicted"
    profile = _profile(chip, f"paged_decode_stream.cu paged_decode_stream{kernel.parameters}")
    inner = next(loop for loop in profile.loops if loop.mma)
    around = sum(loop.instructions for loop in profile.loops if not loop.mma)
    warp_tiles = shape.num_kv_heads * sum(ceil_div(length, 16) for length in lengths)
    heads = shape.num_kv_heads * len(lengths)
    blocks = chip.num_multiprocessors * max(1, profile.warps // WARPS)
    blocks = max(1, min(blocks, warp_tiles // (2 * WARPS)))
    runs = max(blocks, heads) if heads % blocks == 0 else heads + blocks
    rows = 2 * len(lengths) * shape.num_heads * shape.head_dim * 2
    return Work(
        f"paged_decode_stream, {shape.kv_cache_dtype}",
        2 * shape.num_kv_heads * sum(lengths) * shape.vector_bytes + rows,
        warp_tiles * inner.instructions + runs * WARPS * (around + profile.outside.instructions),
        warp_tiles * inner.mma * MMA_FLOPS,
        RUN_US * ceil_div(runs, blocks),
        count,
    )


def prefill_work(
    chip: Chip, shape: Attention, num_queries: int, prefix: int = 0, *, may_split: bool = True
) -> Work:
    """Return the work of `paged_prefill_mma` for one sequence."""
    kernel = prefill_kernel(shape.element, shape.head_dim, 16, stored=shape.stored)
    profile = _profile(chip, f"{kernel.name}.cu {kernel.name}{kernel.parameters}")
    inner = next(loop for loop in profile.loops if loop.mma)
    blocks = ceil_div(num_queries * shape.group, kernel.rows)
    tiles = sum(
        ceil_div(prefix + min(num_queries, (block + 1) * kernel.rows // shape.group + 1), 64)
        for block in range(blocks)
    )
    warp_tiles = WARPS * tiles * shape.num_kv_heads
    splits = prefill_count(chip, shape, num_queries, prefix) if may_split else 1
    num_blocks = splits * blocks * shape.num_kv_heads
    part_bytes = 4 * kernel.rows * (shape.head_dim + 1)
    rounds = kernel.rows * shape.head_dim // (4 * 32 * WARPS) * ceil_div(splits, 4)
    return Work(
        f"paged_prefill_mma, {shape.kv_cache_dtype}",
        2 * shape.num_kv_heads * (prefix + num_queries) * shape.vector_bytes
        + 4 * num_queries * shape.num_heads * shape.head_dim
        + (2 * num_blocks * part_bytes if splits > 1 else 0),
        warp_tiles * inner.instructions + WARPS * num_blocks * profile.outside.instructions,
        warp_tiles * inner.mma * MMA_FLOPS,
        RUN_US + rounds * L2_US if splits > 1 else 0.0,
        busy=min(1.0, num_blocks / chip.num_multiprocessors),
    )


def prefill_count(chip: Chip, shape: Attention, num_queries: int, prefix: int) -> int:
    """Return the number of splits of a prefill's keys."""
    kernel = prefill_kernel(shape.element, shape.head_dim, 16, stored=shape.stored)
    profile = _profile(chip, f"{kernel.name}.cu {kernel.name}{kernel.parameters}")
    num_blocks = ceil_div(num_queries * shape.group, kernel.rows) * shape.num_kv_heads
    resident = chip.num_multiprocessors * profile.warps // WARPS
    return prefill_splits(prefix + num_queries, num_blocks, resident).count


def decode_step(
    chip: Chip, model: ModelConfig, num_seqs: int, context: int, kv_cache_dtype: str = "auto"
) -> list[Work]:
    """Return the launches of a greedy decode step in float16, in order. Kernels' names repeat."""
    hidden, mlp, layers = model.hidden_size, model.intermediate_size, model.num_layers
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    heads = model.num_heads + 2 * model.num_kv_heads
    shape = Attention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_cache_dtype=kv_cache_dtype,
    )

    def rows(
        file: str, num_bytes: int, threads: int, count: int = 1, kernel: str = "", name: str = ""
    ) -> Work:
        warps = num_seqs * ceil_div(threads, 32)
        kernel = kernel or f"{file}.cu {file}<f16>"
        return row_work(chip, kernel, num_seqs * num_bytes, warps, name=name, count=count)

    vector, cached = 2 * shape.vector_bytes * model.num_kv_heads, shape.stored
    if kv_cache_dtype == "auto":
        rope = rows("rope_write_kv", 4 * queries + 4 * keys + vector, block_threads(heads * 16))
    else:
        kernel = f"rope_quantize_kv.cu rope_quantize_kv<f16, {cached}>"
        rope = rows("", 4 * queries + 4 * keys + vector, min(256, 32 * heads), kernel=kernel)
    parts = ceil_div(model.vocab_size, PART)
    attention = decode_work(chip, shape, [context] * num_seqs, layers)
    embed, taken = (
        rows("gather_rows", 4 * hidden, block_threads(hidden // 8), name=f"{name}: gather_rows")
        for name in ("embed", "rows")
    )
    greedy = [
        rows("find_largest", 2 * model.vocab_size, parts * PART_THREADS),
        rows("choose_tokens", 8 * parts, CHOOSING_THREADS),
    ]
    if num_seqs <= MAX_ROWS:

        def few(kernel: str, name: str, columns: int, depth: int, count: int = layers) -> Work:
            name = f"{name}: few_rows_{kernel.rstrip('+')}"
            return few_rows_work(chip, kernel, name, num_seqs, columns, depth, count)

        is_fused = kv_cache_dtype == "auto"
        kernel = "qkv" if is_fused else "linear"
        return [
            embed,
            few(kernel, "query, key, value", queries + 2 * keys, hidden),
            *([] if is_fused else [rope._replace(count=layers)]),
            attention,
            few("linear+", "attention output", hidden, queries),
            few("gated", "gate, up", 2 * mlp, hidden),
            few("linear+", "down", hidden, mlp),
            taken,
            few("linear", "output head", model.vocab_size, hidden, 1),
            *greedy,
        ]
    return [
        embed,
        rows("rms_norm", 4 * hidden, block_threads(hidden // 4), 2 * layers + 1),
        gemm_work("query, key, value: cuBLAS", num_seqs, queries + 2 * keys, hidden, layers),
        rope._replace(count=layers),
        attention,
        gemm_work("attention output: cuBLAS", num_seqs, hidden, queries, layers),
        gemm_work("gate, up: cuBLAS", num_seqs, 2 * mlp, hidden, layers),
        rows("silu_mul", 6 * mlp, mlp, layers),
        gemm_work("down: cuBLAS", num_seqs, hidden, mlp, layers),
        taken,
        gemm_work("output head: cuBLAS", num_seqs, model.vocab_size, hidden),
        *greedy,
    ]


def num_launches(step: Sequence[Work]) -> int:
    """Return the number of kernels that a step launches."""
    return sum(work.count for work in step)


def step_us(chip: Chip, step: Sequence[Work]) -> float:
    """Return the predicted microseconds of a step on the device. The host's time is hidden."""
    return sum(work.count * chip.microseconds(work) for work in step)


def floor_us(chip: Chip, step: Sequence[Work]) -> float:
    """Return the microseconds of the step's bytes alone."""
    return sum(work.count * work.bytes for work in step) / chip.bytes_per_us
