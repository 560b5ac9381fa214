"""Gather the facts that the checks judge, and define the results of checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mie.cli.diagnosis.machine import Facts, Machine, Topic
from mie.system.resources import cpu_quota, whole_cpus

# The order in which OpenBLAS looks for its number of threads.
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

# How the kernel describes a display controller of NVIDIA on the PCI bus.
_NVIDIA_DISPLAY = re.compile(r"^PCI_CLASS=3\d{4}\nPCI_ID=10DE:", re.MULTILINE)

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    A "note" costs speed, or is missing and may not be needed. A "problem" keeps something that is
    present from working. ``remedy`` is an instruction, or None.
    """

    name: str
    status: Status
    value: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert self.remedy or self.status != "problem", self


Finding = tuple[Status, str, str | None]
"""The status, the value and the remedy of a `Check`."""


def ok(value: str) -> list[Finding]:
    """Return the finding that all is well."""
    return [("ok", value, None)]


def note(value: str, remedy: str | None = None) -> list[Finding]:
    """Return a finding that costs speed, or that something is missing that may not be needed."""
    return [("note", value, remedy)]


def problem(value: str, remedy: str) -> list[Finding]:
    """Return the finding that something is present and does not work."""
    return [("problem", value, remedy)]


class Survey:
    """The facts about a machine, gathered before any check."""

    oldest_cuda = 12
    topics: tuple[Topic, ...] = (("numpy",), ("products",), ("jit",), ("driver",), ("cupy",))

    def __init__(self, machine: Machine, facts: Mapping[Topic, Facts]) -> None:
        self.machine, self.environment = machine, machine.environment
        self.numpy, self.products, self.jit, self.driver, self.cupy = map(
            facts.__getitem__, self.topics
        )
        self.quota = cpu_quota(machine.read)
        self.cpus = whole_cpus(machine.num_usable_cpus, self.quota)
        """How many CPUs threads can use continuously."""
        settings = ((name, self.environment.get(name, "").strip()) for name in _THREADS)
        found = ((name, int(text)) for name, text in settings if text.isdecimal() and int(text))
        self.threads = next(found, None)
        """The variable that sets NumPy's number of threads, and that number."""
        self.gpus: list[Facts] = self.driver.get("gpus", [])
        self.driver_cuda = version_of(self.driver.get("cuda", "0"))[0]
        """The major version of the newest CUDA that the driver runs, or 0 if it does not say."""
        self.cupy_cuda = version_of(self.cupy.get("cuda", f"{self.oldest_cuda}"))[0]
        """The major version of the CUDA that the installed CuPy is built for."""
        self.install_cupy = f"pip install 'mie[cuda{13 if self.driver_cuda >= 13 else 12}]'"
        """The command that installs the CuPy that fits the driver."""
        self.l4t_release = machine.read("/etc/nv_tegra_release")
        self.board = (machine.read("/proc/device-tree/model") or "").strip("\0\n ")
        is_tegra = bool(re.search("jetson|tegra", self.board, re.IGNORECASE))
        self.is_jetson = is_tegra or self.l4t_release is not None
        driver = machine.read("/proc/driver/nvidia/version") or ""
        module = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", driver)
        self.kernel_module = module and module[1]
        on_pci = any(map(_NVIDIA_DISPLAY.search, machine.read_all("/sys/bus/pci/devices/*/uevent")))
        self.has_gpu = bool(self.gpus or self.kernel_module or self.is_jetson or on_pci)
        """Whether there is an NVIDIA GPU, even if it cannot be used."""


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers that ``text`` begins with: (14, 2, 0) for "14.2.0rc1"."""
    return tuple(int(number) for number in re.split(r"[^\d.]", text)[0].split(".") if number)
