"""Call NVRTC, the compiler of CUDA kernels, in this process or in one of its own.

The file imports the standard library alone, and runs as a script. NVRTC 12 compiles one kernel at a
time in a process, so a process for each makes use of all CPUs.
"""

import base64
import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CompileError(Exception):
    """NVRTC refused a file. The message is its log."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled file: its machine code, NVRTC's log, and the mangled name of each kernel."""

    cubin: bytes
    log: str
    mangled: dict[str, str]


class Nvrtc:
    """One NVRTC library."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def architectures(self) -> list[int]:
        """Return the architectures that it knows, such as 87 for sm_87."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", found)
        return list(found)

    def compile(self, source: str, names: Sequence[str], options: Sequence[str]) -> Compiled:
        """Compile a file to machine code.

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
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                raise CompileError(log)
            mangled = {name: self._mangled(program, name) for name in names}
            return Compiled(cubin=self._bytes(program, "CUBIN"), log=log, mangled=mangled)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _mangled(self, program: ctypes.c_void_p, name: str) -> str:
        mangled = ctypes.c_char_p()
        self._call("GetLoweredName", program, name.encode(), ctypes.byref(mangled))
        assert mangled.value is not None
        return mangled.value.decode()

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, f"nvrtc{name}")(*arguments)
        if code:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise CompileError(f"nvrtc{name}: {describe(code).decode()}")


def nvrtc_of_cupy(cupy: Any) -> Nvrtc:
    """Return the NVRTC that CuPy has loaded. Asking for its version makes CuPy load it."""
    cupy.cuda.nvrtc.getVersion()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"(/\S*/libnvrtc\.so[.\d]*)$", maps, re.MULTILINE)
    assert found is not None, "CuPy has loaded an NVRTC"
    return Nvrtc(found[1])


def compile_apart(
    library: str, source: str, names: Sequence[str], options: Sequence[str]
) -> Compiled:
    """Compile as `Nvrtc.compile` does, in a process of its own.

    Raises:
        CompileError: the file does not compile, or the process fails.
    """
    job = json.dumps({"library": library, "work": [source, list(names), list(options)]})
    command = [sys.executable, "-I", __file__]
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CompileError(f"the process of a compilation failed: {lines[-1]}") from None
    if "refused" in found:
        raise CompileError(found["refused"])
    return Compiled(**{**found, "cubin": base64.b64decode(found["cubin"])})


def main() -> None:
    """Do the work that standard input describes, and print the result as JSON."""
    job = json.load(sys.stdin)
    try:
        done = Nvrtc(job["library"]).compile(*job["work"])
    except CompileError as error:
        print(json.dumps({"refused": str(error)}))
        return
    cubin = base64.b64encode(done.cubin).decode()
    print(json.dumps({"cubin": cubin, "log": done.log, "mangled": done.mangled}))


if __name__ == "__main__":
    main()
