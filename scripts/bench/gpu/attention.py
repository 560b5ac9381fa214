"""Measure attention: compare with the NumPy operator first, then time."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench.gpu.device import SAMPLES, Device, one_line
from bench.gpu.inputs import Inputs, decode_inputs, prefill_inputs
from bench.gpu.numbers import ERRORS
from bench.gpu.report import BenchReport
from bench.gpu.shapes import DecodeShape, PrefillShape

NUM_PASSES = 2


def bench_decode(device: Device, shape: DecodeShape, report: BenchReport) -> None:
    """Measure one decode shape."""
    report.decode.append(
        measured(
            device,
            decode_inputs(device, shape),
            report,
            lambda timing: decode_rates(shape, timing, report.ceilings),
        )
    )


def bench_prefill(device: Device, shape: PrefillShape, report: BenchReport) -> None:
    """Measure one prefill shape."""
    report.prefill.append(
        measured(
            device,
            prefill_inputs(device, shape),
            report,
            lambda timing: prefill_rates(shape, timing, report.ceilings),
        )
    )


def measured(
    device: Device,
    inputs: Inputs,
    report: BenchReport,
    rates: Callable[[Mapping[str, Any]], dict[str, float]],
) -> dict[str, Any]:
    """Return a row with times and rates, or with a failure. A wrong result is not timed."""
    shape = inputs.shape
    error = inputs.error()
    row: dict[str, Any] = {"shape": str(shape), **asdict(shape), "version": "mie", "error": error}
    if not error <= ERRORS[shape.dtype]:
        report.fail(f"{shape}: relative error {error:.1e}")
        return {**row, "reason": "wrong result, not timed"}
    try:
        timing = timed(device, inputs)
    except Exception as fault:  # any error of CuPy: the row names it
        report.fail(f"{shape}: {one_line(fault)}")
        timing = {"reason": one_line(fault)}
    print(f"{shape}: {timing.get('median_us')} us, error {error:.1e}", flush=True)
    return {**row, **timing, **rates(timing)}


def timed(device: Device, inputs: Inputs) -> dict[str, Any]:
    """Return median, least and most of all samples, and how far the passes' medians differ."""
    calls = inputs.calls()
    passes = [device.samples(calls, SAMPLES) for _ in range(NUM_PASSES)]
    values = [value for each in passes for value in each.values]
    medians = [statistics.median(each.values) for each in passes]
    return {
        "median_us": statistics.median(values),
        "min_us": min(values),
        "max_us": max(values),
        "num_samples": len(values),
        "noise": max(medians) / min(medians) - 1,
        "method": passes[0].method,
        "eager_us": device.eager_us(calls),
    }


def decode_rates(
    shape: DecodeShape, timing: Mapping[str, Any], ceilings: Mapping[str, float]
) -> dict[str, float]:
    """Return useful GB/s, shares of both ceilings, and the time that the higher ceiling allows."""
    copy, read = ceilings["copy_gb_per_s"], ceilings["read_gb_per_s"]
    floor = {"floor_us": 1e-3 * shape.useful_bytes / max(copy, read)}
    if "median_us" not in timing:
        return floor
    rate = 1e-3 * shape.useful_bytes / timing["median_us"]
    return {**floor, "gb_per_s": rate, "share_of_copy": rate / copy, "share_of_read": rate / read}


def prefill_rates(
    shape: PrefillShape, timing: Mapping[str, Any], ceilings: Mapping[str, float]
) -> dict[str, float]:
    """Return useful TFLOP/s, and the share of the matrix product's rate if that was measured."""
    gemm = ceilings.get("gemm_tflops")
    found = {"floor_us": 1e-6 * shape.flops / gemm} if gemm else {}
    if "median_us" in timing:
        found["tflops"] = 1e-6 * shape.flops / timing["median_us"]
        if gemm:
            found["share_of_gemm"] = found["tflops"] / gemm
    return found
