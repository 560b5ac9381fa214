"""Implement ``mie doctor``: the abilities of this machine, its problems, and a remedy for each.

Anything that can crash or hang (NumPy, CuPy, the driver, a backend) is tried in its own process. A
missing part is a fact, never an error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from typing import Any, NamedTuple

from mie.base.commands import CommandError, NoAnswerError, run_command
from mie.base.reprs import count
from mie.base.resources import Read, available_bytes, available_cpus, memory_info, read_text
from mie.base.version import __version__
from mie.cli.parser import Commands, declared
from mie.cli.progress import bar
from mie.config.arguments import format_size
from mie.errors import ConfigError, MieError, install_command
from mie.ops_gpu.environment import cupy_facts, driver_facts, one_line, remedy_for

Facts = dict[str, Any]

BACKENDS = ("numpy", "jit", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, and first the backends that every machine can run."""
EXTRAS = {"jit": "numba", "serve": "starlette", "structured": "llguidance", "chat": "rich"}
"""A package of each extra. The extra is installed if the package is."""
FAST_BLAS = ("openblas", "mkl", "accelerate", "blis", "nvpl", "armpl", "flexiblas")
LITTLE = 1 << 30
"""Bytes of memory or of a disk below which a model hardly fits."""
PATIENCE = 180.0
"""Timeout in seconds, longer than any build or first compilation. A hung driver never answers."""
TRIAL_SECONDS = 3.0
"""Timeout in seconds of a trial that was not requested. A first compilation takes longer."""


# Facts, each found in a separate process.


TOPICS = ("package", "numpy", "jit", "models", "driver", "cupy")


def find_facts(topic: str) -> Facts:
    """Return the facts of a topic, or the fact "error". "backend NAME" tries a backend."""
    try:
        return _facts(*topic.split())
    except Exception as error:
        kind = "" if isinstance(error, MieError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{one_line(error)}"}


def _facts(topic: str, name: str = "") -> Facts:
    """Import the libraries of a topic, and return the facts. The import may raise anything."""
    match topic:
        case "package":
            import mie.frontend.async_llm
            import mie.frontend.llm  # noqa: F401

            return {}
        case "numpy":
            from mie.ops.blas import numpy_facts

            return {**numpy_facts()}
        case "jit":
            from mie.ops_jit.environment import jit_facts

            return jit_facts()
        case "models":
            from mie.checkpoint.hub import cache_facts

            return cache_facts()
        case "driver":
            return driver_facts()
        case "cupy":
            return cupy_facts()
    from mie.lab.trial import try_operators
    from mie.load.backends import load_backend

    try_operators(load_backend(name))
    return {}


def answer(topic: str) -> None:
    """Print the facts of a topic as JSON, apart from the output of libraries."""
    output = os.dup(1)
    os.dup2(2, 1)
    os.write(output, json.dumps(find_facts(topic)).encode() + b"\n")


# The child finds modules where this process does, not in its working directory.
_CHILD = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "from mie.cli.doctor import answer; answer(sys.argv[1])"
)


def ask(topic: str, timeout: float = PATIENCE) -> Facts:
    """Return the facts of ``topic``, found in a separate process.

    If the process crashes, hangs or prints something else, the fact "error" is the reason, and
    "is_late" is there if the process had not ended after ``timeout`` seconds.
    """
    # Warnings are not facts, even if the user has turned them into errors.
    command = (sys.executable, "-W", "ignore", "-c", _CHILD, "\n".join(sys.path), topic)
    try:
        printed = run_command(command, timeout=timeout)
        return dict(json.loads(printed.strip().rpartition("\n")[2]))
    except CommandError as why:
        late = {"is_late": True} if isinstance(why, NoAnswerError) else {}
        return {"error": f"the process that tried it {why}", **late}
    except (TypeError, ValueError):
        return {"error": "the process that tried it printed something that is no JSON object"}


# Checks.


class Check(NamedTuple):
    """The result of one check.

    A "note" costs speed, or is missing and may not be needed. A "problem" keeps something that is
    present from working. ``remedy`` is an instruction, or None.
    """

    name: str
    status: str
    value: str
    remedy: str | None = None


def check_all(facts: Mapping[str, Facts], read: Read = read_text) -> list[Check]:
    """Return the results of all checks, given the facts of each topic. ``read`` reads a file."""
    driver = facts["driver"]
    cpu = [_python(read), _packages(facts["package"]), _numpy(facts["numpy"]), _jit(facts["jit"])]
    gpu = [_driver(driver, read), *map(_gpu, driver.get("gpus", ())), _cupy(facts["cupy"], driver)]
    return [*cpu, _memory(read), _models(facts["models"]), *gpu]


def _python(read: Read) -> Check:
    system, architecture = platform.system(), platform.machine()
    cpus = count(available_cpus(read), "CPU")  # within the control group
    value = f"{platform.python_version()}, {system} {architecture}, {cpus}"
    if system == "Linux" and architecture in ("x86_64", "aarch64", "arm64"):
        return Check("Python", "ok", value)
    value += "; mie is made for Linux on x86-64 and aarch64, and is not tried elsewhere"
    return Check("Python", "note", value)


def _packages(facts: Facts) -> Check:
    if "error" in facts:
        remedy = "install mie and its packages again (docs/install.md)"
        return Check("packages", "problem", facts["error"], remedy)
    present = [extra for extra, package in EXTRAS.items() if find_spec(package)]
    absent = [extra for extra in EXTRAS if extra not in present]
    value = f"mie {__version__} with the extras {', '.join(present) or '(none)'}"
    value += f", without {', '.join(absent)}" if absent else ""
    return Check("packages", "ok", value)


def _numpy(facts: Facts) -> Check:
    again = "pip install --force-reinstall 'numpy>=1.26,<3'"
    if "error" in facts:
        return Check("NumPy", "problem", facts["error"], again)
    value = f"{facts['version']}, BLAS {facts['blas']} {facts['blas_version']}"
    if any(name in facts["blas"].lower() for name in FAST_BLAS):
        return Check("NumPy", "ok", value)
    return Check("NumPy", "note", f"{value}, which may be slow", f"{again} brings OpenBLAS")


def _jit(facts: Facts) -> Check:
    if "error" in facts:
        remedy = install_command("jit", "--force-reinstall")
        return Check("backend jit", "problem", facts["error"], remedy)
    if "why" in facts:
        status = "problem" if facts["numba"] and facts["remedy"] else "note"
        value = f"not available: {facts['why']}; auto is numpy"
        return Check("backend jit", status, value, facts["remedy"] or None)
    value = f"Numba {facts['numba']}, llvmlite {facts['llvmlite']}; {facts['cpu']}, vectors of "
    value += f"{facts['vector_bits']} bits; {count(facts['num_threads'], 'thread')}; kernels are "
    return Check("backend jit", "ok", f"{value}kept in {facts['cache']}")


def _memory(read: Read) -> Check:
    total, available = memory_info(read).get("MemTotal", 0), available_bytes(read)
    value = f"{format_size(available)} available of {format_size(total)}"
    remedy = "end other programs, or set a small --kv-cache-memory-bytes, such as 64MiB"
    is_little = available < LITTLE
    return Check("memory", "note" if is_little else "ok", value, remedy if is_little else None)


def _models(facts: Facts) -> Check:
    name, another = "model folder", "set HF_HOME to another folder, or pass --download-dir"
    if "error" in facts:
        return Check(name, "problem", facts["error"], another)
    value = f"{facts['folder']}, {format_size(facts['free'])} free"
    if not facts["is_writable"]:
        return Check(name, "problem", f"{value}, cannot be written", another)
    if facts["free"] < LITTLE:
        return Check(name, "note", value, f"`mie rm` deletes models; or {another}")
    return Check(name, "ok", value)


def _driver(facts: Facts, read: Read) -> Check:
    has_module = read("/proc/driver/nvidia/version") is not None
    cuda, gpus = facts.get("cuda"), facts.get("gpus", [])
    if not facts.get("found", True):
        if not has_module:
            return Check("driver", "note", "none; backend cupy needs an NVIDIA GPU and its driver")
        remedy = "in a container, start it with --gpus all; else install the driver's libraries"
        return Check("driver", "problem", "libcuda.so.1 is not found", remedy)
    parts = f"runs CUDA {cuda}" if cuda else "", facts.get("error", "" if gpus else "no GPU")
    value = ", ".join(filter(None, parts)) or "found"
    if gpus and _major(cuda or "12") >= 12:
        return Check("driver", "ok", value)
    remedy = "unset CUDA_VISIBLE_DEVICES; restart the machine after an update of the driver; in a "
    remedy += "container, start it with --gpus all; nvidia-smi says more"
    remedy = "update the driver to one that runs CUDA 12 or later" if gpus else remedy
    return Check("driver", "problem" if has_module or gpus else "note", value, remedy)


def _gpu(gpu: Facts) -> Check:
    memory = format_size(gpu["memory"]) + (" shared with the CPU" if gpu["integrated"] else "")
    value = f"{gpu['name']}, compute capability {gpu['capability']}, {memory}"
    remedy = remedy_for(_numbers(gpu["capability"]))
    return Check("GPU", "problem" if remedy else "ok", value, remedy)


def _cupy(facts: Facts, driver: Facts) -> Check:
    """Check that CuPy fits the driver, and finds the libraries of CUDA."""
    cuda, lacks = driver.get("cuda", "12"), "problem" if driver.get("gpus") else "note"
    install = install_command("cuda13" if _major(cuda) >= 13 else "cuda12")
    if not facts.get("found", True):
        return Check("CuPy", lacks, "not installed; backend cupy needs it", install)
    packages = facts.get("packages") or {"cupy": facts.get("version", "")}
    value = ", ".join(map(" ".join, packages.items()))
    again = f"pip uninstall {' '.join(packages)}, then {install}"
    if len(packages) > 1:
        return Check("CuPy", "problem", f"{value}: they overwrite each other's files", again)
    if "error" in facts:
        return Check("CuPy", "problem", f"{value}: cannot be imported: {facts['error']}", again)
    for library in ("cuda", "nvrtc"):
        if _major(facts.get(library, "0")) > _major(cuda):
            value += f": {library} {facts[library]} is newer than the driver's CUDA {cuda}"
            return Check("CuPy", lacks, value, f"{again} (or update the driver)")
    for library in ("nvrtc", "cublas"):
        if library not in facts:
            error = facts[f"{library}_error"].partition(": No such file")[0]
            return Check("CuPy", lacks, f"{value}: {library} is not found: {error}", install)
    return Check("CuPy", "ok", f"{value}, NVRTC {facts['nvrtc']}, cuBLAS {facts['cublas']}")


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that ``text`` begins with: (14, 2, 0) for "14.2.0rc1"."""
    return tuple(int(number) for number in re.split(r"[^\d.]", text)[0].split(".") if number)


def _major(text: str) -> int:
    return next(iter(_numbers(text)), 0)


# The report.


def examine(backends: Collection[str], patience: float) -> tuple[list[Check], dict[str, Facts]]:
    """Return the results of the checks, and the facts about the trial of each backend.

    A trial has no facts if the backend works. Otherwise "error" is the reason, with "is_late" if
    the trial took more than ``patience`` seconds. No backend works if mie cannot be imported.
    """
    trials = [f"backend {name}" for name in backends]
    timeouts = {**dict.fromkeys(TOPICS, PATIENCE), **dict.fromkeys(trials, patience)}
    with bar("examining", "check", len(timeouts)) as count_more, ThreadPoolExecutor(16) as pool:
        asked = {topic: pool.submit(ask, topic, timeout) for topic, timeout in timeouts.items()}
        for _ in as_completed(asked.values()):
            count_more(1)
    facts = {topic: answered.result() for topic, answered in asked.items()}
    found = {name: facts[f"backend {name}"] or facts["package"] for name in backends}
    return check_all(facts), found


def render(checks: Collection[Check], trials: Mapping[str, Facts]) -> str:
    """Return the report as text, one fact per line, with remedies below problems."""
    line, lines = "{:<8} {:<14} {}".format, []
    for check in checks:
        lines.append(line(check.status, check.name, check.value))
        if check.remedy is not None:
            lines.append(line("", "", f"remedy: {check.remedy}"))
    for name, trial in trials.items():
        verdict = f"does not work: {trial['error']}" if trial else "works"
        if "is_late" in trial:
            why = f"no answer within {TRIAL_SECONDS:g} s (it compiles, or the machine is busy)"
            verdict = f"unknown: {why}; mie doctor --backend {name} waits for one"
        lines.append(line("backend", name, verdict))
    return "\n".join(lines)


def add_parser(commands: Commands) -> None:
    """Add ``mie doctor`` to the command line."""
    declared(commands, "doctor", run)


def run(args: argparse.Namespace) -> int:
    """Print the report, and return 1 if the requested backend does not work, else 0."""
    if args.compile:
        from mie.cli.compiling import compile_ahead

        return compile_ahead(args)
    if args.model is not None:
        raise ConfigError("--model needs --compile")
    names, patience = ([args.backend], PATIENCE) if args.backend else (BACKENDS, TRIAL_SECONDS)
    checks, trials = examine(names, patience)
    backends = [
        {
            "name": name,
            "works": None if "is_late" in trial else not trial,
            "reason": trial.get("error"),
        }
        for name, trial in trials.items()
    ]
    found = [check._asdict() for check in checks]
    report = {"mie": __version__, "checks": found, "backends": backends}
    print(json.dumps(report, indent=2) if args.json else render(checks, trials))
    return 1 if args.backend and trials[args.backend] else 0
