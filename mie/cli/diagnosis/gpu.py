"""Check the needs of backend cupy: the driver, GPUs, CuPy and its compiler; JetPack."""

import re

from mie.base.commands import CommandError
from mie.cli.diagnosis.machine import Finding, Survey, note, ok, problem, version_of
from mie.config.arguments import format_size
from mie.ops_gpu.environment import remedy_for

_NUMPY_OF_CUPY = {13: ("1.22", "2.6"), 14: ("2.0", "2.6")}
"""The NumPy range (from, before) by CuPy's major version, as its wheels require."""

_DRIVER_REMEDIES = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the machine: the driver was updated, and the "
    "kernel still holds the old one",
    "CUDA_ERROR_STUB_LIBRARY": "take the CUDA toolkit's stubs folder out of LD_LIBRARY_PATH: the "
    "libcuda.so.1 there only serves to link programs",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the CUDA compat folder out of "
    "LD_LIBRARY_PATH: this GPU works with its own driver's libcuda.so.1 only",
}


def _driver(survey: Survey) -> list[Finding]:
    cuda, error, remedy = survey.driver.get("cuda"), survey.driver.get("error", ""), None
    if not survey.driver.get("found", True):
        if not survey.has_gpu:
            return note("none; backend cupy needs an NVIDIA GPU")
        error, remedy = "libcuda.so.1 is not found", _missing_library(survey)
    elif error or not survey.gpus:
        error, remedy = error or "no GPU is found", _no_gpu(survey, error)
    elif 0 < survey.driver_cuda < survey.oldest_cuda:
        remedy = f"update the driver to one that runs CUDA {survey.oldest_cuda} or later"
    parts = [cuda and f"runs CUDA {cuda}"]
    parts += [survey.kernel_module and f"kernel module {survey.kernel_module}", error]
    value = ", ".join(filter(None, parts)) or "found"
    if not remedy:
        return ok(value)
    return problem(value, remedy) if survey.has_gpu else note(value, remedy)


def _missing_library(survey: Survey) -> str:
    if survey.is_jetson:
        return "in a container, start it with --runtime nvidia; else flash JetPack again"
    if survey.kernel_module:
        return "in a container, start it with --gpus all; else install the driver's libraries"
    return "install the NVIDIA driver; in a container, start it with --gpus all"


def _no_gpu(survey: Survey, error: str) -> str:
    hidden = survey.environment.get("CUDA_VISIBLE_DEVICES")
    if error in _DRIVER_REMEDIES:
        return _DRIVER_REMEDIES[error]
    if hidden is not None:
        return f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r} and may hide it"
    if survey.is_jetson:
        return "sudo usermod -aG video,render $USER, then log in again"
    return "nvidia-smi says more; in a container, start it with --gpus all"


def _gpus(survey: Survey) -> list[Finding]:
    findings = []
    for index, gpu in enumerate(survey.gpus):
        memory, free = format_size(gpu["memory"]), survey.cupy.get("free", [])[index:]
        if gpu["integrated"]:
            memory += " shared with the CPU"
        elif free:
            memory += f" ({format_size(free[0])} free)"
        value = f"{gpu['name']}, compute capability {gpu['capability']}, {memory}"
        remedy = remedy_for(version_of(gpu["capability"]))
        findings += problem(value, remedy) if remedy else ok(value)
    return findings


def _cupy(survey: Survey) -> list[Finding]:
    facts = survey.cupy
    if not facts.get("found", True):
        if survey.gpus:
            return problem("not installed", survey.install_cupy)
        return note("not installed; backend cupy needs it")
    packages = facts.get("packages", {})
    version = facts.get("version") or " ".join(packages.values())
    value = ", ".join(map(" ".join, packages.items())) or f"CuPy {version}".strip()
    again = f"pip uninstall {' '.join(packages) or 'cupy'}, then {survey.install_cupy}"
    if len(packages) > 1:
        return problem(f"{value}: they overwrite each other's files", again)
    low, high = _NUMPY_OF_CUPY.get(next(iter(version_of(version)), 0), ("0", "99"))
    numpy = survey.numpy.get("version", low)
    if not version_of(low) <= version_of(numpy) < version_of(high):
        value += f": needs NumPy from {low} to before {high}, has {numpy}"
        return problem(value, f"pip install 'numpy>={low},<{high}'")
    if "error" in facts:
        return problem(f"{value}: cannot be imported: {facts['error']}", again)
    if 0 < survey.driver_cuda < survey.cupy_cuda:
        value += f": made for CUDA {survey.cupy_cuda}"
        value += f", and the driver runs CUDA {survey.driver['cuda']}"
        return problem(value, f"{again} (or update the driver)")
    return ok(value)


def _nvrtc(survey: Survey) -> list[Finding]:
    version = survey.cupy.get("nvrtc", "0")
    [major, *_] = version_of(version)
    if not 0 < survey.driver_cuda < major:
        return _library(survey, "nvrtc")
    return problem(
        f"{version}, newer than the driver, which runs CUDA {survey.driver['cuda']}",
        f"remove NVRTC {major} (pip uninstall nvidia-cuda-nvrtc, or the CUDA toolkit it is from): "
        "CuPy takes the newest that it finds",
    )


def _library(survey: Survey, name: str) -> list[Finding]:
    """Check that CuPy finds a library of the CUDA toolkit."""
    if "version" not in survey.cupy:
        return []
    if name in survey.cupy:
        return ok(survey.cupy[name])
    error = survey.cupy[f"{name}_error"].partition(": No such file")[0]
    finding = problem if survey.gpus else note
    return finding(f"not found: {error}", _missing_toolkit(survey))


def _missing_toolkit(survey: Survey) -> str:
    cuda = survey.cupy_cuda
    if not survey.is_jetson:
        return f"pip install 'cupy-cuda{cuda}x[ctk]', or install CUDA toolkit {cuda}"
    remedy = "sudo apt install nvidia-jetpack brings the CUDA toolkit"
    if cuda >= survey.driver_cuda:
        return remedy
    again = f"pip uninstall cupy-cuda{cuda}x, then {survey.install_cupy}"
    return f"{remedy}, of CUDA {survey.driver_cuda}: {again}"


GPU_CHECKS = {
    "NVIDIA driver": _driver,
    "GPU": _gpus,
    "CuPy": _cupy,
    "NVRTC": _nvrtc,
    "cuBLAS": lambda survey: _library(survey, "cublas"),
}

# A Jetson: its JetPack, and the power mode that limits its clocks.

_JETPACKS = {"32": "4", "34": "5", "35": "5", "36": "6", "38": "7", "39": "7"}
"""JetPack by the major version of L4T, its Linux."""

_OLDEST_L4T = (36,)  # earlier releases have CUDA 11 and Python 3.8
_SUPER_L4T = (36, 4)  # the release of L4T in JetPack 6.1


def _jetpack(survey: Survey) -> list[Finding]:
    """Check the version of JetPack. A container does not know it."""
    board, release = survey.board or "a Jetson", survey.l4t_release or ""
    match = re.search(r"^# R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)", release, re.MULTILINE)
    if match is None:
        why = "/etc/nv_tegra_release does not say; a container has none"
        return note(f"unknown, on {board} ({why})")
    l4t = f"{match[1]}.{match[2]}"
    version = _JETPACKS.get(match[1], "of a version unknown to mie")
    value = f"{version} (L4T {l4t}), on {board}"
    if version_of(l4t) < _OLDEST_L4T:
        remedy = "flash JetPack 6.2 or later, if the module is an Orin or newer"
        return problem(f"{value}: its CUDA is too old for CuPy", remedy)
    if version_of(l4t) < _SUPER_L4T:
        value += ": without the power modes of 25 W and MAXN SUPER"
        return note(value, "update to JetPack 6.2 or later")
    return ok(value)


def _power_mode(survey: Survey) -> list[Finding]:
    """Check that the board runs in its fastest power mode."""
    try:
        printed = survey.machine.run(["nvpmodel", "-q"], timeout=5.0)
    except CommandError as why:
        return note(f"unknown: nvpmodel {why}")
    match = re.search(r"NV Power Mode: *(\S+)", printed)
    if match is None:
        return note("unknown: nvpmodel does not say")
    # The modes without limits, as this module numbers them.
    modes = survey.machine.read("/etc/nvpmodel.conf") or ""
    fast = re.findall(r"^< *POWER_MODEL +ID=(\d+) +NAME=(MAXN\S*) *>", modes, re.M | re.I)
    number, fastest = max(fast, key=lambda mode: "SUPER" in mode[1].upper(), default=("", ""))
    if match[1].upper().startswith("MAXN") and match[1] == (fastest or match[1]):
        return ok(match[1])
    unnamed = "ID (/etc/nvpmodel.conf names the modes; MAXN is the fastest)"
    mode = f"{number} ({fastest})" if fastest else unnamed
    remedy = f"sudo nvpmodel -m {mode}, then sudo jetson_clocks, if power and cooling allow"
    return note(f"{match[1]}, which bounds the clocks of GPU and memory", remedy)


JETSON_CHECKS = {"JetPack": _jetpack, "power mode": _power_mode}
