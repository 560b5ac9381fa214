"""Keep compiled kernels in the user's cache, and load or compile those that a model needs."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from mie.ops_jit.compiler import Cpu, Library, host_cpu, intermediate_code, object_file
from mie.system.cache_dir import CacheError, is_private_file, open_cache

DIGEST_BYTES = 32


class Kernels:
    """Addresses of compiled kernels by name, such as "linear[bfloat16]"."""

    def __init__(self) -> None:
        self._library = Library()
        self._addresses: dict[str, int] = {}
        self._cpu = host_cpu()
        self.num_compiled = 0
        """How many were not in the cache."""

    def __getitem__(self, name: str) -> int:
        """Return the address of a kernel. It is compiled if the cache does not have it."""
        if name not in self._addresses:
            code = read(name, self._cpu)
            if code is None:
                code = object_file(intermediate_code(name, self._cpu), self._cpu)
                self.num_compiled += 1
                write(name, self._cpu, code)
            self._addresses[name] = self._library.load(code)
        return self._addresses[name]


def read(name: str, cpu: Cpu) -> bytes | None:
    """Return a kernel's object file, or None if the cache has none that is whole and private."""
    with suppress(OSError, CacheError):
        path = _path(name, cpu)
        if is_private_file(path):
            content = path.read_bytes()
            code = content[DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == content[:DIGEST_BYTES]:
                return code
    return None


def write(name: str, cpu: Cpu, code: bytes) -> None:
    """Store a kernel's object file, if there is a cache. Then it is compiled again next time."""
    with suppress(OSError, CacheError):
        path = _path(name, cpu)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):  # An interrupt can come after it was moved.
                os.unlink(temporary)
            raise


def _path(name: str, cpu: Cpu) -> Path:
    return open_cache("jit") / f"{name.replace('[', '-').rstrip(']')}-{_key(cpu)}"


@cache
def _key(cpu: Cpu) -> str:
    """Return a digest of all that decides a kernel's code: the sources, the compiler, the CPU."""
    digest = hashlib.sha256(repr((cpu, version("numba"), version("llvmlite"))).encode())
    folder = Path(__file__).parent
    for source in sorted(
        [folder / "layout.py", folder / "compiler.py", *folder.glob("kernels/*.py")]
    ):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]
