"""Say whether the compiled backend can run on this machine, and with which tools.

Nothing here imports Numba, because the import takes a second. Numba's version is read from its
files.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mie.base.cache_dir import CacheError, cache_path
from mie.base.resources import available_cpus
from mie.errors import ConfigError, install_command
from mie.ops_jit.compiler import NEEDED_FEATURES, Cpu, host_cpu

OLDEST_NUMBA = (0, 61)
_VERSION = re.compile(r"""version(?:_version)?['"]?\s*[:=]\s*['"](\d[^'"]*)['"]""")
"""How the files of Numba and of llvmlite state their versions."""
INSTALL = install_command("jit")
UPGRADE = install_command("jit", "--upgrade")


class CannotRun(ConfigError):
    """The compiled backend cannot run here."""

    def __init__(self, why: str, remedy: str = "") -> None:
        """Say why, and how to make it run if that is possible."""
        super().__init__(
            f"backend jit cannot run here: {why} ({remedy + ', or ' if remedy else ''}use backend "
            "numpy)"
        )
        self.why = why
        self.remedy = remedy


def check_machine(find_cpu: Callable[[], Cpu] = host_cpu) -> Cpu:
    """Return this machine's CPU if Numba is installed and the CPU has the instructions of kernels.

    Raises:
        CannotRun: something is missing.
    """
    version = version_of("numba")
    if version is None:
        raise CannotRun("Numba is not installed", INSTALL)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_NUMBA:
        oldest = ".".join(map(str, OLDEST_NUMBA))
        raise CannotRun(f"Numba is {version}, and it needs {oldest} or later", UPGRADE)
    try:
        cpu = find_cpu()
    except Exception as error:  # a library that cannot be loaded may raise anything
        raise CannotRun(f"llvmlite cannot be imported: {one_line(error)}", UPGRADE) from error
    check_cpu(cpu)
    return cpu


def check_cpu(cpu: Cpu) -> None:
    """Check that kernels can be compiled for a CPU.

    Raises:
        CannotRun: it is another architecture or system, or lacks instructions.
    """
    if "linux" not in cpu.triple:
        raise CannotRun(f"it needs Linux; this system is {cpu.triple}")
    if cpu.architecture not in NEEDED_FEATURES:
        raise CannotRun(f"it needs x86-64 or aarch64; this machine is {cpu.architecture}")
    if cpu.missing:
        names = ", ".join(name.upper() for name in cpu.missing)
        raise CannotRun(f"this CPU ({cpu.name}) lacks {names}")


def version_of(package: str) -> str | None:
    """Return the version of an installed package without importing it, or None."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("_version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if match := _VERSION.search(text):
        return match[1]
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def one_line(error: BaseException) -> str:
    """Return an error's kind and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def jit_facts() -> dict[str, Any]:
    """Return the facts that `mie doctor` prints about the backend.

    The facts are the versions "numba" and "llvmlite" (None if not installed), the "cache" folder
    and, if the backend can run, "cpu", "vector_bits" and "num_threads". Else there are the reason
    "why" and a "remedy", perhaps empty.
    """
    facts: dict[str, Any] = {name: version_of(name) for name in ("numba", "llvmlite")}
    try:
        facts["cache"] = str(cache_path("jit"))
    except CacheError as error:
        facts["cache"] = f"none: {error}"
    try:
        cpu = check_machine()
    except CannotRun as error:
        return {**facts, "why": error.why, "remedy": error.remedy}
    bits = {"cpu": cpu.name, "vector_bits": cpu.vector_bits}
    return {**facts, **bits, "num_threads": available_cpus()}
