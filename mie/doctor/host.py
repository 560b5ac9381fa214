"""Check what every backend depends on: Python, NumPy, CPUs, memory and a compiler."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from mie.doctor.machine import Machine, NoAnswer
from mie.doctor.report import Check, gibibytes, numbers
from mie.system.cpus import cpu_quota, group_files, whole_cpus

ARCHITECTURES = ("x86_64", "aarch64", "arm64")
FAST_BLAS = ("openblas", "mkl", "accelerate", "blis", "nvpl", "armpl", "flexiblas")
LITTLE_MEMORY = 1 << 30

# The order in which OpenBLAS looks for its number of threads.
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_TUNING = {
    "OPENBLAS_CORETYPE": "sets which CPU NumPy's products are written for",
    "OPENBLAS_L2_SIZE": "sets the cache size NumPy's products are cut for",
}


def host_checks(machine: Machine) -> Iterator[Check]:
    """Yield the checks in the order in which they are printed."""
    yield _python(machine)
    yield _numpy(machine)
    yield _blas_settings(machine)
    yield from _products(machine)
    yield _cpus(machine)
    yield _memory(machine)
    yield _compiler(machine)


def _python(machine: Machine) -> Check:
    value = f"{machine.python}, {machine.system} {machine.architecture}"
    if machine.system == "Linux" and machine.architecture in ARCHITECTURES:
        return Check(name="Python", status="ok", value=value)
    value += "; mie is made for Linux on x86-64 and aarch64, and is not tried elsewhere"
    return Check(name="Python", status="note", value=value)


def _numpy(machine: Machine) -> Check:
    try:
        facts = machine.ask("numpy")
    except NoAnswer as why:
        return Check(
            name="NumPy",
            status="problem",
            value=f"the process that imported it {why}",
            remedy="pip install --force-reinstall 'numpy>=1.26,<3'",
        )
    blas = str(facts.get("blas", "unknown"))
    value = f"{facts.get('version')}, BLAS {blas} {facts.get('blas_version', '')}".rstrip()
    if any(name in blas.lower() for name in FAST_BLAS):
        return Check(name="NumPy", status="ok", value=value)
    return Check(
        name="NumPy",
        status="note",
        value=f"{value}, which may be a slow one",
        remedy="pip install --force-reinstall numpy brings one with OpenBLAS",
    )


def _blas_settings(machine: Machine) -> Check:
    """Check for environment variables that make NumPy slower."""
    environment = machine.environment
    names = [name for name in _TUNING if environment.get(name)]
    found = [f"{name}={environment[name]} {_TUNING[name]}" for name in names]
    cpus = _whole_cpus(machine)
    setting = _thread_setting(machine)
    if setting is not None and setting[1] != cpus:
        name, threads = setting
        found.append(f"{name}={threads}, with {_count(cpus, 'CPU')} to run on")
        names.append(name)
    if not found:
        return Check(name="BLAS settings", status="ok", value="none that cost speed")
    return Check(
        name="BLAS settings",
        status="note",
        value="; ".join(found),
        remedy=f"unset {' '.join(names)}",
    )


def _products(machine: Machine) -> Iterator[Check]:
    """Check how the CPU engine multiplies by a matrix, and what that means for results."""
    try:
        facts = machine.ask("products")
    except NoAnswer as why:
        yield Check(
            name="matrix plans",
            status="problem",
            value=f"the process that tried them {why}",
            remedy="pip install --force-reinstall 'numpy>=1.26,<3'",
        )
        return
    threads = _count(int(facts.get("num_threads", 1)), "thread")
    value = f"plan {facts.get('plan')}; {facts.get('kernels')} kernels; {threads}"
    if facts.get("is_controlled"):
        yield Check(name="matrix plans", status="ok", value=value)
    else:
        yield Check(
            name="matrix plans",
            status="note",
            value=f"{value}; the threads of this BLAS are its own, beside those of mie",
            remedy="export OMP_NUM_THREADS=1 (MKL_NUM_THREADS=1, BLIS_NUM_THREADS=1), or install a "
            "NumPy with OpenBLAS",
        )
    if facts.get("cache_problem"):
        yield Check(
            name="plan cache",
            status="note",
            value=f"{facts['cache_problem']}; each process tries the plans anew",
            remedy="make the folder one that only this user can write to",
        )
    elif facts.get("odd_plans"):
        yield Check(
            name="plan cache",
            status="note",
            value=f"another plan than the rest: {'; '.join(facts['odd_plans'])}",
            remedy=f"rm -r {shlex.quote(str(facts.get('cache')))}, if other programs kept the "
            "machine busy that day",
        )
    # As `CpuBackend.is_batch_invariant` has it for a model of such matrices.
    is_on = facts.get("plan") == "tiled"
    value = "plan tiled, which it needs, is fast enough here"
    if not is_on:
        value = "plan tiled, which it needs, is slower than plain here; --batch-invariant sets it"
    value = f"auto is {'on' if is_on else 'off'}: {value}"
    yield Check(name="invariance", status="ok", value=value)


def _thread_setting(machine: Machine) -> tuple[str, int] | None:
    """Return the variable that sets NumPy's number of threads, and that number."""
    for name in _THREADS:
        threads = next(numbers(machine.environment.get(name)), 0)
        if threads > 0:
            return name, threads
    return None


def _cpus(machine: Machine) -> Check:
    present, usable = machine.num_cpus(), machine.num_usable_cpus()
    value = f"{usable} of {present}" if usable < present else f"{usable}"
    quota = cpu_quota(machine.read)
    if quota is None or quota >= usable:
        return Check(name="CPUs", status="ok", value=value)
    cpus = _whole_cpus(machine)
    value += f", and the control group allows the time of {quota:g}"
    setting = _thread_setting(machine)
    if setting is not None and setting[1] <= cpus:
        return Check(name="CPUs", status="ok", value=value)
    return Check(
        name="CPUs",
        status="note",
        value=value,
        remedy=f"export OPENBLAS_NUM_THREADS={cpus}, so that threads do not wait for each other; "
        "or raise the container's limit",
    )


def _whole_cpus(machine: Machine) -> int:
    """Return how many CPUs threads can use continuously."""
    return whole_cpus(machine.num_usable_cpus(), cpu_quota(machine.read))


def _memory(machine: Machine) -> Check:
    sizes = dict(
        re.findall(r"^(\w+): +(\d+) kB$", machine.read("/proc/meminfo") or "", re.MULTILINE)
    )
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return Check(name="memory", status="note", value="unknown: /proc/meminfo does not say")
    total, available = (int(sizes[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    value = f"{gibibytes(available)} available of {gibibytes(total)}"
    limit = memory_limit(machine)
    if limit is not None and limit < total:
        value += f"; the control group may hold {gibibytes(limit)}"
        available = min(available, limit)
    if available >= LITTLE_MEMORY:
        return Check(name="memory", status="ok", value=value)
    return Check(
        name="memory",
        status="note",
        value=value,
        remedy="end other programs, or set a small --kv-cache-memory-bytes, such as 64MiB",
    )


def memory_limit(machine: Machine) -> int | None:
    """Return the memory limit of the process's control group in bytes, or None."""
    files = ("memory.max", "memory.limit_in_bytes")
    texts = [text for name in files for text in group_files(machine.read, "memory", name)]
    return min((limit for text in texts for limit in numbers(text)), default=None)


def _compiler(machine: Machine) -> Check:
    """Check the C++ compiler that backend cupy-emulated builds the kernels with."""
    named = machine.environment.get("CXX") or "g++"
    try:
        printed = machine.run([*shlex.split(named), "--version"]).splitlines()
        return Check(name="C++ compiler", status="ok", value=printed[0])
    except NoAnswer as why:
        problem = f"{named} {why}"
    except (IndexError, ValueError):  # it printed nothing, or a quote is not closed
        problem = f"{named} is no compiler"
    return Check(
        name="C++ compiler",
        status="note",
        value=f"{problem}; backend cupy-emulated needs one",
        remedy="apt install g++, or name a compiler in CXX",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
