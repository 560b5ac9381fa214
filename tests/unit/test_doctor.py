"""Test ``mie doctor`` on imitated machines: a Jetson, a server, a container, a bare laptop."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from mie.cli.doctor import add_parser, render, run
from mie.doctor.cpu import CPU_CHECKS
from mie.doctor.diagnosis import BACKENDS, run_checks
from mie.doctor.machine import Machine, find_facts
from mie.doctor.survey import Check
from mie.load import backends
from mie.ops_cpu.environment import numpy_facts
from mie.system.commands import CommandError
from mie.system.resources import (
    LIBRARY_BYTES,
    THREAD_BYTES,
    cpu_quota,
    memory_limit,
    usable_cpus,
)

GIB = 1 << 30
ORIN = {"name": "Orin", "capability": "8.7", "memory": 8 * GIB, "integrated": True}
HOPPER = {"name": "NVIDIA H200", "capability": "9.0", "memory": 140 * GIB, "integrated": False}
MEMORY = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"
KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\n"
)
NO_CUPY = {"packages": {}, "found": False}
NUMPY = {"version": "2.4.6", "blas": "scipy-openblas", "blas_version": "0.3.31"}

JIT = {
    "numba": "0.68.1",
    "llvmlite": "0.50.0",
    "cpu": "znver4",
    "vector_bits": 512,
    "num_threads": 8,
    "cache": "/home/mia/.cache/mie/jit",
}

PRODUCTS = {
    "plan": "tiled",
    "kernels": "SkylakeX",
    "is_controlled": True,
    "num_threads": 8,
}


@dataclass(frozen=True, kw_only=True)
class FakeMachine(Machine):
    """A machine with its files under ``root``. Its commands and libraries give prepared answers."""

    environment: Mapping[str, str] = field(default_factory=dict)
    system: str = "Linux"
    architecture: str = "x86_64"
    python: str = "3.12.1"
    num_cpus: int = 8
    num_usable_cpus: int = 8
    commands: Mapping[str, str] = field(default_factory=lambda: {"g++ --version": "g++ 12.2\nx"})
    facts: Mapping[str, dict[str, Any] | CommandError] = field(default_factory=dict)

    def run(self, command: Sequence[str], timeout: float = 10.0) -> str:
        if command[0] == sys.executable:
            return json.dumps(self.facts_about(" ".join(command[6:])))
        if " ".join(command) not in self.commands:
            raise CommandError("is not installed")
        return self.commands[" ".join(command)]

    def facts_about(self, topic: str) -> dict[str, Any]:
        usual: dict[str, dict[str, Any]] = {
            "numpy": NUMPY,
            "products": PRODUCTS,
            "jit": JIT,
            "driver": {"found": False, "error": "libcuda.so.1: cannot open"},
            "cupy": NO_CUPY,
            "backend numpy": {},
            "backend jit": {},
            "backend cupy-emulated": {},
            "backend cupy": {"error": "needs CuPy"},
        }
        facts = self.facts.get(topic, usual[topic])
        if isinstance(facts, CommandError):
            raise facts
        return facts


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path, {"/proc/meminfo": MEMORY})


def cupy(**changes: Any) -> dict[str, Any]:
    """Return the facts of a CuPy that works on one H200."""
    usual = {
        "packages": {"cupy-cuda12x": "14.2.0"},
        "version": "14.2.0",
        "cuda": "12.9",
        "nvrtc": "12.9",
        "cublas": "12.9.1",
        "free": [130 * GIB],
    }
    return {name: value for name, value in {**usual, **changes}.items() if value is not None}


def driver(*cuda: int, gpus: Sequence[dict[str, Any]] = (HOPPER,), **more: Any) -> dict[str, Any]:
    return {"cuda": ".".join(map(str, cuda)), "gpus": list(gpus), **more}


def cpu(machine: Machine) -> dict[str, Check]:
    """The checks for every backend, by name."""
    return {check.name: check for check in run_checks(machine) if check.name in CPU_CHECKS}


def gpu(machine: Machine) -> dict[str, Check]:
    """The checks for backend cupy, by name."""
    return {check.name: check for check in run_checks(machine) if check.name not in CPU_CHECKS}


def on(root: Path, **facts: Any) -> dict[str, Check]:
    """Return the GPU checks of a machine whose libraries report ``facts``."""
    return gpu(FakeMachine(root=root, facts=facts))


# The requirements of every backend.


def test_a_healthy_machine_has_no_problems(root: Path) -> None:
    checks = cpu(FakeMachine(root=root))
    assert {check.status for check in checks.values()} == {"ok"}
    assert {name: check.value for name, check in checks.items()} == {
        "Python": "3.12.1, Linux x86_64",
        "NumPy": "2.4.6, BLAS scipy-openblas 0.3.31",
        "BLAS settings": "none that cost speed",
        "matrix plans": "plan tiled; SkylakeX kernels; 8 threads",
        "batch invariance": "--batch-invariant on numpy gives the bits of SkylakeX kernels of BLAS "
        "0.3.31, in any process and with any number of threads",
        "backend jit": "Numba 0.68.1, llvmlite 0.50.0; znver4, vectors of 512 bits; 8 threads; "
        "kernels are kept in /home/mia/.cache/mie/jit",
        "CPUs": "8",
        "memory": "8.0 GiB available of 16.0 GiB",
        "C++ compiler": "g++ 12.2",
    }


@pytest.mark.parametrize(
    ("system", "architecture", "status"),
    [
        ("Linux", "aarch64", "ok"),
        ("Linux", "riscv64", "note"),
        ("Darwin", "arm64", "note"),
    ],
)
def test_an_untested_platform_is_a_note(system: str, architecture: str, status: str) -> None:
    machine = FakeMachine(root=Path("/nowhere"), system=system, architecture=architecture)
    assert cpu(machine)["Python"].status == status


def test_a_numpy_that_crashes_is_a_problem(root: Path) -> None:
    machine = FakeMachine(root=root, facts={"numpy": CommandError("was ended by signal SIGILL")})
    check = cpu(machine)["NumPy"]
    assert check.status == "problem"
    assert check.value == "the process that tried it was ended by signal SIGILL"
    assert check.remedy is not None


def test_matrix_products_name_their_plan(root: Path) -> None:
    plain = {**PRODUCTS, "plan": "plain", "kernels": "Haswell", "num_threads": 1}
    checks = cpu(FakeMachine(root=root, facts={"products": plain}))
    check, invariance = checks["matrix plans"], checks["batch invariance"]
    assert check.status == invariance.status == "ok"
    assert check.value == "plan plain; Haswell kernels; 1 thread"
    assert invariance.value.startswith(
        "--batch-invariant on numpy gives the bits of Haswell kernels of BLAS"
    )
    other = {**PRODUCTS, "kernels": "unknown", "is_controlled": False}
    check = cpu(FakeMachine(root=root, facts={"products": other}))["matrix plans"]
    assert check.status == "note"
    assert "MKL_NUM_THREADS=1" in str(check.remedy)
    failed = {"products": CommandError("was ended by signal SIGILL")}
    checks = cpu(FakeMachine(root=root, facts=failed))
    assert "batch invariance" not in checks
    check = checks["matrix plans"]
    assert (check.status, check.value) == (
        "problem",
        "the process that tried it was ended by signal SIGILL",
    )


def test_matrix_products_are_described() -> None:
    facts = Machine().ask("products")
    assert facts["plan"] in ("plain", "tiled")
    assert facts["num_threads"] >= 1


def test_a_blas_that_may_be_slow_is_a_note(root: Path) -> None:
    facts = {"numpy": {"version": "1.26.4", "blas": "blas", "blas_version": "3.9.0"}}
    check = cpu(FakeMachine(root=root, facts=facts))["NumPy"]
    assert check.status == "note"
    assert check.value == "1.26.4, BLAS blas 3.9.0, which may be a slow one"


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        ({"OPENBLAS_CORETYPE": "Haswell"}, "unset OPENBLAS_CORETYPE"),
        (
            {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "9", "OMP_NUM_THREADS": "1"},
            "unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE OMP_NUM_THREADS",
        ),
        ({"OMP_NUM_THREADS": "2"}, "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "32"}, "unset OMP_NUM_THREADS"),
        # OpenBLAS looks at its own variable first.
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "8"}, None),
        ({"OMP_NUM_THREADS": "8"}, None),
        ({"OMP_NUM_THREADS": "many", "OPENBLAS_CORETYPE": ""}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
    ],
)
def test_variables_that_slow_computation_are_noted(
    root: Path, environment: Mapping[str, str], remedy: str | None
) -> None:
    check = cpu(FakeMachine(root=root, environment=environment))["BLAS settings"]
    assert check.remedy == remedy
    assert check.status == ("note" if remedy else "ok")
    for name in (remedy or "unset").split()[1:]:
        assert f"{name}={environment[name]}" in check.value


GROUP_2 = {"/proc/self/cgroup": "0::/box/inner\n"}
GROUP_1 = {"/proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({**GROUP_2, "/sys/fs/cgroup/box/inner/cpu.max": "150000 100000\n"}, 1.5),
        ({**GROUP_2, "/sys/fs/cgroup/box/inner/cpu.max": "max 100000\n"}, None),
        (
            {
                **GROUP_2,
                "/sys/fs/cgroup/box/inner/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/box/cpu.max": "400000 100000\n",
                "/sys/fs/cgroup/cpu.max": "800000 100000\n",
            },
            4.0,
        ),
        ({**GROUP_2, "/sys/fs/cgroup/cpu.max": "nonsense"}, None),
        (
            {
                **GROUP_1,
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",  # the box is mounted as the root
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                **GROUP_1,
                "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_quota_of_a_control_group(
    root: Path, files: Mapping[str, str], quota: float | None
) -> None:
    assert cpu_quota(FakeMachine(root=write(root, files)).read) == quota


def test_a_quota_below_the_cpus_is_a_note(root: Path) -> None:
    write(root, {**GROUP_2, "/sys/fs/cgroup/cpu.max": "150000 100000\n"})
    check = cpu(FakeMachine(root=root, num_cpus=16))["CPUs"]
    assert check.value == "8 of 16, and the control group allows the time of 1.5"
    assert check.remedy is not None
    assert "OPENBLAS_NUM_THREADS=2" in check.remedy
    followed = cpu(FakeMachine(root=root, environment={"OPENBLAS_NUM_THREADS": "2"}))
    assert followed["CPUs"].status == followed["BLAS settings"].status == "ok"


def test_the_memory_of_a_control_group(root: Path) -> None:
    write(root, {**GROUP_2, "/sys/fs/cgroup/box/memory.max": f"{GIB // 2}\n"})
    machine = FakeMachine(root=root)
    assert memory_limit(machine.read) == GIB // 2
    check = cpu(machine)["memory"]
    assert check.status == "note"
    assert check.value.endswith("; the control group may hold 512.0 MiB")
    write(root, {"/sys/fs/cgroup/box/memory.max": f"{4 * GIB}\n"})
    assert cpu(machine)["memory"].status == "ok"
    write(root, {"/sys/fs/cgroup/box/memory.current": f"{3 * GIB + 1}\n"})
    assert cpu(machine)["memory"].status == "note"
    write(root, {**GROUP_1, "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2**63 - 4096}"})
    assert cpu(machine)["memory"].value == "8.0 GiB available of 16.0 GiB"


def test_a_limit_of_the_process_on_memory(root: Path) -> None:
    reserve = LIBRARY_BYTES + THREAD_BYTES * usable_cpus()
    limits = f"Max address space         {3 * GIB + reserve}           unlimited    bytes\n"
    write(root, {"/proc/self/limits": limits, "/proc/self/status": f"VmSize:\t{GIB >> 10} kB\n"})
    check = cpu(FakeMachine(root=root))["memory"]
    assert check.value.endswith("; a limit of the process (ulimit -v or -d) leaves 2.0 GiB")
    assert check.status == "ok"


def test_little_memory_and_unknown_memory_are_notes(tmp_path: Path) -> None:
    machine = FakeMachine(root=tmp_path)
    assert cpu(machine)["memory"].value == "unknown: /proc/meminfo does not say"
    write(tmp_path, {"/proc/meminfo": "MemTotal:  8000000 kB\nMemAvailable:  500000 kB\n"})
    check = cpu(machine)["memory"]
    assert check.status == "note"
    assert "--kv-cache-memory-bytes" in (check.remedy or "")


@pytest.mark.parametrize(
    ("environment", "commands", "value"),
    [
        ({}, {}, "g++ is not installed; backend cupy-emulated needs one"),
        ({"CXX": "ccache clang++"}, {"ccache clang++ --version": "clang 19\n"}, "clang 19"),
        ({"CXX": "'open"}, {}, "'open is no compiler; backend cupy-emulated needs one"),
        ({"CXX": "mute"}, {"mute --version": ""}, "mute is no compiler; backend cupy-emulated"),
    ],
)
def test_the_compiler(
    root: Path, environment: Mapping[str, str], commands: Mapping[str, str], value: str
) -> None:
    machine = FakeMachine(root=root, environment=environment, commands=commands)
    check = cpu(machine)["C++ compiler"]
    assert check.value.startswith(value)
    assert check.status == ("ok" if value == "clang 19" else "note")
    assert (check.remedy is None) == (check.status == "ok")


# The requirements of backend cupy.


def test_a_laptop_without_an_nvidia_gpu_has_no_problem(root: Path) -> None:
    intel = "DRIVER=i915\nPCI_CLASS=30000\nPCI_ID=8086:46A6\n"
    sound = "PCI_CLASS=40300\nPCI_ID=10DE:22BA\n"  # NVIDIA also makes other devices
    write(
        root,
        {
            "/sys/bus/pci/devices/0000:00:02.0/uevent": intel,
            "/sys/bus/pci/devices/0000:01:00.1/uevent": sound,
        },
    )
    checks = on(root)
    assert list(checks) == ["NVIDIA driver", "CuPy"]
    assert {check.status for check in checks.values()} == {"note"}


def test_a_gpu_without_a_driver(root: Path) -> None:
    nvidia = "DRIVER=nouveau\nPCI_CLASS=30200\nPCI_ID=10DE:2335\n"
    write(root, {"/sys/bus/pci/devices/0000:18:00.0/uevent": nvidia})
    checks = on(root)
    assert checks["NVIDIA driver"].status == "problem"
    assert (checks["NVIDIA driver"].remedy or "").startswith("install the NVIDIA driver")
    assert checks["CuPy"].status == "note"


def test_a_container_without_access_to_the_gpu(root: Path) -> None:
    check = on(write(root, {"/proc/driver/nvidia/version": KERNEL_MODULE}))["NVIDIA driver"]
    assert check.value == "kernel module 560.35.03, libcuda.so.1 is not found"
    assert "--gpus all" in (check.remedy or "")


def test_a_healthy_server_has_no_problems(root: Path) -> None:
    write(root, {"/proc/driver/nvidia/version": KERNEL_MODULE})
    checks = on(root, driver=driver(12, 6), cupy=cupy())
    assert {check.status for check in checks.values()} == {"ok"}
    assert {name: check.value for name, check in checks.items()} == {
        "NVIDIA driver": "runs CUDA 12.6, kernel module 560.35.03",
        "GPU": "NVIDIA H200, compute capability 9.0, 140.0 GiB (130.0 GiB free)",
        "CuPy": "cupy-cuda12x 14.2.0",
        "NVRTC": "12.9",
        "cuBLAS": "12.9.1",
    }


def test_every_gpu_has_a_line(root: Path) -> None:
    facts = {"driver": driver(13, 0, gpus=[HOPPER, ORIN])}
    checks = run_checks(FakeMachine(root=root, facts=facts))
    assert [check.value for check in checks if check.name == "GPU"] == [
        "NVIDIA H200, compute capability 9.0, 140.0 GiB",
        "Orin, compute capability 8.7, 8.0 GiB shared with the CPU",
    ]


def test_a_gpu_that_is_too_old(root: Path) -> None:
    old = {**HOPPER, "name": "Tesla T4", "capability": "7.5"}
    check = on(root, driver=driver(12, 6, gpus=[old]))["GPU"]
    assert check.status == "problem"
    assert "use backend numpy" in (check.remedy or "")


@pytest.mark.parametrize(
    ("cuda", "extra"),
    [((12, 2), "mie[cuda12]"), ((13, 2), "mie[cuda13]"), ((14, 0), "mie[cuda13]")],
)
def test_a_driver_without_cupy_names_the_extra(
    root: Path, cuda: tuple[int, int], extra: str
) -> None:
    check = on(root, driver=driver(*cuda))["CuPy"]
    assert (check.status, check.remedy) == ("problem", f"pip install '{extra}'")


def test_a_driver_of_cuda_11_is_too_old(root: Path) -> None:
    check = on(root, driver=driver(11, 8))["NVIDIA driver"]
    assert check.status == "problem"
    assert check.remedy == "update the driver to one that runs CUDA 12 or later"


def test_a_cupy_newer_than_the_driver(root: Path) -> None:
    newer = cupy(packages={"cupy-cuda13x": "14.2.0"}, cuda="13.0", nvrtc=None, nvrtc_error="gone")
    checks = on(root, driver=driver(12, 6), cupy=newer)
    assert checks["CuPy"].value == (
        "cupy-cuda13x 14.2.0: made for CUDA 13, and the driver runs CUDA 12.6"
    )
    assert (checks["CuPy"].remedy or "").startswith(
        "pip uninstall cupy-cuda13x, then pip install 'mie[cuda12]'"
    )


def test_a_cupy_older_than_the_driver_works(root: Path) -> None:
    assert on(root, driver=driver(13, 2), cupy=cupy())["CuPy"].status == "ok"


def test_two_cupys_at_once(root: Path) -> None:
    both = {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"}
    check = on(root, driver=driver(13, 0), cupy=cupy(packages=both))["CuPy"]
    assert check.status == "problem"
    assert check.remedy == (
        "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install 'mie[cuda13]'"
    )


@pytest.mark.parametrize(
    ("numpy", "version", "is_fine"),
    [
        ("1.26.4", "14.2.0", False),
        ("2.0.0", "14.2.0", True),
        ("2.5.1", "14.2.0", True),
        ("2.6.0rc1", "14.2.0", False),
        ("1.26.4", "13.6.0", True),
        ("2.6.0", "13.6.0", False),
        ("2.9.0", "15.0.0", True),  # nothing is known of it
    ],
)
def test_the_numpy_that_cupy_needs(root: Path, numpy: str, version: str, is_fine: bool) -> None:
    facts = cupy(packages={"cupy-cuda12x": version}, version=version)
    check = on(root, driver=driver(12, 6), cupy=facts, numpy={**NUMPY, "version": numpy})["CuPy"]
    assert check.status == ("ok" if is_fine else "problem")
    assert is_fine or "pip install 'numpy>=" in (check.remedy or "")


def test_the_wrong_numpy_explains_a_cupy_that_cannot_be_imported(root: Path) -> None:
    facts = cupy(version=None, error="numpy.core.multiarray failed to import")
    check = on(root, cupy=facts, numpy={**NUMPY, "version": "1.26.4"})["CuPy"]
    assert check.value.endswith("needs NumPy from 2.0 to before 2.6, has 1.26.4")


def test_a_broken_cupy_and_one_that_crashes(root: Path) -> None:
    broken = on(root, cupy=cupy(version=None, error="libcudart.so.12: no such file"))
    assert broken["CuPy"].value.endswith("cannot be imported: libcudart.so.12: no such file")
    assert "NVRTC" not in broken
    crashed = on(root, cupy=CommandError("was ended by signal SIGSEGV"))["CuPy"]
    assert crashed.status == "problem"
    assert crashed.value.endswith("the process that tried it was ended by signal SIGSEGV")


def test_no_nvrtc(root: Path) -> None:
    error = 'Failure finding "libnvrtc.so.12": No such file: libnvrtc.so.12'
    missing = cupy(nvrtc=None, nvrtc_error=error)
    check = on(root, driver=driver(12, 6), cupy=missing)["NVRTC"]
    assert check.value == 'not found: Failure finding "libnvrtc.so.12"'
    assert check.remedy == "pip install 'cupy-cuda12x[ctk]', or install CUDA toolkit 12"
    assert check.status == "problem"
    assert on(root, cupy=missing)["NVRTC"].status == "note"


def test_no_cublas(root: Path) -> None:
    missing = cupy(cublas=None, cublas_error="libcublas.so.12: No such file or directory")
    check = on(root, driver=driver(12, 6), cupy=missing)["cuBLAS"]
    assert (check.status, check.value) == ("problem", "not found: libcublas.so.12")
    assert check.remedy == "pip install 'cupy-cuda12x[ctk]', or install CUDA toolkit 12"
    assert on(root, cupy=cupy())["cuBLAS"].value == "12.9.1"


def test_the_extras_bring_cuda_but_for_a_jetson_which_has_its_own() -> None:
    """The wheels of `cupy-cuda12x[ctk]` are for servers. A Jetson is recognised by its kernel's
    name."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for version in (12, 13):
        [line] = re.findall(rf"^cuda{version} = \[(.*?)^\]", project, re.M | re.S)
        found = [Requirement(text) for text in re.findall(r'"(.*?)",?$', line, re.M)]
        for release, extras in (("6.8.0-60-generic", {"ctk"}), ("5.15.148-tegra", set())):
            environment = {"platform_release": release}
            [taken] = [each for each in found if each.marker.evaluate(environment)]
            assert (taken.name, taken.extras) == (f"cupy-cuda{version}x", extras)


def test_an_nvrtc_newer_than_the_driver(root: Path) -> None:
    check = on(root, driver=driver(12, 6), cupy=cupy(nvrtc="13.4"))["NVRTC"]
    assert check.status == "problem"
    assert check.value == "13.4, newer than the driver, which runs CUDA 12.6"
    assert "nvidia-cuda-nvrtc" in (check.remedy or "")


@pytest.mark.parametrize(
    ("error", "environment", "remedy"),
    [
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", {}, "restart the machine"),
        ("CUDA_ERROR_NO_DEVICE", {"CUDA_VISIBLE_DEVICES": ""}, "unset CUDA_VISIBLE_DEVICES"),
        ("CUDA_ERROR_NO_DEVICE", {}, "--gpus all"),
        ("CUDA_ERROR_UNKNOWN", {}, "nvidia-smi"),
    ],
)
def test_a_driver_that_finds_no_gpu(
    root: Path, error: str, environment: Mapping[str, str], remedy: str
) -> None:
    write(root, {"/proc/driver/nvidia/version": KERNEL_MODULE})
    facts = {"driver": driver(12, 6, gpus=(), error=error)}
    machine = FakeMachine(root=root, facts=facts, environment=environment)
    check = gpu(machine)["NVIDIA driver"]
    assert check.status == "problem"
    assert error in check.value
    assert remedy in (check.remedy or "")


def test_a_driver_that_hangs(root: Path) -> None:
    check = on(root, driver=CommandError("gave no answer within 180 s"))["NVIDIA driver"]
    assert check.value == "the process that tried it gave no answer within 180 s"
    assert check.remedy is not None


# Jetson

RELEASE = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n# KERNEL"
MODEL = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0"
POWER_MODES = "".join(
    f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n"
    for number, name in enumerate(("15W", "25W", "MAXN_SUPER", "7W"))
)


@pytest.fixture
def jetson(root: Path) -> Path:
    return write(
        root,
        {
            "/etc/nv_tegra_release": RELEASE,
            "/proc/device-tree/model": MODEL,
            "/etc/nvpmodel.conf": POWER_MODES,
        },
    )


def on_jetson(root: Path, mode: str = "MAXN_SUPER", **facts: Any) -> dict[str, Check]:
    usual = {"driver": driver(12, 6, gpus=[ORIN]), "cupy": cupy(free=[GIB])}
    return gpu(
        FakeMachine(
            root=root,
            architecture="aarch64",
            facts={**usual, **facts},
            commands={"nvpmodel -q": f"NV Power Mode: {mode}\n2\n"},
        )
    )


def test_a_healthy_jetson_has_no_problems(jetson: Path) -> None:
    checks = on_jetson(jetson)
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["JetPack"].value == f"6 (L4T 36.4.3), on {MODEL[:-1]}"
    assert checks["power mode"].value == "MAXN_SUPER"
    assert checks["GPU"].value == "Orin, compute capability 8.7, 8.0 GiB shared with the CPU"


def test_a_slow_power_mode_names_the_fast_one(jetson: Path) -> None:
    check = on_jetson(jetson, mode="15W")["power mode"]
    assert check.status == "note"
    assert (check.remedy or "").startswith("sudo nvpmodel -m 2 (MAXN_SUPER)")
    (jetson / "etc/nvpmodel.conf").unlink()
    check = on_jetson(jetson, mode="15W")["power mode"]
    assert (check.remedy or "").startswith("sudo nvpmodel -m ID")


def test_maxn_is_the_fastest_mode_without_maxn_super(jetson: Path) -> None:
    write(jetson, {"/etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\n"})
    assert on_jetson(jetson, mode="MAXN")["power mode"].status == "ok"


def test_a_jetson_without_nvpmodel(jetson: Path) -> None:
    check = gpu(FakeMachine(root=jetson))["power mode"]
    assert (check.status, check.value) == ("note", "unknown: nvpmodel is not installed")
    mute = FakeMachine(root=jetson, commands={"nvpmodel -q": "?"})
    assert gpu(mute)["power mode"].value == "unknown: nvpmodel does not say"


@pytest.mark.parametrize(
    ("release", "status", "value"),
    [
        ("# R35 (release), REVISION: 4.1, GCID", "problem", "5 (L4T 35.4.1)"),
        ("# R36 (release), REVISION: 3.0, GCID", "note", "6 (L4T 36.3.0)"),
        ("# R39 (release), REVISION: 2.10, GCID", "ok", "7 (L4T 39.2.10)"),
        ("# R41 (release), REVISION: 0, GCID", "ok", "of a version unknown to mie (L4T 41.0)"),
        ("something else", "note", "unknown, on NVIDIA Jetson"),
    ],
)
def test_jetpacks(jetson: Path, release: str, status: str, value: str) -> None:
    write(jetson, {"/etc/nv_tegra_release": release})
    check = on_jetson(jetson)["JetPack"]
    assert check.value.startswith(value)
    assert check.status == status


def test_a_container_on_a_jetson_is_known_by_the_board(jetson: Path) -> None:
    (jetson / "etc/nv_tegra_release").unlink()
    nothing = {"found": False}
    checks = on_jetson(jetson, driver=nothing, cupy=NO_CUPY)
    assert checks["JetPack"].status == "note"
    assert "--runtime nvidia" in (checks["NVIDIA driver"].remedy or "")


def test_a_user_who_may_not_use_the_gpu_of_a_jetson(jetson: Path) -> None:
    denied = driver(12, 6, gpus=(), error="CUDA_ERROR_NOT_PERMITTED")
    check = on_jetson(jetson, driver=denied, cupy=NO_CUPY)["NVIDIA driver"]
    assert "usermod -aG video,render" in (check.remedy or "")


def test_a_jetson_gets_nvrtc_from_its_jetpack(jetson: Path) -> None:
    facts = {"cupy": cupy(nvrtc=None, nvrtc_error="gone")}
    check = on_jetson(jetson, **facts)["NVRTC"]
    assert check.remedy == "sudo apt install nvidia-jetpack brings the CUDA toolkit"
    newer = on_jetson(jetson, driver=driver(13, 2, gpus=[ORIN]), **facts)["NVRTC"]
    assert "pip uninstall cupy-cuda12x, then pip install 'mie[cuda13]'" in (newer.remedy or "")


# The report


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *arguments])


def test_the_table(root: Path) -> None:
    facts = {"driver": driver(12, 6)}
    machine = FakeMachine(root=root, facts=facts)
    text = render(
        run_checks(machine), {name: machine.ask("backend", name).get("error") for name in BACKENDS}
    )
    lines = text.splitlines()
    assert "ok       Python         3.12.1, Linux x86_64" in lines
    at = lines.index("problem  CuPy           not installed")
    assert lines[at + 1] == "                        remedy: pip install 'mie[cuda12]'"
    assert lines[-5:] == [
        "",
        "backend  numpy          works",
        "backend  jit            works",
        "backend  cupy-emulated  works",
        "backend  cupy           does not work: needs CuPy",
    ]


def test_a_problem_has_a_remedy() -> None:
    with pytest.raises(AssertionError):
        Check(name="x", status="problem", value="y")


@pytest.mark.parametrize(
    ("arguments", "code", "tried"),
    [
        ((), 0, BACKENDS),
        (("--backend", "numpy"), 0, ("numpy",)),
        (("--backend", "cupy"), 1, ("cupy",)),
    ],
)
def test_the_exit_code_is_that_of_the_requested_backend(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    tried: tuple[str, ...],
) -> None:
    assert run(command("--json", *arguments), FakeMachine(root=root)) == code
    printed = json.loads(capsys.readouterr().out)
    assert tuple(each["name"] for each in printed["backends"]) == tried
    assert printed["checks"][0] == {
        "name": "Python",
        "status": "ok",
        "value": "3.12.1, Linux x86_64",
        "remedy": None,
    }
    assert run(command(*arguments), FakeMachine(root=root)) == code
    assert capsys.readouterr().out.startswith("ok       Python")


def test_a_backend_that_crashes_its_process_is_reported(root: Path) -> None:
    facts = {"backend cupy": CommandError("was ended by signal SIGSEGV")}
    reason = FakeMachine(root=root, facts=facts).ask("backend", "cupy").get("error")
    assert reason == "the process that tried it was ended by signal SIGSEGV"


def test_the_doctor_tries_the_backends_of_the_flag() -> None:
    # The plain operators run wherever NumPy does.
    assert {*BACKENDS, "numpy-plain"} == set(backends.BACKENDS)


def test_a_machine_without_libraries_still_has_a_report(tmp_path: Path) -> None:
    nothing = CommandError("is not installed")
    topics = ("numpy", "products", "driver", "cupy", *(f"backend {name}" for name in BACKENDS))
    machine = FakeMachine(root=tmp_path, commands={}, facts=dict.fromkeys(topics, nothing))
    reasons = {name: machine.ask("backend", name).get("error") for name in BACKENDS}
    assert all(reasons.values())
    assert render(run_checks(machine), reasons)


# The machine itself


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    write(tmp_path, {"/a/b/uevent": "x", "/a/c/other": "y"})
    (tmp_path / "bytes").write_bytes(b"\xff\0")
    machine = Machine(root=tmp_path)
    assert machine.read("/no/such") is machine.read("/a") is None
    assert machine.read("/bytes") == "\N{REPLACEMENT CHARACTER}\0"
    assert machine.read_all("/a/*/uevent") == ["x"]
    assert 1 <= machine.num_usable_cpus <= machine.num_cpus


@pytest.mark.parametrize("printed", ["", "not json", "[1]"])
def test_an_answer_that_is_not_a_json_object(printed: str) -> None:
    class Babbling(Machine):
        def run(self, command: Sequence[str], timeout: float = 10.0) -> str:
            return printed

    assert "is not a JSON object" in Babbling().ask("numpy")["error"]


# Questions to the libraries.


def test_numpy_reports_its_blas() -> None:
    facts = Machine().ask("numpy")
    assert facts == numpy_facts()
    assert facts["version"][0].isdigit()


def test_a_file_in_the_current_folder_is_not_loaded_as_a_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, {"numpy.py": "raise SystemExit(5)", "json.py": "raise SystemExit(6)"})
    monkeypatch.chdir(tmp_path)
    assert "version" in Machine().ask("numpy")


class Trial:
    """A backend whose argmax is broken, or that raises."""

    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def sample(self, *_: Any) -> list[int]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        (37, {}),
        (36, {"error": "it computed token 36, expected 37"}),
        (OSError("no\nmemory"), {"error": "OSError: no memory"}),
        (KeyError(), {"error": "KeyError: KeyError"}),
    ],
)
def test_a_backend_is_judged_by_its_results(
    monkeypatch: pytest.MonkeyPatch, outcome: int | Exception, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(backends, "load_backend", lambda name: Trial(outcome))
    assert find_facts("backend", "numpy") == facts


def test_the_trial_accepts_numpys_results() -> None:
    assert find_facts("backend", "numpy") == {}
    error = find_facts("backend", "abacus")["error"]
    assert error.startswith("backend 'abacus' is not available")
