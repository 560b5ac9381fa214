"""Measure a GPU in one run: its ceilings, attention, and the engine end to end.

    python scripts/benchmark.py gpu [--output PREFIX] [--seconds 300]
    python scripts/benchmark.py gpu --dry-run     run every part on the emulator, tiny and untimed

Every shape is compared with the NumPy operator in float64 before it is timed. A sample is a CUDA
graph of calls that rotate over at least three KV caches, so that the L2 cache does not hold them.
Where CuPy cannot capture a graph, the calls are launched one by one. Each engine of the end-to-end
part has its own process. A row that does not run says why. Results are written after every row.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.attention import bench_decode, bench_prefill
from bench.gpu.ceilings import measure_ceilings
from bench.gpu.device import CupyDevice, Device, DryDevice, free_device_memory, one_line
from bench.gpu.end_to_end import bench_end_to_end
from bench.gpu.page import as_markdown
from bench.gpu.report import BenchReport
from bench.gpu.shapes import (
    BLOCK_SIZE,
    MORE,
    PREFILL,
    QUANTISED,
    TINY_DECODES,
    TINY_PREFILL,
    UNIFORM,
)
from bench.harness import parser_of
from mie.errors import MieError
from mie.ops_gpu.environment import library_facts

Part = tuple[str, Callable[[], None]]


def bench(device: Device, report: BenchReport, seconds: float) -> None:
    """Run all parts, the most wanted first, and skip by name those without time."""
    end = time.monotonic() + seconds
    measure_ceilings(device, report)
    for name, measure in parts(device, report):
        free_device_memory(device.xp)
        if time.monotonic() >= end:
            report.skip(name, f"the {seconds:.0f} s were used up")
            continue
        try:
            measure()
        except MemoryError as error:  # CuPy's is one
            report.skip(name, one_line(error))
        except Exception as error:  # the other rows still count
            report.fail(f"{name}: {one_line(error)}")
        report.save()


def parts(device: Device, report: BenchReport) -> Iterable[Part]:
    """Yield the parts after the ceilings, in order."""

    def rows(
        what: str, bench_shape: Callable[..., None], shapes: Iterable[object]
    ) -> Iterable[Part]:
        for shape in shapes:
            yield f"{what}, {shape}", functools.partial(bench_shape, device, shape, report)

    is_dry_run = report.is_dry_run
    yield from rows("decode", bench_decode, TINY_DECODES if is_dry_run else UNIFORM)
    yield "end to end", lambda: bench_end_to_end(report)
    yield from rows("prefill", bench_prefill, [TINY_PREFILL] if is_dry_run else PREFILL)
    yield from rows("decode", bench_decode, [] if is_dry_run else [*QUANTISED, *MORE])


def device_state(device: Device, is_dry_run: bool) -> dict[str, Any]:
    """Return the facts about the device and the software that the figures hold for."""
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
        **library_facts(xp),
        "cuda_driver": xp.cuda.runtime.driverGetVersion(),
        "num_multiprocessors": device.chip.num_multiprocessors,
        "l2_bytes": device.l2_bytes,
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the results. Return 1 if a row failed, else 0."""
    parser = parser_of("gpu", __doc__)
    add = parser.add_argument
    add("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    add("--seconds", type=float, default=300, help="start no row after this time")
    add("--dry-run", action="store_true", help="run on the emulator, tiny and untimed")
    args = parser.parse_args(argv)
    try:
        device: Device = DryDevice() if args.dry_run else CupyDevice()
    except MieError as error:
        print(f"benchmark.py gpu: {error}", file=sys.stderr)
        return 2
    report = BenchReport(
        state=device_state(device, args.dry_run),
        prefix=Path(args.output) if args.output else None,
        is_dry_run=args.dry_run,
    )
    bench(device, report, args.seconds)
    print(as_markdown(asdict(report)))
    return 1 if report.failures else 0
