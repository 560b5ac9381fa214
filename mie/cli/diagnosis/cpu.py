"""Check the needs of every backend: Python, NumPy, CPUs, memory and a compiler."""

from mie.base.commands import CommandError
from mie.base.reprs import count
from mie.base.resources import available_bytes, memory_info, memory_limit
from mie.cli.diagnosis.machine import Finding, Survey, note, ok, problem
from mie.config.arguments import format_size
from mie.errors import install_command
from mie.ops_gpu.host.build import find_compiler

ARCHITECTURES = ("x86_64", "aarch64", "arm64")
FAST_BLAS = ("openblas", "mkl", "accelerate", "blis", "nvpl", "armpl", "flexiblas")
LITTLE_MEMORY = 1 << 30

_REINSTALL = "pip install --force-reinstall 'numpy>=1.26,<3'"
_TUNING = {
    "OPENBLAS_CORETYPE": "sets which CPU NumPy's products are written for",
    "OPENBLAS_L2_SIZE": "sets the cache size NumPy's products are cut for",
}


def _python(survey: Survey) -> list[Finding]:
    machine = survey.machine
    value = f"{machine.python}, {machine.system} {machine.architecture}"
    if machine.system == "Linux" and machine.architecture in ARCHITECTURES:
        return ok(value)
    return note(f"{value}; mie is made for Linux on x86-64 and aarch64, and is not tried elsewhere")


def _numpy(survey: Survey) -> list[Finding]:
    facts = survey.numpy
    if "error" in facts:
        return problem(facts["error"], _REINSTALL)
    value = f"{facts['version']}, BLAS {facts['blas']} {facts['blas_version']}"
    if any(name in facts["blas"].lower() for name in FAST_BLAS):
        return ok(value)
    return note(f"{value}, which may be a slow one", f"{_REINSTALL} brings one with OpenBLAS")


def _blas_settings(survey: Survey) -> list[Finding]:
    """Check for environment variables that make NumPy slower."""
    set_names = [name for name in _TUNING if survey.environment.get(name)]
    found = {name: f"{name}={survey.environment[name]} {_TUNING[name]}" for name in set_names}
    if survey.threads and survey.threads[1] != survey.cpus:
        name, threads = survey.threads
        found[name] = f"{name}={threads}, with {count(survey.cpus, 'CPU')} to run on"
    if not found:
        return ok("none that cost speed")
    return note("; ".join(found.values()), f"unset {' '.join(found)}")


def _products(survey: Survey) -> list[Finding]:
    """Check how backend numpy multiplies."""
    facts = survey.products
    if "error" in facts:
        return problem(facts["error"], _REINSTALL)
    threads = count(facts["num_threads"], "thread")
    value = f"{facts['kernels']} kernels of the BLAS; {threads} in large steps"
    if facts["is_controlled"]:
        return ok(value)
    value = f"{facts['kernels']} kernels of the BLAS; it chooses the number of threads itself"
    return note(value, "install a NumPy with OpenBLAS, MKL or BLIS")


def _invariance(survey: Survey) -> list[Finding]:
    """Name the machines that compute the same bits as this one with ``batch_invariant``."""
    facts, blas = survey.products, survey.numpy.get("blas_version", "unknown")
    if "error" in facts:
        return []
    return ok(
        f"--batch-invariant on numpy gives the bits of {facts['kernels']} kernels of BLAS {blas}, "
        "in any process"
    )


def _compiled_kernels(survey: Survey) -> list[Finding]:
    """Check the needs of backend jit."""
    facts = survey.jit
    if "error" in facts:
        return problem(facts["error"], install_command("jit", "--force-reinstall"))
    versions = f"Numba {facts['numba']}, llvmlite {facts['llvmlite']}"
    if "why" not in facts:
        return ok(
            f"{versions}; {facts['cpu']}, vectors of {facts['vector_bits']} bits; "
            f"{count(facts['num_threads'], 'thread')}; kernels are kept in {facts['cache']}"
        )
    if facts["numba"] is None:
        return note("not available: Numba is not installed; auto is numpy", facts["remedy"])
    if facts["remedy"]:
        return problem(f"not available: {facts['why']}", facts["remedy"])
    return note(f"not available: {facts['why']}; auto is numpy")


def _cpus(survey: Survey) -> list[Finding]:
    present, usable = survey.machine.num_cpus, survey.machine.num_usable_cpus
    value = f"{usable} of {present}" if usable < present else f"{usable}"
    if survey.quota is None or survey.quota >= usable:
        return ok(value)
    value += f", and the control group allows the time of {survey.quota:g}"
    if survey.threads and survey.threads[1] <= survey.cpus:
        return ok(value)
    why = "so that threads do not wait for each other; or raise the container's limit"
    return note(value, f"export OPENBLAS_NUM_THREADS={survey.cpus}, {why}")


def _memory(survey: Survey) -> list[Finding]:
    sizes, limit = memory_info(survey.machine.read), memory_limit(survey.machine.read)
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return note("unknown: /proc/meminfo does not say")
    value = f"{format_size(sizes['MemAvailable'])} available of {format_size(sizes['MemTotal'])}"
    if limit is not None and limit < sizes["MemTotal"]:
        value += f"; the control group may hold {format_size(limit)}"
    available = available_bytes(survey.machine.read)
    if limit is None and available < sizes["MemAvailable"]:
        value += f"; a limit of the process (ulimit -v or -d) leaves {format_size(available)}"
    if available >= LITTLE_MEMORY:
        return ok(value)
    return note(value, "end other programs, or set a small --kv-cache-memory-bytes, such as 64MiB")


def _compiler(survey: Survey) -> list[Finding]:
    """Check the C++ compiler that backend cupy-emulated builds the kernels with."""
    try:
        _, version = find_compiler(survey.environment, survey.machine.run)
        return ok(version.splitlines()[0])
    except CommandError as error:
        remedy = "apt install g++, or name a compiler in CXX"
        return note(f"{error}; backend cupy-emulated needs one", remedy)


CPU_CHECKS = {
    "Python": _python,
    "NumPy": _numpy,
    "BLAS settings": _blas_settings,
    "products": _products,
    "batch invariance": _invariance,
    "backend jit": _compiled_kernels,
    "CPUs": _cpus,
    "memory": _memory,
    "C++ compiler": _compiler,
}
"""The checks in the order in which they are printed."""
