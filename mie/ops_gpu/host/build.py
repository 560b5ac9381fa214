"""Build the emulator's runtime and the kernels' shared libraries in the user's cache folder."""

import hashlib
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mie.base.cache_dir import CacheError, is_private_file, open_cache
from mie.base.commands import CommandError, run_command
from mie.errors import ConfigError, MieError
from mie.ops_gpu.source import KERNELS

HERE = Path(__file__).parent

_COMMON = (
    "-std=gnu++17",
    "-fPIC",
    "-DMIE_EMULATE",
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # Otherwise two builds of a template share static memory.
    "-fno-extern-tls-init",
    "-U_FORTIFY_SOURCE",  # The fortified longjmp cannot leave a fiber's stack.
    f"-I{HERE}",
)
_RUNTIME = (*_COMMON, "-O2", "-g1", "-Wall", "-Wextra")
_KERNEL = (
    *_COMMON,
    "-g1",
    "-gdwarf-4",  # Binutils 2.40 misreads some files of DWARF 5.
    "-fno-exceptions",
    "-fno-plt",  # The watchdog may strike in a stub without a source line.
    "-fno-strict-aliasing",  # A kernel reads 16-bit floats through uint4.
    "-ffp-contract=off",  # otherwise the rounding of a*b+c would vary between CPUs
    "-Wno-attributes",
    "-Wno-unknown-pragmas",
    f"-I{KERNELS}",
)
_CHECKED = (
    "-fsanitize=thread",
    "-fsanitize=alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
)
_LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc", "-lc")  # libstdc++ would take half of the linking
_HEADER = "mie_emu_launch.h"


class Builder:
    """The C++ compiler and the folder of its builds.

    The folder is $XDG_CACHE_HOME/mie/emulator, by default under ~/.cache. A build is named by a
    hash of its sources, headers, flags and compiler. Builds are renamed into place when complete,
    so processes may race.
    """

    def __init__(self) -> None:
        try:
            self.compiler, self.version = find_compiler()
        except CommandError as error:
            raise ConfigError(
                f"the kernel emulator builds CUDA kernels with a C++ compiler, and {error} "
                "(install g++, or name a compiler in CXX)"
            ) from None
        try:
            self.folder = open_cache("emulator")
        except CacheError as error:
            raise ConfigError(f"the kernel emulator cannot keep its builds: {error}") from None

    def runtime(self) -> Path:
        """Return the shared library of the emulator itself."""
        sources = sorted(HERE.glob("*.cpp"))
        path = self._path("runtime", [*sources, *sorted(HERE.glob("*.h"))], [*_RUNTIME, "soname"])
        if not is_private_file(path):
            # In one unit, to read the headers once.
            unit = "".join(f'#include "{source}"\n' for source in sources)
            # A kernel's library names it without the folder, because the folder may change later.
            self._compile(path, unit, _RUNTIME, ["-lrt", "-ldl", f"-Wl,-soname,{path.name}"])
        return path

    def kernels(
        self,
        source: Path,
        names: Sequence[str],
        options: Sequence[str],
        *,
        level: str,
        is_checked: bool,
    ) -> Path:
        """Return the shared library of the kernels ``names`` in the file ``source``.

        ``level`` is the compiler's option for optimisation.
        """
        runtime = self.runtime()
        common = [*_KERNEL, level, *(_CHECKED if is_checked else ())]
        flags = [*common, f"-I{source.parent}", *options]
        stub = _stub(source, names)
        headers = [*HERE.glob("*.h"), *KERNELS.glob("*.cuh"), *source.parent.glob("*.cuh")]
        path = self._path(source.stem, [source, *sorted(headers)], [*flags, stub, runtime.name])
        if not is_private_file(path):
            flags = [f"-I{self._headers(common)}", *flags]
            self._compile(path, stub, flags, [str(runtime), "-Wl,-rpath,$ORIGIN", *_LIBRARIES])
        return path

    def _headers(self, flags: Sequence[str]) -> Path:
        """Return the folder of the precompiled header of the stubs.

        Reading the header itself would be a quarter of a small kernel's build. The compiler does
        so if it cannot use the precompiled one.
        """
        folder = self._path("headers", sorted(HERE.glob("*.h")), flags).with_suffix("")
        path = folder / f"{_HEADER}.gch"
        if not is_private_file(path):
            folder.mkdir(mode=0o700, exist_ok=True)
            self._build(path, [*flags, "-x", "c++-header", str(HERE / _HEADER)])
        return folder

    def _compile(
        self, path: Path, text: str, flags: Sequence[str], libraries: Sequence[str]
    ) -> None:
        """Compile and link separately, because the linker must not see -fsanitize.

        The emulator itself implements the calls that -fsanitize inserts.
        """
        mine = f"{os.getpid()}-{threading.get_ident()}"
        unit, compiled = path.with_suffix(f".{mine}.cpp"), path.with_suffix(f".{mine}.o")
        try:
            unit.write_text(text)
            self._run([*self.compiler, *flags, "-c", str(unit), "-o", str(compiled)])
            self._build(path, ["-shared", str(compiled), *libraries])
        finally:
            unit.unlink(missing_ok=True)
            compiled.unlink(missing_ok=True)

    def _build(self, path: Path, arguments: Sequence[str]) -> None:
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.so")
        try:
            self._run([*self.compiler, *arguments, "-o", str(partial)])
            partial.chmod(0o700)  # the umask may leave it open to others
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, stem: str, files: Iterable[Path], words: Iterable[str]) -> Path:
        key = hashlib.sha256()
        for file in files:
            key.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
        key.update("\0".join([*self.compiler, self.version, *words]).encode())
        return self.folder / f"{stem}-{key.hexdigest()[:20]}.so"

    def _run(self, command: Sequence[str]) -> str:
        try:
            return run_command(command)
        except CommandError as error:
            lines = error.errors.splitlines() or [str(error)]
            shown = [line for line in lines if "error" in line][:10] or lines[:20]
            raise MieError(
                f"{command[0]} failed on a kernel of the emulator:\n" + "\n".join(shown)
            ) from None


def find_compiler(
    environment: Mapping[str, str] = os.environ, run: Callable[[Sequence[str]], str] = run_command
) -> tuple[list[str], str]:
    """Return the command of the C++ compiler, and the text that it prints about its version.

    Raises:
        CommandError: there is none. The message begins with the command: "g++ is not installed".
    """
    named = environment.get("CXX") or "g++"
    try:
        command = shlex.split(named)
        version = run([*command, "--version"])
    except CommandError as why:
        raise CommandError(f"{named} {why}") from None
    except ValueError:  # a quote is not closed
        version = ""
    if not version.strip():
        raise CommandError(f"{named} is no compiler")
    return command, version


def _stub(source: Path, names: Sequence[str]) -> str:
    """Return the translation unit: the kernels' file, and two C functions for each kernel."""
    functions = "".join(
        f"""\
extern "C" int mie_launch_{index}(const mie_emu::Launch* how, void** arguments) {{
  return mie_emu::launch(&{name}, how, arguments);
}}
extern "C" void mie_signature_{index}(char* out, size_t size) {{
  mie_emu::signature(&{name}, out, size);
}}
"""
        for index, name in enumerate(names)
    )
    return f"""\
#include "{_HEADER}"
#include "{source}"
#pragma GCC visibility push(default)
{functions}#pragma GCC visibility pop
"""
