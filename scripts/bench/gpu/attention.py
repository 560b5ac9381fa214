"""Compare attention of mie and its peers over the same numbers: check first, then time in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench.gpu.device import SAMPLES, Device
from bench.gpu.inputs import Inputs, decode_inputs, prefill_inputs
from bench.gpu.numbers import ERRORS
from bench.gpu.peers import Peer, decode_peers, prefill_peers
from bench.gpu.report import BenchReport
from bench.gpu.shapes import DecodeShape, PrefillShape
from bench.gpu.timing import timed_in_turns

Rates = Callable[[Mapping[str, Any]], dict[str, float]]
"""Computes rates from a timing."""


def bench_decode(device: Device, shape: DecodeShape, report: BenchReport) -> None:
    """Measure the rows of one decode shape."""
    inputs = decode_inputs(device, shape)
    peers = decode_peers(inputs, report)
    report.decode += measured(
        device, inputs, peers, report, lambda timing: decode_rates(shape, timing, report.ceilings)
    )


def bench_prefill(device: Device, shape: PrefillShape, report: BenchReport) -> None:
    """Measure the rows of one prefill shape."""
    inputs = prefill_inputs(device, shape)
    peers = prefill_peers(inputs, report)
    report.prefill += measured(
        device, inputs, peers, report, lambda timing: prefill_rates(shape, timing, report.ceilings)
    )


def measured(
    device: Device, inputs: Inputs, peers: Mapping[str, Peer], report: BenchReport, rates: Rates
) -> list[dict[str, Any]]:
    """Add a row or a failure for each version. A wrong result is not timed."""
    shape = inputs.shape
    row: dict[str, Any] = {"shape": str(shape), **asdict(shape)}
    error = inputs.error()
    if not error <= ERRORS[shape.dtype]:
        report.fail(f"{shape}: relative error {error:.1e}")
        return [{**row, "version": "mie", "error": error, "reason": "wrong result, not timed"}]
    calls = inputs.calls()
    timings = timed_in_turns(
        {
            "mie": lambda: device.samples(calls, SAMPLES),
            **{name: peer.samples for name, peer in peers.items()},
        }
    )
    if "reason" in timings["mie"]:
        report.fail(f"{shape}: {timings['mie']['reason']}")
    timings["mie"]["eager_us"] = device.eager_us(calls)
    errors = {"mie": error, **{name: peer.error for name, peer in peers.items()}}
    print(f"{shape}: {timings['mie'].get('median_us')} us, error {error:.1e}", flush=True)
    return [
        {**row, "version": version, "error": errors[version], **timing, **rates(timing)}
        for version, timing in timings.items()
    ]


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
