#!/usr/bin/env python
"""Speed on a GPU: ceilings, decode attention, and the engine end to end, in one run.

    python scripts/bench_gpu.py [--output PREFIX] [--seconds 300]
    python scripts/bench_gpu.py --dry-run       the same way through, tiny, on the emulator, untimed

Every shape is checked against the NumPy operator in float64 before it is timed. A sample is a CUDA
graph of calls that rotate over three KV caches or more, so that the L2 cache holds none of them;
where CuPy cannot capture one, the calls as they are. Each engine of the end-to-end part has a
process of its own. What does not run is a row that says why. Results are written after every row.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from bench_cpu import LLAMA, SHAPES
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mie.errors import MieError
from mie.model.config import ModelConfig
from mie.model.weights import expected_tensors
from mie.ops.attention import paged_attention
from mie.ops.backend import Array, StepBatch
from mie.ops_gpu.arrays import DTYPES, ceil_div, to_host
from mie.ops_gpu.attention import PagedAttention
from mie.ops_gpu.batch import DeviceBatch, to_device
from mie.ops_gpu.chip import Chip, current_chip
from mie.ops_gpu.cupy_backend import EMULATED_CHIP
from mie.ops_gpu.launcher import CupyLauncher, EmulatedLauncher, Launcher

BLOCK_SIZE = 16
CALLS = 20
"""Calls of a sample, so that the launch of the graph weighs little."""
PASSES, PASS_SAMPLES = 2, 30
"""A-B-B-A: each version is sampled twice, and the difference of its medians is the noise."""
MIN_KV_SETS = 3
L2_MULTIPLE = 3
ERRORS = {"float16": 1e-3, "bfloat16": 6e-3}
"""Relative norm errors that are allowed; tests/kernels/test_kernels.py has the same."""
PROMPT_LENGTH = 16
FLOOR_RATIO, GENERATE_RATIO, COPY_SHARE = 1.5, 30.0, 0.85
"""What issue 4 asks for: decode's time over its floor, tokens/s over transformers' sequential
`generate` at 64 requests, and the share of the copy rate at batch 64, context 4,096, head 128."""


# What is measured.


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """A decode step's attention: ``num_seqs`` sequences of ``context`` tokens (on average)."""

    head_dim: int
    num_kv_heads: int
    num_seqs: int
    context: int
    dtype: str = "float16"
    is_ragged: bool = False
    num_heads: int = 32

    @property
    def useful_bytes(self) -> int:
        """Keys and values once, queries, and outputs."""
        kv = 2 * self.num_seqs * self.context * self.num_kv_heads * self.head_dim
        return (kv + 2 * self.num_seqs * self.num_heads * self.head_dim) * 2

    def lengths(self) -> list[int]:
        """One for each sequence; ragged ones are lognormal and have the same sum."""
        if not self.is_ragged:
            return [self.context] * self.num_seqs
        return ragged_lengths(self.num_seqs, self.context)

    def __str__(self) -> str:
        kind = "ragged" if self.is_ragged else "uniform"
        return (
            f"Dh {self.head_dim}, {self.num_heads}/{self.num_kv_heads} heads, S {self.num_seqs}, "
            f"ctx {self.context}, {self.dtype}, {kind}"
        )


_SIZES = (
    (128, 8, 64, 4096),
    (128, 4, 64, 4096),
    (64, 8, 64, 4096),
    (64, 4, 64, 4096),
    (128, 8, 32, 4096),
    (128, 8, 256, 1024),
    (128, 8, 8, 4096),
    (64, 4, 64, 512),
    (128, 8, 1, 4096),
)
UNIFORM = [
    AttentionShape(head_dim=head_dim, num_kv_heads=heads, num_seqs=num_seqs, context=context)
    for head_dim, heads, num_seqs, context in _SIZES
]
RAGGED = [replace(shape, is_ragged=True) for shape in UNIFORM if shape.num_seqs > 1]
MORE = [*RAGGED, *(replace(shape, dtype="bfloat16") for shape in [*UNIFORM, *RAGGED])]
TINY_SHAPE = AttentionShape(head_dim=64, num_kv_heads=1, num_seqs=3, context=40, num_heads=2)


def ragged_lengths(num_seqs: int, context: int) -> list[int]:
    """Lognormal lengths in context / 32 … 8192 (at least) whose sum is num_seqs * context."""
    low, high = max(1, context // 32), max(8192, context)
    total = num_seqs * context
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, num_seqs)
    for _ in range(20):
        lengths = np.clip(lengths * total / lengths.sum(), low, high)
    whole = lengths.astype(int)
    for row in itertools.cycle(range(num_seqs)):
        missing = total - int(whole.sum())
        if not missing:
            return [int(length) for length in whole]
        step = 1 if missing > 0 else -1
        if low <= whole[row] + step <= high:
            whole[row] += step
    raise AssertionError("a cycle has no end")


# Where it is measured.


class Device(Protocol):
    """A machine, real or played."""

    xp: Any
    launcher: Launcher
    chip: Chip
    l2_bytes: int
    buffer_bytes: int
    """Of a buffer that measures the memory: two of them fit."""

    def samples(self, calls: Sequence[Callable[[], object]], count: int) -> Samples:
        """``count`` times the mean microseconds of the calls, after a first one untimed."""

    def eager_us(self, calls: Sequence[Callable[[], object]]) -> float:
        """The median microseconds of the calls as they are, without a graph."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Microseconds of a call, and how they were taken: "graph", "eager", "fake"."""

    method: str
    values: list[float]


class CupyDevice:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.launcher: Launcher = CupyLauncher()
        self.xp: Any = self.launcher.xp
        self.chip = current_chip(self.xp)
        self.l2_bytes = int(self.xp.cuda.Device().attributes["L2CacheSize"])
        free = int(self.xp.cuda.runtime.memGetInfo()[0])
        self.buffer_bytes = min(8 << 30, free // 4 >> 20 << 20)
        self._stream = self.xp.cuda.Stream(non_blocking=True)
        self._stream.use()

    def samples(self, calls: Sequence[Callable[[], object]], count: int) -> Samples:
        pool = self.xp.cuda.MemoryPool()  # what a graph writes to must stay its own
        with self.xp.cuda.using_allocator(pool.malloc):
            run_all(calls)
            self._stream.synchronize()
            launch, method = self._captured(calls)
            self._time(launch)
            values = [self._time(launch) / len(calls) for _ in range(count)]
        return Samples(method=method, values=values)

    def eager_us(self, calls: Sequence[Callable[[], object]]) -> float:
        run_all(calls)
        return statistics.median(
            self._time(lambda: run_all(calls)) / len(calls) for _ in range(PASS_SAMPLES)
        )

    def _captured(self, calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
        """A launch of the graph of all calls, or of the calls themselves, and which it is."""
        try:
            self._stream.begin_capture()
            try:
                run_all(calls)
            finally:
                graph = self._stream.end_capture()
            graph.launch(self._stream)
            self._stream.synchronize()
        except Exception as error:  # whatever CuPy says: the row tells
            return lambda: run_all(calls), f"eager ({one_line(error)})"
        return lambda: graph.launch(self._stream), "graph"

    def _time(self, launch: Callable[[], object]) -> float:
        """Microseconds between two events around it."""
        start, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record(self._stream)
        launch()
        end.record(self._stream)
        end.synchronize()
        return 1000.0 * float(self.xp.cuda.get_elapsed_time(start, end))


class DryDevice:
    """The emulator, and a clock that says what it likes."""

    def __init__(self) -> None:
        self.launcher: Launcher = EmulatedLauncher()
        self.xp: Any = np
        self.chip = EMULATED_CHIP
        self.l2_bytes = self.buffer_bytes = 1 << 16

    def samples(self, calls: Sequence[Callable[[], object]], count: int) -> Samples:
        calls[0]()
        return Samples(method="fake", values=[100.0 + index for index in range(count)])

    def eager_us(self, calls: Sequence[Callable[[], object]]) -> float:
        calls[-1]()
        return 123.0


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    """Each once, in order."""
    for call in calls:
        call()


def one_line(error: BaseException) -> str:
    """The error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


# What comes of it.


@dataclass(kw_only=True)
class Report:
    """All results so far, in a file after every change."""

    state: dict[str, Any]
    prefix: Path | None
    is_dry_run: bool
    ceilings: dict[str, float] = field(default_factory=dict)
    attention: list[dict[str, Any]] = field(default_factory=list)
    end_to_end: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def save(self) -> None:
        """PREFIX.json and PREFIX.md as of now."""
        if self.prefix is None:
            return
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        values = {key: value for key, value in asdict(self).items() if key != "prefix"}
        Path(f"{self.prefix}.json").write_text(json.dumps(values, indent=2) + "\n")
        Path(f"{self.prefix}.md").write_text(as_markdown(values))

    def skip(self, name: str, reason: str) -> None:
        """Name what was not measured."""
        if {"name": name, "reason": reason} in self.skipped:
            return
        self.skipped.append({"name": name, "reason": reason})
        print(f"skipped: {name}: {reason}", flush=True)
        self.save()


# Ceilings.

READ_KERNEL = r"""
extern "C" __global__ void read_all(const uint4* x, unsigned* out, long long count) {
    unsigned sum = 0;
    const long long step = 4LL * gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * 4LL * blockDim.x + threadIdx.x; i < count; i += step) {
        uint4 v[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = x[min(i + (long long)k * blockDim.x, count - 1)];
        #pragma unroll
        for (int k = 0; k < 4; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 0x9e3779b9u) *out = sum;  // or the compiler drops the loads
}
"""


def measure_ceilings(device: Device, report: Report) -> None:
    """Copy and read rates in GB/s of a buffer far larger than L2; bf16 matrix product, TFLOP/s."""
    size = 32 if report.is_dry_run else 8192
    report.ceilings.update(memory_ceilings(device, device.buffer_bytes))
    report.save()
    try:
        report.ceilings["gemm_tflops"] = gemm_ceiling(device, size)
    except Exception as error:  # a CuPy without bfloat16 measures everything else
        report.skip("bf16 GEMM", one_line(error))
    print("ceilings:", report.ceilings, flush=True)
    report.save()


def memory_ceilings(device: Device, num_bytes: int) -> dict[str, float]:
    """The copy counts what it reads and what it writes; the read takes the faster of two ways."""
    xp = device.xp
    source, target = random_words(xp, num_bytes), xp.zeros(num_bytes // 4, np.uint32)
    copy_us = statistics.median(
        device.samples([lambda: xp.copyto(target, source)], PASS_SAMPLES).values
    )
    assert bool((target[-4096:] == source[-4096:]).all()), "the copy copied nothing"
    reads = [device.samples([lambda: source.max()], PASS_SAMPLES)]
    if isinstance(device, CupyDevice):
        del target
        reads.append(device.samples([read_call(device, source)], PASS_SAMPLES))
    read_us = min(statistics.median(each.values) for each in reads)
    rates = {
        "copy_gb_per_s": 2e-3 * num_bytes / copy_us,
        "read_gb_per_s": 1e-3 * num_bytes / read_us,
    }
    return {**rates, "buffer_bytes": num_bytes}


def read_call(device: CupyDevice, source: Array) -> Callable[[], object]:
    """A launch that reads every word and writes nothing."""
    kernel = device.xp.RawKernel(READ_KERNEL, "read_all")
    out, count = device.xp.zeros(1, np.uint32), np.int64(source.nbytes // 16)
    grid = (8 * device.chip.num_multiprocessors,)
    return lambda: kernel(grid, (256,), (source, out, count))


def random_words(xp: Any, num_bytes: int) -> Array:
    """Random bits: zeros can be faster than data."""
    chunk = xp.asarray(
        np.random.default_rng(0).integers(0, 2**32, min(num_bytes // 4, 1 << 22), np.uint32)
    )
    words = xp.empty(num_bytes // 4, np.uint32)
    for start in range(0, words.size, chunk.size):
        words[start : start + chunk.size] = chunk[: words.size - start]
    return words


def gemm_ceiling(device: Device, size: int) -> float:
    """TFLOP/s of a square bf16 product of random numbers, checked in one row."""
    xp, dtype = device.xp, DTYPES["bfloat16"]
    a, b = (random_normal(xp, (size, size), dtype, seed) for seed in (0, 1))
    wanted = to_host(a[:1]).astype(np.float64) @ to_host(b).astype(np.float64)
    error = relative_error(to_host(xp.matmul(a, b)[:1]), wanted)
    if not error < ERRORS["bfloat16"]:
        raise ValueError(f"the product is off by {error:.1e}")
    values = device.samples([lambda: xp.matmul(a, b)], 10).values
    return 2e-6 * size**3 / statistics.median(values)


def random_normal(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    """Standard normal numbers, drawn in pieces so that their float64 form needs little room."""
    xp.random.seed(seed)
    out = xp.empty(math.prod(shape), dtype)
    for start in range(0, out.size, 1 << 24):
        part = out[start : start + (1 << 24)]
        part[...] = rounded(xp.random.standard_normal(part.size), dtype)
    return out.reshape(shape)


def rounded(wide: Array, dtype: np.dtype[Any]) -> Array:
    """The numbers in the dtype; bfloat16 by its bits, since few of CuPy's kernels know it."""
    if dtype.name != "bfloat16":
        return wide.astype(dtype)
    bits = wide.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits >> np.uint32(16)).astype(np.uint16).view(dtype)


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """|got - wanted| / |wanted|."""
    difference = got.astype(np.float64) - wanted
    return float(np.linalg.norm(difference) / np.linalg.norm(wanted))


# Decode attention.


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """Queries, a batch, and the caches that calls rotate over."""

    shape: AttentionShape
    q: Array  # [S, Hq, Dh]
    caches: list[Array]  # each [N, 2, Hkv, B, Dh]
    host_batch: StepBatch
    batch: DeviceBatch


def attention_inputs(device: Device, shape: AttentionShape) -> AttentionInputs:
    """Random numbers in blocks of a random order."""
    xp, dtype = device.xp, DTYPES[shape.dtype]
    host_batch, num_blocks = decode_batch(shape.lengths())
    dims = (num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    set_bytes = math.prod(dims) * dtype.itemsize
    num_sets = max(MIN_KV_SETS, ceil_div(L2_MULTIPLE * device.l2_bytes, set_bytes))
    return AttentionInputs(
        shape=shape,
        q=random_normal(xp, (shape.num_seqs, shape.num_heads, shape.head_dim), dtype, 1),
        caches=[random_normal(xp, dims, dtype, 2 + number) for number in range(num_sets)],
        host_batch=host_batch,
        batch=to_device(xp, host_batch),
    )


def decode_batch(lengths: Sequence[int]) -> tuple[StepBatch, int]:
    """One query a sequence; tables of permuted blocks with -1 after the last; and how many."""
    needed = [ceil_div(length, BLOCK_SIZE) for length in lengths]
    free = iter(np.random.default_rng(0).permutation(sum(needed)).tolist())
    tables = np.full((len(lengths), max(needed) + 1), -1)
    for row, count in enumerate(needed):
        tables[row, :count] = list(itertools.islice(free, count))
    none = np.zeros(0, np.int64)
    batch = StepBatch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=np.arange(len(lengths) + 1),
        seq_lens=np.array(lengths),
        block_tables=tables,
        logits_rows=none,
    )
    return batch, sum(needed)


def bench_attention(device: Device, shape: AttentionShape, report: Report) -> None:
    """One row, or its failure: a wrong result is not timed."""
    inputs = attention_inputs(device, shape)
    attention = PagedAttention(device.launcher, device.chip, is_deterministic=False)
    error = attention_error(device, attention, inputs)
    row: dict[str, Any] = {"shape": str(shape), **asdict(shape), "error": error}
    if not error < ERRORS[shape.dtype]:
        report.failures.append(f"{shape}: relative error {error:.1e}")
        report.attention.append({**row, "reason": "wrong result, not timed"})
        return
    calls = rotating(
        [
            functools.partial(attention, inputs.q, cache, inputs.batch, None)
            for cache in inputs.caches
        ]
    )
    versions: dict[str, Callable[[], Samples]] = {
        "mie": lambda: device.samples(calls, PASS_SAMPLES)
    }
    peers = sdpa_peers(device, inputs, report)
    versions.update(peers)
    timings = timed_in_turns(versions)
    if "reason" in timings["mie"]:
        report.failures.append(f"{shape}: {timings['mie']['reason']}")
    eager_us = device.eager_us(calls)
    for version, timing in timings.items():
        report.attention.append(
            {**row, "version": version, **timing, **rates(shape, timing, report.ceilings)}
            | ({"eager_us": eager_us} if version == "mie" else {"error": None})
        )
    print(f"{shape}: {timings['mie'].get('median_us')} us, error {error:.1e}", flush=True)


def rotating(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """At least `CALLS` calls, each given one as often as the others."""
    return list(calls) * ceil_div(CALLS, len(calls))


def timed_in_turns(versions: Mapping[str, Callable[[], Samples]]) -> dict[str, dict[str, Any]]:
    """Each version's figures after passes in the order A-B-B-A; a failure is its reason."""
    passes: dict[str, list[Samples]] = {name: [] for name in versions}
    failed: dict[str, dict[str, Any]] = {}
    for name in [*versions, *reversed(list(versions))]:
        if name in failed:
            continue
        try:
            passes[name].append(versions[name]())
        except Exception as error:
            failed[name] = {"reason": one_line(error)}
    return {name: failed.get(name) or figures(passes[name]) for name in versions}


def figures(passes: Sequence[Samples]) -> dict[str, Any]:
    """Median, least and most of all samples, and by how much the passes' medians differ."""
    values = [value for each in passes for value in each.values]
    medians = [statistics.median(each.values) for each in passes]
    return {
        "median_us": statistics.median(values),
        "min_us": min(values),
        "max_us": max(values),
        "num_samples": len(values),
        "noise": max(medians) / min(medians) - 1,
        "method": passes[0].method,
    }


def rates(
    shape: AttentionShape, timing: Mapping[str, Any], ceilings: Mapping[str, float]
) -> dict[str, float]:
    """Useful GB/s, shares of both ceilings, and the time that the higher ceiling allows."""
    copy, read = ceilings["copy_gb_per_s"], ceilings["read_gb_per_s"]
    floor = {"floor_us": 1e-3 * shape.useful_bytes / max(copy, read)}
    if "median_us" not in timing:
        return floor
    rate = 1e-3 * shape.useful_bytes / timing["median_us"]
    return {**floor, "gb_per_s": rate, "share_of_copy": rate / copy, "share_of_read": rate / read}


def attention_error(device: Device, attention: PagedAttention, inputs: AttentionInputs) -> float:
    """The largest relative error over every cache, in its shortest and its longest sequence."""
    lengths = inputs.host_batch.seq_lens
    rows = sorted({int(lengths.argmin()), int(lengths.argmax()), len(lengths) // 2})
    errors = []
    for cache in inputs.caches[:MIN_KV_SETS]:
        # NaN, in memory that the pool hands out again for the result.
        device.xp.empty_like(inputs.q).view(np.uint16).fill(0xFFFF)
        got = to_host(attention(inputs.q, cache, inputs.batch, None))
        errors += [relative_error(got[row], attended(inputs, cache, row)) for row in rows]
        rows = rows[:1]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def attended(inputs: AttentionInputs, cache: Array, row: int) -> NDArray[Any]:
    """What the NumPy operator gives for one sequence [Hq, Dh], in float64."""
    length = int(inputs.host_batch.seq_lens[row])
    num_blocks = ceil_div(length, BLOCK_SIZE)
    blocks = inputs.batch.block_tables[row, :num_blocks]
    kv = to_host(cache.view(np.uint16)[blocks]).view(cache.dtype)
    keys, values = kv.astype(np.float64).transpose(1, 0, 3, 2, 4)
    out = paged_attention(
        to_host(inputs.q[row : row + 1]).astype(np.float64),
        keys,
        values,
        np.arange(num_blocks)[None],
        np.array([0, 1]),
        np.array([length]),
        inputs.shape.head_dim**-0.5,
    )
    last: NDArray[Any] = out[0]
    return last


# Peers.

SDPA_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def sdpa_peers(
    device: Device, inputs: AttentionInputs, report: Report
) -> dict[str, Callable[[], Samples]]:
    """torch SDPA over contiguous keys and values, which flatters it; none, by name, without."""
    reason = torch_is_missing(report.is_dry_run)
    if reason:
        report.skip("torch SDPA", reason)
        return {}
    if inputs.shape.is_ragged:
        report.skip("torch SDPA, ragged", "contiguous keys and values have one length")
        return {}
    try:
        arrays = torch_inputs(inputs.shape, len(inputs.caches))
    except Exception as error:
        report.skip(f"torch SDPA, {inputs.shape}", one_line(error))
        return {}
    return {
        f"torch SDPA {name.lower()}": functools.partial(sdpa_samples, arrays, name)
        for name in SDPA_BACKENDS
    }


def torch_is_missing(is_dry_run: bool) -> str:
    """Why there is no torch with a device; empty where there is."""
    if is_dry_run:
        return "dry run"
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no device"


def torch_inputs(shape: AttentionShape, num_sets: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """Queries [S, Hq, 1, Dh] and sets of keys and values [S, Hkv, ctx, Dh]."""
    import torch

    options: Any = {"device": "cuda", "dtype": getattr(torch, shape.dtype)}
    dims = (shape.num_seqs, shape.num_kv_heads, shape.context, shape.head_dim)
    q = torch.randn(shape.num_seqs, shape.num_heads, 1, shape.head_dim, **options)
    sets = [(torch.randn(dims, **options), torch.randn(dims, **options)) for _ in range(num_sets)]
    return q, sets


def sdpa_samples(arrays: tuple[Any, list[tuple[Any, Any]]], backend: str) -> Samples:
    """One pass of one of torch's ways, in a graph as ours is; checked against its plain way."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    q, sets = arrays
    with torch.inference_mode(), sdpa_kernel([getattr(SDPBackend, backend)]):
        got = attend(q[:1], sets[0][0][:1], sets[0][1][:1], enable_gqa=True)
        check_sdpa(q, sets[0], got)
        calls = rotating([functools.partial(attend, q, k, v, enable_gqa=True) for k, v in sets])
        run_all(calls)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all(calls)
        torch_us(graph.replay)
        values = [torch_us(graph.replay) / len(calls) for _ in range(PASS_SAMPLES)]
    return Samples(method="graph", values=values)


def check_sdpa(q: Any, kv: tuple[Any, Any], got: Any) -> None:
    """Raise ValueError unless the first sequence's result is that of float64."""
    group = q.shape[1] // kv[0].shape[1]
    k, v = (each[:1].double().repeat_interleave(group, dim=1) for each in kv)
    weights = (q[:1].double() @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(dim=3)
    error = relative_error(got.float().cpu().numpy(), (weights @ v).cpu().numpy())
    if not error < max(ERRORS.values()):
        raise ValueError(f"its result is off by {error:.1e}")


def torch_us(launch: Callable[[], object]) -> float:
    """Microseconds between two events around it."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    end.synchronize()
    return 1000.0 * float(start.elapsed_time(end))


# End to end, in children.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one kind, at once with mie and one after another with `generate`."""

    num_requests: int
    num_tokens: int
    num_generated: int
    """How many of the requests `generate` runs: its rate does not depend on it."""


WORKLOADS = (
    Workload(num_requests=1, num_tokens=150, num_generated=1),
    Workload(num_requests=64, num_tokens=150, num_generated=2),
)
DRY_WORKLOADS = (Workload(num_requests=2, num_tokens=3, num_generated=1),)


def write_model(name: str, directory: Path) -> int:
    """Random bf16 weights, cut from one pool for speed; how many of them a decode step reads."""
    config = {**LLAMA, **SHAPES[name]}
    (directory / "config.json").write_text(json.dumps(config))
    pool = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32)
    scaled: dict[int, NDArray[Any]] = {}
    tensors: dict[str, NDArray[Any]] = {}
    for tensor, shape in expected_tensors(ModelConfig.from_hf(config)).items():
        if len(shape) == 1:
            tensors[tensor] = np.ones(shape, ml_dtypes.bfloat16)
            continue
        if shape[1] not in scaled:
            scaled[shape[1]] = (pool / math.sqrt(shape[1])).astype(ml_dtypes.bfloat16)
        tensors[tensor] = np.resize(scaled[shape[1]], shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    embedding = (
        0 if config.get("tie_word_embeddings") else tensors["model.embed_tokens.weight"].size
    )
    return sum(each.size for each in tensors.values()) - embedding


def prompts_for(vocab_size: int, count: int, seed: int) -> list[list[int]]:
    """Prompts without a common beginning."""
    generator = np.random.default_rng(seed)
    return [
        list(map(int, row)) for row in generator.integers(3, vocab_size, (count, PROMPT_LENGTH))
    ]


def run_mie(directory: str, backend: str, dtype: str, workloads: Sequence[Workload]) -> list[Any]:
    """Of each workload: seconds end to end, the median step of full decodes, and peak memory."""
    from mie import LLM

    most = max(each.num_requests for each in workloads)
    length = PROMPT_LENGTH + max(each.num_tokens for each in workloads)
    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        backend=backend,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=most,
        num_blocks=ceil_div(length, BLOCK_SIZE) * most * 2,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
    )
    vocab_size = ModelConfig.load(Path(directory)).vocab_size
    results = []
    for seed, workload in enumerate(workloads):
        step_through(llm, prompts_for(vocab_size, workload.num_requests, 100 + seed), 3)
        prompts = prompts_for(vocab_size, workload.num_requests, seed)
        seconds, steps = step_through(llm, prompts, workload.num_tokens)
        results.append(
            {
                "seconds": seconds,
                "step_ms": 1000 * statistics.median(steps),
                "peak_bytes": device_pool_bytes(backend),
            }
        )
    return results


def step_through(
    llm: Any, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[float, list[float]]:
    """Seconds from the first request's arrival to the last token, and of each decode step."""
    from mie import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start, steps, num_finished = time.perf_counter(), [], 0
    for prompt in prompts:
        llm.add_request({"prompt_token_ids": prompt}, params)
    while llm.has_work:
        before = time.perf_counter()
        outputs = llm.step()
        steps.append(time.perf_counter() - before)
        finished = [output for output in outputs if output.finished]
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in finished)
        num_finished += len(finished)
    assert num_finished == len(prompts)
    return time.perf_counter() - start, steps[1:]  # the first computes the prompts


def device_pool_bytes(backend: str) -> int | None:
    """What CuPy's pool has taken, which it never gives back by itself."""
    if backend != "cupy":
        return None
    import cupy

    return int(cupy.get_default_memory_pool().total_bytes())


def run_transformers(directory: str, dtype: str, workloads: Sequence[Workload]) -> list[Any]:
    """Of each workload: seconds that all its requests would take one after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model = model.to("cuda").eval()
    model.generation_config.eos_token_id = None
    vocab_size = int(model.config.vocab_size)
    results = []
    for seed, workload in enumerate(workloads):
        prompts = prompts_for(vocab_size, workload.num_generated, seed)
        generate(model, prompts[0], 8)
        seconds = sum(generate(model, prompt, workload.num_tokens) for prompt in prompts)
        scale = workload.num_requests / workload.num_generated
        peak = int(torch.cuda.max_memory_allocated())
        results.append({"seconds": seconds * scale, "peak_bytes": peak})
    return results


def generate(model: Any, prompt: list[int], num_tokens: int) -> float:
    """Seconds of one greedy request."""
    import torch

    ids = torch.tensor([prompt], device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    assert output.shape[1] == len(prompt) + num_tokens
    return time.perf_counter() - start


def run_child(args: argparse.Namespace) -> None:
    """An engine's results as one line of JSON, the last of its output."""
    workloads = DRY_WORKLOADS if args.dry_run else WORKLOADS
    if args.child == "transformers":
        results = run_transformers(args.directory, args.dtype, workloads)
    else:
        backend = "cupy-emulated" if args.dry_run else "cupy"
        results = run_mie(args.directory, backend, args.dtype, workloads)
    print(json.dumps(results))


# End to end, in the parent.


def bench_end_to_end(report: Report, seconds_left: Callable[[], float]) -> None:
    """Both engines on the same random weights, each in a process of its own."""
    name = "toy" if report.is_dry_run else "TinyLlama-1.1B"
    workloads = DRY_WORKLOADS if report.is_dry_run else WORKLOADS
    with tempfile.TemporaryDirectory(prefix="mie-bench-") as temporary:
        num_read = write_model(name, Path(temporary))
        for engine in ("mie", "transformers"):
            label = f"end to end, {engine}"
            reason = engine_is_missing(engine, report.is_dry_run)
            results = reason or run_engine(engine, temporary, report.is_dry_run, seconds_left())
            if isinstance(results, str):
                report.skip(label, results)
                if not reason and engine == "mie":
                    report.failures.append(f"{label}: {results}")
                continue
            for workload, result in zip(workloads, results, strict=True):
                row = end_to_end_row(name, engine, workload, result, num_read, report.ceilings)
                report.end_to_end.append(row)
                print(f"{label}: {row}", flush=True)
            report.save()


def engine_is_missing(engine: str, is_dry_run: bool) -> str:
    """Why an engine cannot run here; empty where it can."""
    if engine == "mie":
        return ""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    return torch_is_missing(is_dry_run)


def run_engine(engine: str, directory: str, is_dry_run: bool, seconds: float) -> list[Any] | str:
    """A child's results, or why there are none."""
    command = [sys.executable, __file__, "--child", engine, "--directory", directory]
    if is_dry_run:
        command.append("--dry-run")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, seconds), check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return f"exit code {done.returncode}: {last[:200]}"
    results: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def end_to_end_row(
    model: str,
    engine: str,
    workload: Workload,
    result: Mapping[str, Any],
    num_read: int,
    ceilings: Mapping[str, float],
) -> dict[str, Any]:
    """Tokens per second, and for mie a decode step beside what its bytes take at the ceiling."""
    num_tokens = workload.num_requests * workload.num_tokens
    row = {
        "model": model,
        "engine": engine,
        "num_requests": workload.num_requests,
        "num_tokens": workload.num_tokens,
        **result,
        "tokens_per_s": num_tokens / result["seconds"],
    }
    if "step_ms" in result:
        floor_ms = step_floor_ms(model, workload, num_read, ceilings)
        row["decode_tokens_per_s"] = 1000 * workload.num_requests / result["step_ms"]
        row |= {"floor_ms": floor_ms, "over_floor": result["step_ms"] / floor_ms}
    return row


def step_floor_ms(
    model: str, workload: Workload, num_read: int, ceilings: Mapping[str, float]
) -> float:
    """16-bit weights and the cache of the median step, once, at the higher of the two ceilings."""
    config = ModelConfig.from_hf({**LLAMA, **SHAPES[model]})
    context = PROMPT_LENGTH + workload.num_tokens / 2
    kv_bytes = workload.num_requests * context * config.kv_bytes_per_token(2)
    rate = max(ceilings["copy_gb_per_s"], ceilings["read_gb_per_s"])
    return 1e-6 * (2 * num_read + kv_bytes) / rate


# The page.


def as_markdown(values: Mapping[str, Any]) -> str:
    """The results as Markdown: tables, what was asked for, what is missing."""
    parts = [
        [f"* {key}: {value}" for key, value in values["state"].items()],
        ["", "### Ceilings", ""],
        [f"* {key}: {value:,.0f}" for key, value in values["ceilings"].items()],
        attention_table(values["attention"]),
        end_to_end_table(values["end_to_end"]),
        goals(values),
        named("Failed", values["failures"]),
        named("Skipped", [f"{each['name']}: {each['reason']}" for each in values["skipped"]]),
    ]
    if values["is_dry_run"]:
        parts.insert(0, ["**A dry run: the figures below are played, nothing was measured.**", ""])
    return "\n".join(line for part in parts for line in part) + "\n"


def named(title: str, lines: Sequence[str]) -> list[str]:
    """A list under a heading; nothing where it is empty."""
    return ["", f"### {title}", "", *(f"* {line}" for line in lines)] if lines else []


def attention_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Microseconds are medians (least–most); eager: the calls as they are, without a graph."""
    lines = ["", "### Decode attention", "", "µs: median (least–most) of one call.", ""]
    lines.append(
        "| shape | version | µs | floor µs | GB/s | of copy | of read | noise | eager µs | error |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    return lines + [attention_line(row) for row in rows]


def attention_line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    version = row.get("version", "mie")
    if "median_us" not in row:
        floor = f"{row['floor_us']:.1f}" if "floor_us" in row else "–"
        return f"| {row['shape']} | {version} | n/a: {row['reason']} | {floor} |{' – |' * 6}"
    method = "" if row["method"] in ("graph", "fake") else f", {row['method']}"
    cells = [
        row["shape"],
        version + method,
        f"{row['median_us']:.1f} ({row['min_us']:.1f}–{row['max_us']:.1f})",
        f"{row['floor_us']:.1f}",
        f"{row['gb_per_s']:.0f}",
        f"{row['share_of_copy']:.1%}",
        f"{row['share_of_read']:.1%}",
        f"{row['noise']:.1%}",
        f"{row['eager_us']:.1f}" if "eager_us" in row else "–",
        f"{row['error']:.1e}" if row["error"] is not None else "–",
    ]
    return f"| {' | '.join(cells)} |"


def end_to_end_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each engine and workload."""
    lines = ["", "### End to end", ""]
    lines.append(
        "| model | engine | requests × tokens | tokens/s | decode tokens/s | step ms | floor ms "
        "| over floor | peak GiB |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        keys = ("decode_tokens_per_s", "step_ms", "floor_ms", "over_floor")
        optional = [f"{row[key]:.3g}" if key in row else "–" for key in keys]
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "–"
        lines.append(
            f"| {row['model']} | {row['engine']} | {row['num_requests']} × {row['num_tokens']} | "
            f"{row['tokens_per_s']:.1f} | {' | '.join(optional)} | {peak} |"
        )
    return lines


def goals(values: Mapping[str, Any]) -> list[str]:
    """What issue 4 asks for, met or missed; nothing of a dry run, nor of what was not measured."""
    if values["is_dry_run"]:
        return []
    lines = []
    ours = [row for row in values["attention"] if row.get("version") == "mie"]
    for row in ours:
        size = (row["head_dim"], row["num_seqs"], row["context"])
        if size == (128, 64, 4096) and "median_us" in row and not row["is_ragged"]:
            share = min(row["share_of_copy"], row["share_of_read"])
            lines.append(goal(f"{row['shape']}: share of the ceiling", share, COPY_SHARE))
    engines = {(row["engine"], row["num_requests"]): row for row in values["end_to_end"]}
    for (engine, count), row in engines.items():
        if engine == "mie":
            over = row["over_floor"]
            verdict = "met" if over <= FLOOR_RATIO else "missed"
            lines.append(f"decode at {count}: {over:.2f} × the floor of {FLOOR_RATIO:g}: {verdict}")
    if ("mie", 64) in engines and ("transformers", 64) in engines:
        pair = [engines[name, 64]["tokens_per_s"] for name in ("mie", "transformers")]
        lines.append(goal("64 requests over generate", pair[0] / pair[1], GENERATE_RATIO))
    return named("Goals of issue 4", lines)


def goal(name: str, got: float, wanted: float) -> str:
    """A figure that should be at least as wanted."""
    return f"{name}: {got:.2f} of {wanted:g}: {'met' if got >= wanted else 'missed'}"


# The run.


def bench(device: Device, report: Report, seconds: float) -> None:
    """Everything, the most wanted first; what the time does not allow is skipped by name."""
    end = time.monotonic() + seconds

    def seconds_left() -> float:
        return end - time.monotonic()

    def attend_all(shapes: Sequence[AttentionShape]) -> None:
        for shape in shapes:
            guarded(
                f"attention, {shape}", functools.partial(bench_attention, device, shape, report)
            )

    def guarded(name: str, measure: Callable[[], None]) -> None:
        if seconds_left() <= 0:
            report.skip(name, f"the {seconds:.0f} s were used up")
            return
        try:
            measure()
        except Exception as error:  # the other rows still count
            report.failures.append(f"{name}: {one_line(error)}")
            print(f"failed: {report.failures[-1]}", file=sys.stderr, flush=True)
        free_device_memory(device.xp)
        report.save()

    measure_ceilings(device, report)
    free_device_memory(device.xp)
    attend_all([TINY_SHAPE] if report.is_dry_run else UNIFORM)
    guarded("end to end", lambda: bench_end_to_end(report, seconds_left))
    attend_all([replace(TINY_SHAPE, is_ragged=True)] if report.is_dry_run else MORE)


def free_device_memory(xp: Any) -> None:
    """Give the pools' memory to whoever comes next."""
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def device_state(device: Device, is_dry_run: bool) -> dict[str, Any]:
    """What the figures hold for."""
    state: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "block_size": BLOCK_SIZE,
    }
    if is_dry_run:
        return {**state, "device": "none (dry run)"}
    xp = device.xp
    properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)
    return {
        **state,
        "device": properties["name"].decode(),
        "cupy": xp.__version__,
        "cuda_runtime": xp.cuda.runtime.runtimeGetVersion(),
        "cuda_driver": xp.cuda.runtime.driverGetVersion(),
        "num_multiprocessors": device.chip.num_multiprocessors,
        "l2_bytes": device.l2_bytes,
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, for people and (``--child``) for the script itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", metavar="PREFIX", help="writes PREFIX.json and PREFIX.md")
    parser.add_argument("--seconds", type=float, default=300, help="start no row after these")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the emulator, untimed")
    parser.add_argument("--child", choices=("mie", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float16", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the results: 0, or 1 where something failed."""
    args = parse_arguments(argv)
    if args.child:
        run_child(args)
        return 0
    try:
        device: Device = DryDevice() if args.dry_run else CupyDevice()
    except MieError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2
    report = Report(
        state=device_state(device, args.dry_run),
        prefix=Path(args.output) if args.output else None,
        is_dry_run=args.dry_run,
    )
    bench(device, report, args.seconds)
    print(as_markdown(asdict(report)))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
