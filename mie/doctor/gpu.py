"""Check what backend cupy depends on: the driver, GPUs, CuPy and its compiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mie.doctor.jetson import Jetson, find_jetson, jetson_checks
from mie.doctor.machine import Machine, NoAnswer
from mie.doctor.report import Check, Version, dotted, gibibytes, version_of

OLDEST_CAPABILITY = (8, 0)  # cp.async and bfloat16 in the tensor cores
OLDEST_CUDA = 12

_NUMPY_OF_CUPY: dict[int, tuple[Version, Version]] = {13: ((1, 22), (2, 6)), 14: ((2, 0), (2, 6))}
"""The NumPy range (from, before) by CuPy's major version, as its wheels require."""

_DRIVER_REMEDIES = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the machine: the driver was updated, and the "
    "kernel still holds the old one",
    "CUDA_ERROR_STUB_LIBRARY": "take the CUDA toolkit's stubs folder out of LD_LIBRARY_PATH: the "
    "libcuda.so.1 there only serves to link programs",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the CUDA compat folder out of "
    "LD_LIBRARY_PATH: this GPU works with its own driver's libcuda.so.1 only",
}


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The answers of the driver and CuPy, gathered before any check."""

    jetson: Jetson | None
    driver: dict[str, Any]
    cupy: dict[str, Any]
    kernel_module: str | None
    num_pci: int  # GPUs on the bus, with or without a driver
    visible_devices: str | None  # the variable, which hides every GPU that it does not name

    @property
    def found(self) -> list[dict[str, Any]]:
        """The GPUs, preferably as CuPy describes them, because it knows how much memory is free."""
        return self.cupy.get("gpus") or self.driver.get("gpus") or []

    @property
    def expected(self) -> bool:
        """Whether there is an NVIDIA GPU, even if it cannot be used."""
        return bool(self.found or self.num_pci or self.kernel_module or self.jetson)

    @property
    def driver_cuda(self) -> Version | None:
        """The newest CUDA version that the driver runs."""
        return version_of(self.driver.get("cuda", ""))

    @property
    def extra(self) -> str:
        """The extra of mie whose CuPy fits the driver."""
        cuda = self.driver_cuda or (OLDEST_CUDA,)
        return "mie[cuda13]" if cuda[0] >= 13 else "mie[cuda12]"


def gpu_checks(machine: Machine) -> Iterator[Check]:
    """Yield the checks in the order in which they are printed."""
    gpus = _gather(machine)
    yield _driver(gpus)
    for gpu in gpus.found:
        yield _gpu(gpu)
    yield _cupy(gpus)
    if "version" in gpus.cupy:
        yield _nvrtc(gpus)
        yield _cublas(gpus)
    if gpus.jetson is not None:
        yield from jetson_checks(machine, gpus.jetson)


def _gather(machine: Machine) -> Gpus:
    module = re.search(
        r"\s(\d+\.\d+(?:\.\d+)*)\s", machine.read("/proc/driver/nvidia/version") or ""
    )
    return Gpus(
        jetson=find_jetson(machine),
        driver=_ask(machine, "driver"),
        cupy=_ask(machine, "cupy"),
        kernel_module=module[1] if module else None,
        num_pci=_num_pci_gpus(machine),
        visible_devices=machine.environment.get("CUDA_VISIBLE_DEVICES"),
    )


def _ask(machine: Machine, topic: str) -> dict[str, Any]:
    try:
        return machine.ask(topic)
    except NoAnswer as why:
        return {"found": True, "installed": True, "error": f"the process that asked it {why}"}


def _num_pci_gpus(machine: Machine) -> int:
    """Count NVIDIA's display controllers on the PCI bus."""
    events = machine.read_all("/sys/bus/pci/devices/*/uevent")
    nvidia = [text for text in events if re.search(r"^PCI_ID=10DE:", text, re.MULTILINE)]
    return sum(bool(re.search(r"^PCI_CLASS=3\d{4}$", text, re.MULTILINE)) for text in nvidia)


def _driver(gpus: Gpus) -> Check:
    name = "NVIDIA driver"
    parts = []
    if gpus.driver_cuda:
        parts.append(f"runs CUDA {dotted(gpus.driver_cuda)}")
    if gpus.kernel_module:
        parts.append(f"kernel module {gpus.kernel_module}")
    found = gpus.driver.get("found")
    if not found and not gpus.expected:
        return Check(name=name, status="note", value="none; backend cupy needs an NVIDIA GPU")
    if not found:
        problem, remedy = "libcuda.so.1 is not found", _missing_library(gpus)
    else:
        problem = str(gpus.driver.get("error") or ("" if gpus.found else "no GPU is found"))
        remedy = _no_gpu(gpus)
    if problem:
        return Check(
            name=name,
            status="problem" if gpus.expected else "note",
            value=", ".join([*parts, problem]),
            remedy=remedy,
        )
    if gpus.driver_cuda and gpus.driver_cuda[0] < OLDEST_CUDA:
        return Check(
            name=name,
            status="problem",
            value=", ".join(parts),
            remedy=f"update the driver to one that runs CUDA {OLDEST_CUDA} or later",
        )
    return Check(name=name, status="ok", value=", ".join(parts) or "found")


def _missing_library(gpus: Gpus) -> str:
    if gpus.jetson:
        return "in a container, start it with --runtime nvidia; else flash JetPack again"
    if gpus.kernel_module:
        return "in a container, start it with --gpus all; else install the driver's libraries"
    return "install the NVIDIA driver; in a container, start it with --gpus all"


def _no_gpu(gpus: Gpus) -> str:
    error = str(gpus.driver.get("error", ""))
    if error in _DRIVER_REMEDIES:
        return _DRIVER_REMEDIES[error]
    if gpus.visible_devices is not None:
        return f"unset CUDA_VISIBLE_DEVICES, which is {gpus.visible_devices!r} and may hide it"
    if gpus.jetson:
        return "sudo usermod -aG video,render $USER, then log in again"
    return "nvidia-smi says more; in a container, start it with --gpus all"


def _gpu(gpu: dict[str, Any]) -> Check:
    capability = tuple(gpu["capability"])
    value = f"{gpu['name']}, compute capability {dotted(capability)}, {gibibytes(gpu['memory'])}"
    if gpu.get("integrated"):
        value += " shared with the CPU"
    elif "free" in gpu:
        value += f" ({gibibytes(gpu['free'])} free)"
    if capability >= OLDEST_CAPABILITY:
        return Check(name="GPU", status="ok", value=value)
    return Check(
        name="GPU",
        status="problem",
        value=value,
        remedy=f"the kernels need {dotted(OLDEST_CAPABILITY)} (Ampere) or later; use backend numpy",
    )


def _cupy(gpus: Gpus) -> Check:
    facts = gpus.cupy
    packages = facts.get("packages", {})
    if not facts.get("installed"):
        return _no_cupy(gpus)
    value = ", ".join(f"{name} {version}" for name, version in packages.items())
    value = value or f"CuPy {facts.get('version', '')}".strip()
    problem = _cupy_problem(gpus)
    if problem is None:
        return Check(name="CuPy", status="ok", value=value)
    reason, remedy = problem
    return Check(name="CuPy", status="problem", value=f"{value}: {reason}", remedy=remedy)


def _no_cupy(gpus: Gpus) -> Check:
    if not gpus.found:
        return Check(name="CuPy", status="note", value="not installed; backend cupy needs it")
    return Check(
        name="CuPy", status="problem", value="not installed", remedy=f"pip install '{gpus.extra}'"
    )


def _cupy_problem(gpus: Gpus) -> tuple[str, str] | None:
    """Return the problem of the installed CuPy and its remedy."""
    packages = gpus.cupy.get("packages", {})
    again = f"pip uninstall {' '.join(packages) or 'cupy'}, then pip install '{gpus.extra}'"
    if len(packages) > 1:
        return "they overwrite each other's files", again
    version = version_of(gpus.cupy.get("version") or next(iter(packages.values()), ""))
    low, high = _NUMPY_OF_CUPY.get(version[0] if version else 0, ((0,), (99,)))
    numpy = version_of(gpus.cupy.get("numpy", ""))
    if numpy and not low <= numpy < high:
        return (
            f"needs NumPy from {dotted(low)} to before {dotted(high)}, has {dotted(numpy)}",
            f"pip install 'numpy>={dotted(low)},<{dotted(high)}'",
        )
    if "error" in gpus.cupy:
        return f"cannot be imported: {gpus.cupy['error']}", again
    cuda, driver = _cupy_cuda(gpus), gpus.driver_cuda
    if cuda and driver and cuda > driver[0]:
        return f"made for CUDA {cuda}, and the driver runs CUDA {dotted(driver)}", (
            f"{again} (or update the driver)"
        )
    return None


def _cupy_cuda(gpus: Gpus) -> int | None:
    """Return the major version of the CUDA that the installed CuPy is built for."""
    version = version_of(gpus.cupy.get("cuda", ""))
    return version[0] if version else None


def _nvrtc(gpus: Gpus) -> Check:
    version, driver = version_of(gpus.cupy.get("nvrtc", "")), gpus.driver_cuda
    if version is None:
        error = str(gpus.cupy.get("nvrtc_error", "CuPy does not say which"))
        return _not_found(gpus, "NVRTC", error)
    if driver and version[0] > driver[0]:
        return Check(
            name="NVRTC",
            status="problem",
            value=f"{dotted(version)}, newer than the driver, which runs CUDA {dotted(driver)}",
            remedy=f"remove NVRTC {version[0]} (pip uninstall nvidia-cuda-nvrtc, or the CUDA "
            "toolkit it is from): CuPy takes the newest that it finds",
        )
    return Check(name="NVRTC", status="ok", value=dotted(version))


def _cublas(gpus: Gpus) -> Check:
    version = version_of(gpus.cupy.get("cublas", ""))
    if version is None:
        return _not_found(gpus, "cuBLAS", str(gpus.cupy.get("cublas_error", "no version")))
    return Check(name="cuBLAS", status="ok", value=dotted(version))


def _not_found(gpus: Gpus, name: str, error: str) -> Check:
    """Return the check for a missing CUDA library."""
    return Check(
        name=name,
        status="problem" if gpus.found else "note",
        value=f"not found: {error.partition(': No such file')[0]}",
        remedy=_missing_toolkit(gpus),
    )


def _missing_toolkit(gpus: Gpus) -> str:
    cuda = _cupy_cuda(gpus) or OLDEST_CUDA
    if gpus.jetson is None:
        return f"pip install 'cupy-cuda{cuda}x[ctk]', or install CUDA toolkit {cuda}"
    remedy = "sudo apt install nvidia-jetpack brings the CUDA toolkit"
    if gpus.driver_cuda and cuda < gpus.driver_cuda[0]:
        remedy += f", of CUDA {gpus.driver_cuda[0]}: pip uninstall cupy-cuda{cuda}x, then "
        remedy += f"pip install '{gpus.extra}'"
    return remedy
