#!/usr/bin/env python
"""Compile every kernel for every target with NVRTC, as CuPy would, and compare with the ledger.

    scripts/nvrtc_check.py                  the checks of `make test-all`
    scripts/nvrtc_check.py --update         write the kernels' present needs into the ledger

This needs neither a GPU nor a driver nor CuPy. `pip install '.[nvrtc]'` brings two compilers, which
are loaded through ctypes. The compilers get no CUDA headers, because users have none either. The
ledger, tests/kernels/ledger.json, holds for each kernel and target [registers, bytes of static
shared memory, bytes of stack]. More than that is a failure, and so is a spilled register, but for
the few bytes of `nvrtc_kernels.SPILLS`.
"""

import argparse
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu.nvrtc_kernels import ENTRIES, ROOT, SPILLS, Entry

from mie.base.cache_dir import open_cache, read_json, write_json
from mie.ops_gpu.nvrtc import Compiled, Nvrtc
from mie.ops_gpu.source import CUPY_OPTIONS, NVRTC_OPTIONS, flat_source

LEDGER = ROOT / "tests" / "kernels" / "ledger.json"

# Ampere, Jetson Orin, Hopper, consumer Blackwell; 12.6 is JetPack 6's and lacks sm_120.
TARGETS = {"12.6": (80, 87, 90), "13.4": (80, 87, 90, 120)}

REPORT_OPTION = "--ptxas-options=-v"
"""Asks for the report that the ledger is from."""

REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor: a block must fit


class Usage(NamedTuple):
    """The needs of one kernel on one target."""

    registers: int
    shared: int
    stack: int
    spilled: int = 0


Usages = dict[str, Usage]
"""The usage of each kernel, by names such as "rms_norm.cu rms_norm<float>"."""


def compile_file(
    nvrtc: Nvrtc, source: str, names: Sequence[str], options: Sequence[str]
) -> tuple[Compiled, Usages]:
    """Compile a file, and return its code and the needs of each kernel.

    Raises:
        CompileError: the file does not compile.
    """
    compiled = nvrtc.compile(source, names, options)
    usages = read_log(compiled.log)
    return compiled, {name: usages[compiled.mangled[name]] for name in names}


def read_log(log: str) -> dict[str, Usage]:
    """Return the report of ptxas on each kernel, by its mangled name."""
    usages = {}
    for part in log.split("Compiling entry function '")[1:]:
        numbers = {
            key: int(found[1]) if (found := re.search(pattern, part)) else 0
            for key, pattern in {
                "registers": r"Used (\d+) registers",
                "shared": r"(\d+) bytes smem",
                "stack": r"(\d+) bytes stack frame",
                "stored": r"(\d+) bytes spill stores",
                "loaded": r"(\d+) bytes spill loads",
            }.items()
        }
        spilled = numbers.pop("stored") + numbers.pop("loaded")
        usages[part.partition("'")[0]] = Usage(**numbers, spilled=spilled)
    return usages


def installed() -> dict[str, Nvrtc]:
    """Return the NVRTC libraries among the installed wheels, by version."""
    site = Path(sysconfig.get_paths()["platlib"])
    found = map(Nvrtc, sorted(site.glob("nvidia/*/lib/libnvrtc.so.1[0-9]")))
    return {nvrtc.version: nvrtc for nvrtc in found}


def options_for(arch: int, extra: Sequence[str] = ()) -> list[str]:
    """Return CuPy's options for a GPU of this architecture."""
    return [*NVRTC_OPTIONS, *extra, f"-arch=sm_{arch}", *CUPY_OPTIONS, REPORT_OPTION]


def compile_all(nvrtc: Nvrtc, arch: int, entries: Sequence[Entry] = ENTRIES) -> Usages:
    """Return the needs of every kernel on one target."""
    return {
        f"{entry.file} {name}": usage
        for entry in entries
        for name, usage in _compile_once(nvrtc, entry, arch).items()
    }


def _compile_once(nvrtc: Nvrtc, entry: Entry, arch: int) -> Usages:
    """Compile a file, or read its needs from the cache if this text was compiled before."""
    source, options = flat_source(entry.path), options_for(arch, entry.options)
    words = [nvrtc.version, source, *entry.names, *options]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()
    kept = open_cache("nvrtc") / f"usage-{key[:20]}.json"
    found = read_json(kept)
    if found is None:
        _, found = compile_file(nvrtc, source, entry.names, options)
        write_json(kept, found)
    return {name: Usage(*numbers) for name, numbers in found.items()}


# The ledger.


def limits(report: Usages, entries: Sequence[Entry] = ENTRIES) -> Iterator[str]:
    """Yield sentences about faults that no ledger can excuse."""
    threads = {f"{entry.file} {name}": entry.threads for entry in entries for name in entry.names}
    for kernel, usage in report.items():
        if usage.spilled > SPILLS.get(kernel, 0):
            yield f"{kernel} spills {usage.spilled} bytes of registers"
        if usage.registers * threads[kernel] > REGISTER_FILE:
            yield f"{kernel}: {usage.registers} registers do not fit {threads[kernel]} threads"


def growth(report: Usages, ledger: Usages) -> Iterator[str]:
    """Yield sentences about kernels that exceed the ledger, or are missing on one side."""
    for kernel in sorted(ledger.keys() - report.keys()):
        yield f"{kernel} is in the ledger, and no more (--update)"
    for kernel, usage in report.items():
        if kernel not in ledger:
            yield f"{kernel} is not in the ledger (--update)"
            continue
        for what in ("registers", "shared", "stack"):
            now, before = getattr(usage, what), getattr(ledger[kernel], what)
            if now > before:
                yield f"{kernel}: {what} grew from {before} to {now} (--update if it is worth it)"


def target_name(version: str, arch: int) -> str:
    return f"{version} sm_{arch}"


def read_ledger(path: Path = LEDGER) -> dict[str, Usages]:
    """Return the ledger by target, then by kernel."""
    by_kernel = json.loads(path.read_text()) if path.exists() else {}
    ledger: dict[str, Usages] = {}
    for kernel, targets in by_kernel.items():
        for target, numbers in targets.items():
            ledger.setdefault(target, {})[kernel] = Usage(*numbers)
    return ledger


def write_ledger(ledger: dict[str, Usages], path: Path = LEDGER) -> None:
    """Write a line for each kernel, so that a change is easy to read."""
    by_kernel: dict[str, dict[str, list[int]]] = {}
    for target, report in ledger.items():
        for kernel, usage in report.items():
            by_kernel.setdefault(kernel, {})[target] = list(usage[:3])
    lines = [
        f"{json.dumps(kernel)}: {json.dumps(targets)}"
        for kernel, targets in sorted(by_kernel.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write a new ledger")
    parser.add_argument("--target", metavar="NAME", help='one target only, such as "13.4 sm_90"')
    args = parser.parse_args(argv)
    if args.update and args.target:
        parser.error("--update writes the ledger of all targets, so it goes without --target")
    compilers = installed()
    missing = [f"NVRTC {version}" for version in TARGETS if version not in compilers]
    for name in missing:
        print(f"{name} is not installed (pip install '.[nvrtc]')")
    if args.update and missing:
        return 1  # half a ledger would fail elsewhere
    reports: dict[str, Usages] = {}
    for version, archs in TARGETS.items():
        for arch in archs:
            target = target_name(version, arch)
            if version in compilers and args.target in (None, target):
                report = reports[target] = compile_all(compilers[version], arch)
                most = max(usage.registers for usage in report.values())
                print(f"{target}: {len(report)} kernels, at most {most} registers")
    if not reports:
        parser.error(f"nothing to compile for target {args.target!r}")
    problems = [
        f"{target}: {sentence}"
        for target, report in reports.items()
        for sentence in (limits(report) if args.update else complaints(target, report))
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    if args.update and not problems:
        write_ledger(reports)
    return int(bool(problems))


def complaints(target: str, report: Usages) -> Iterator[str]:
    """Yield sentences about needs above the limits and the ledger."""
    yield from limits(report)
    yield from growth(report, read_ledger().get(target, {}))


if __name__ == "__main__":
    sys.exit(main())
