#!/usr/bin/env python
"""Compile every kernel for every target with NVRTC, as CuPy would, and compare with the ledger.

    scripts/nvrtc_check.py              what `make test` checks
    scripts/nvrtc_check.py --update     write what the kernels use now into the ledger

This needs neither a GPU nor a driver nor CuPy. `pip install 'mie[nvrtc]'` brings two compilers,
which are loaded through ctypes. They get no CUDA headers, because users have none either. The
ledger, tests/kernels/ledger.json, holds for each kernel and target [registers, bytes of static
shared memory, bytes of stack]. More than that is a failure, and so is any spilled register.
"""

import argparse
import ctypes
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu.nvrtc_kernels import ENTRIES, ROOT, Entry

from mie.ops_gpu.source import NVRTC_OPTIONS, flat_source
from mie.system.cache_dir import open_cache, read_json, write_json

LEDGER = ROOT / "tests" / "kernels" / "ledger.json"

# Ampere, Jetson Orin, Hopper, consumer Blackwell; 12.6 is JetPack 6's and knows no sm_120.
TARGETS = {"12.6": (80, 87, 90), "13.4": (80, 87, 90, 120)}

# What CuPy 14's RawModule adds to the launcher's options, and the report that the ledger is from.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
REPORT_OPTION = "--ptxas-options=-v"

REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor: a block must fit


class Usage(NamedTuple):
    """What one kernel needs on one target."""

    registers: int
    shared: int
    stack: int
    spilled: int = 0


Usages = dict[str, Usage]
"""The usage of each kernel, by names such as "rms_norm.cu rms_norm<float>"."""


class CompileError(Exception):
    """NVRTC refused a file. The message is its log."""


class Nvrtc:
    """One NVRTC library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, names: Sequence[str], options: Sequence[str]) -> Usages:
        """Return what each kernel uses.

        Raises:
            CompileError: the file does not compile.
        """
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), source.encode(), b"", 0, None, None)
        try:
            for name in names:
                self._call("AddNameExpression", program, name.encode())
            words = [word.encode() for word in options]
            array = (ctypes.c_char_p * len(words))(*words)
            failed = self._library.nvrtcCompileProgram(program, len(words), array)
            log = self._text(program, "ProgramLog")
            if failed:
                raise CompileError(log)
            usages = read_log(log)
            return {name: usages[self._lowered(program, name)] for name in names}
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _lowered(self, program: ctypes.c_void_p, name: str) -> str:
        lowered = ctypes.c_char_p()
        self._call("GetLoweredName", program, name.encode(), ctypes.byref(lowered))
        assert lowered.value is not None
        return lowered.value.decode()

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, text)
        return text.value.decode(errors="replace")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, f"nvrtc{name}")(*arguments)
        if code:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise CompileError(f"nvrtc{name}: {describe(code).decode()}")


def read_log(log: str) -> dict[str, Usage]:
    """Return what ptxas reports about each kernel, by its mangled name."""
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
    """Return what every kernel uses on one target."""
    report: Usages = {}
    for entry in entries:
        usages = _compile_once(nvrtc, entry, options_for(arch, entry.options))
        report |= {f"{entry.file} {name}": usage for name, usage in usages.items()}
    return report


def _compile_once(nvrtc: Nvrtc, entry: Entry, options: Sequence[str]) -> Usages:
    """Return the result of `Nvrtc.compile`, from the cache if this text was compiled before."""
    source = flat_source(entry.path)
    words = [nvrtc.version, source, *entry.names, *options]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()
    kept = open_cache("nvrtc") / f"{key[:20]}.json"
    found = read_json(kept)
    if found is not None:
        return {name: Usage(*numbers) for name, numbers in found.items()}
    usages = nvrtc.compile(source, entry.names, options)
    write_json(kept, usages)
    return usages


# The ledger.


def limits(report: Usages, entries: Sequence[Entry] = ENTRIES) -> Iterator[str]:
    """Yield sentences about what no ledger can excuse."""
    threads = {f"{entry.file} {name}": entry.threads for entry in entries for name in entry.names}
    for kernel, usage in report.items():
        if usage.spilled:
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
    update = parser.parse_args(argv).update
    compilers, ledger = installed(), read_ledger()
    now: dict[str, Usages] = {}
    problems: list[str] = []
    for version, archs in TARGETS.items():
        if version not in compilers:
            print(f"NVRTC {version} is not installed (pip install 'mie[nvrtc]')")
            if update:
                return 1  # a ledger of half the targets would fail elsewhere
            continue
        for arch in archs:
            target = target_name(version, arch)
            report = now[target] = compile_all(compilers[version], arch)
            found = [*limits(report), *([] if update else growth(report, ledger.get(target, {})))]
            problems += [f"{target}: {sentence}" for sentence in found]
            most = max(usage.registers for usage in report.values())
            print(f"{target}: {len(report)} kernels, at most {most} registers")
    for problem in problems:
        print(problem, file=sys.stderr)
    if update and not problems:
        write_ledger(now)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
