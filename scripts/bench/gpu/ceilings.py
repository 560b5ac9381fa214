"""Measure the device's ceilings: copy, read and multiply."""

import statistics
from typing import Any

import numpy as np

from bench.gpu.device import SAMPLES, Call, CupyDevice, Device, one_line
from bench.gpu.numbers import ERRORS, random_normal, random_words, relative_error
from bench.gpu.report import BenchReport
from mie.ops.backend import Array
from mie.ops_gpu.arrays import DTYPES, to_host

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


def measure_ceilings(device: Device, report: BenchReport) -> None:
    """Measure copy and read rates in GB/s, and a bf16 matrix product in TFLOP/s.

    The buffers are far larger than L2.
    """
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
    """Measure the copy (bytes read and written), and the faster of two ways to read."""
    xp = device.xp
    source, target = random_words(xp, num_bytes), xp.zeros(num_bytes // 4, np.uint32)
    copy_us = statistics.median(device.samples([lambda: xp.copyto(target, source)], SAMPLES).values)
    assert bool((target[-4096:] == source[-4096:]).all()), "the copy copied nothing"
    reads = [device.samples([lambda: source.max()], SAMPLES)]
    if isinstance(device, CupyDevice):
        del target
        reads.append(device.samples([read_call(device, source)], SAMPLES))
    read_us = min(statistics.median(each.values) for each in reads)
    return {
        "copy_gb_per_s": 2e-3 * num_bytes / copy_us,
        "read_gb_per_s": 1e-3 * num_bytes / read_us,
        "buffer_bytes": num_bytes,
    }


def read_call(device: CupyDevice, source: Array) -> Call:
    """Return a launch that reads every word and writes nothing."""
    kernel = device.xp.RawKernel(READ_KERNEL, "read_all")
    out, count = device.xp.zeros(1, np.uint32), np.int64(source.nbytes // 16)
    grid = (8 * device.chip.num_multiprocessors,)
    return lambda: kernel(grid, (256,), (source, out, count))


def gemm_ceiling(device: Device, size: int) -> float:
    """Return TFLOP/s of a square bf16 product of random numbers. One row is checked."""
    xp: Any = device.xp
    dtype = DTYPES["bfloat16"]
    a, b = (random_normal(xp, (size, size), dtype, seed) for seed in (0, 1))
    wanted = to_host(a[:1]).astype(np.float64) @ to_host(b).astype(np.float64)
    error = relative_error(to_host(xp.matmul(a, b)[:1]), wanted)
    if not error < ERRORS["bfloat16"]:
        raise ValueError(f"the product is off by {error:.1e}")
    values = device.samples([lambda: xp.matmul(a, b)], 10).values
    return 2e-6 * size**3 / statistics.median(values)
