"""Keep compiled kernels in the user's cache, and load or compile those that a model needs."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mie.base.cache_dir import read_kept, write_kept
from mie.ops.backend import Progress
from mie.ops.kv_cache import HALVES, QUANTIZED
from mie.ops_jit import compiler
from mie.ops_jit.compiler import Cpu, compile_kernel, host_cpu
from mie.ops_jit.environment import UPGRADE, CannotRun, check_machine, one_line, version_of
from mie.ops_jit.linker import CannotLink, Library

CACHE = "jit"
WEIGHT_DTYPES = ("float32", *HALVES)
CACHE_DTYPES = (*WEIGHT_DTYPES, *(dtype.name for dtype in QUANTIZED.values()))
CPU_FILE = Path("/proc/cpuinfo")
"""Linux's description of the CPUs."""
CPU_LINES = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
"""The lines of the description that tell CPUs apart, on x86-64 and on aarch64."""


def kernel_names(
    weight_dtypes: Iterable[str],
    cache_dtypes: Iterable[str],
    rounded: Mapping[str, str] = MappingProxyType({}),
) -> Sequence[str]:
    """Return the names of all kernels that steps use with these dtypes of weights and caches.

    ``rounded`` has the formats whose products round activations, and the kernels that round.
    """
    weights, caches = sorted({*weight_dtypes}), sorted({*cache_dtypes})
    kinds = [*(f"[{dtype}]" for dtype in weights), *(f"_int8[{each}]" for each in sorted(rounded))]
    return (
        *("run", "work", "rms_norm", "gate_mul", "soft_cap", "take_rows", "merge"),
        "sum_exponentials",
        *("route", "route_by_sigmoid", "sort_pairs", "take_pairs", "add_pairs"),
        *(f"embed[{dtype}]" for dtype in sorted({*weights, *rounded})),
        *(f"{base}{kind}" for kind in kinds for base in ("linear", "gate_up")),
        *(f"{base}[{dtype}]" for dtype in caches for base in ("rope_write", "attend")),
        *(f"multiply[{dtype}]" for dtype in sorted({*weights, *caches, "float32"} - {"int4"})),
        *(f"multiply_int8[{each}]" for each in sorted(rounded)),
        *sorted({*rounded.values()}),
    )


class Kernels:
    """Addresses of compiled kernels by name, such as "linear[bfloat16]"."""

    def __init__(self) -> None:
        """Look at the machine. Nothing is loaded yet.

        Raises:
            CannotRun: the machine cannot run them.
        """
        self.cpu = check_machine(kept_cpu)
        self._key = key_of(self.cpu)
        self._library = Library()
        self._addresses: dict[str, int] = {}
        self.num_compiled = 0
        """How many were not in the cache."""

    def __getitem__(self, name: str) -> int:
        """Return the address of a kernel. It is compiled if the cache does not have it.

        Raises:
            CannotRun: it cannot be compiled or loaded.
        """
        if not self._has(name):
            self._load(name, self._compiled(name))
        return self._addresses[name]

    def _has(self, name: str) -> bool:
        """Load a kernel if the cache has it. Return whether it is loaded."""
        if name not in self._addresses and (code := read(name, self._key)) is not None:
            self._load(name, code)
        return name in self._addresses

    def _load(self, name: str, code: bytes) -> None:
        try:
            self._addresses[name] = self._library.load(code)
        except CannotLink as error:
            raise CannotRun(f"kernel {name} cannot be loaded: {error}", UPGRADE) from error

    def prepare(self, names: Iterable[str], progress: Progress) -> int:
        """Load these kernels, and return how many were compiled.

        ``progress`` is opened only if there are some to compile.
        """
        missing = [name for name in dict.fromkeys(names) if not self._has(name)]
        if missing:
            with progress(len(missing)) as advance:
                # Processes that begin together compile different ones, and load each other's.
                for name in random.sample(missing, len(missing)):
                    self[name]
                    advance(1)
        return len(missing)

    def num_kept(self, names: Iterable[str]) -> int:
        """Return how many of these kernels the cache has."""
        return sum(read(name, self._key) is not None for name in names)

    def _compiled(self, name: str) -> bytes:
        try:
            code = compile_kernel(name, self.cpu)
        except Exception as error:  # Numba raises anything where it does not fit its Python
            version = version_of("numba")
            why = f"Numba {version} cannot compile its kernels: {one_line(error)}"
            raise CannotRun(why, UPGRADE) from error
        self.num_compiled += 1
        write(name, self._key, code)
        return code


def read(name: str, key: str) -> bytes | None:
    """Return a kernel's object file, or None if the cache has none that is whole and private."""
    return read_kept(CACHE, _file_name(name, key))


def write(name: str, key: str, code: bytes) -> None:
    """Store a kernel's object file, if there is a cache. Then it is compiled again next time."""
    write_kept(CACHE, _file_name(name, key), code)


def kept_cpu() -> Cpu:
    """Return `host_cpu`, from the cache if possible, because LLVM's library takes 50 MiB."""
    lines = CPU_FILE.read_text(encoding="utf-8").splitlines() if CPU_FILE.exists() else []
    found = sorted({line for line in lines if line.partition(":")[0].strip() in CPU_LINES})
    facts = found, os.environ.get("MIE_CPU"), version_of("llvmlite")
    digest = hashlib.sha256(repr(facts).encode() + Path(compiler.__file__).read_bytes())
    name = f"cpu-{digest.hexdigest()[:24]}"
    if (kept := read_kept(CACHE, name)) is not None:
        return Cpu(*json.loads(kept))
    cpu = host_cpu()
    if found:
        write_kept(CACHE, name, json.dumps(cpu).encode())
    return cpu


def key_of(cpu: Cpu) -> str:
    """Return a digest of all that decides a kernel's code.

    It covers the sources, the compiler, the Python (Numba reads its bytecode), and the CPU.
    """
    compiler = version_of("numba"), version_of("llvmlite"), sys.implementation.cache_tag
    digest = hashlib.sha256(repr((*cpu, compiler)).encode())
    folder = Path(__file__).parent
    own = [folder / "layout.py", folder / "compiler.py"]
    for source in sorted([*own, *folder.glob("kernels/*.py")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _file_name(name: str, key: str) -> str:
    return f"{name.replace('[', '-').rstrip(']')}-{key}"
