"""Access to the machine: its files, commands and libraries, and the results of checks.

A library may be missing, broken or slow. `Machine.ask` therefore gets its facts from another
process. That process runs `main` and prints one JSON object.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mie.base.commands import CommandError, NoAnswerError, run_command
from mie.base.resources import cpu_quota, read_text, usable_cpus, whole_cpus
from mie.errors import MieError, install_command
from mie.ops.blas import numpy_facts, products_facts
from mie.ops_gpu.environment import cupy_facts, driver_facts, one_line

ASK_SECONDS = 180.0
"""Timeout in seconds, longer than any build or first compilation. A hung driver never answers."""

# The child finds modules where this process does, not in its working directory.
_ASK = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "from mie.cli.diagnosis.machine import main; main(sys.argv[1:])"
)

Facts = dict[str, Any]
Topic = tuple[str, ...]
"""The name of a function of `TOPICS`, and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as the checks see it. A test uses another ``root`` and its own answers."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    system: str = field(default_factory=platform.system)
    architecture: str = field(default_factory=platform.machine)
    python: str = field(default_factory=platform.python_version)
    num_cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    num_usable_cpus: int = field(default_factory=usable_cpus)
    """How many CPUs this process may run on."""

    def read(self, path: str) -> str | None:
        """Return the text of the file ``path``, or None if it cannot be read."""
        return read_text(str(self.root / path.lstrip("/")))

    def read_all(self, pattern: str) -> list[str]:
        """Return the texts of the files that match, such as ``/sys/bus/pci/devices/*/vendor``."""
        texts = (read_text(str(path)) for path in self.root.glob(pattern.lstrip("/")))
        return [text for text in texts if text is not None]

    def run(self, command: Sequence[str], timeout: float = 10.0) -> str:
        """Return the output of ``command``, or raise a `CommandError`."""
        environment = {**self.environment, "LC_ALL": "C"}
        return run_command(command, timeout=timeout, environment=environment)

    def ask(self, *topic: str, timeout: float = ASK_SECONDS) -> Facts:
        """Return the facts of ``topic`` that `find_facts` finds in a separate process.

        If it crashes, hangs or prints something else, there is an "error" that says so, and
        "is_late" if it has given no answer within ``timeout`` seconds.
        """
        # Warnings are not facts, even if the user has turned them into errors.
        command = (sys.executable, "-W", "ignore", "-c", _ASK, "\n".join(sys.path), *topic)
        try:
            printed = self.run(command, timeout=timeout)
            return dict(json.loads(printed.strip().rpartition("\n")[2]))
        except NoAnswerError as why:
            return {"error": f"the process that tried it {why}", "is_late": True}
        except CommandError as why:
            return {"error": f"the process that tried it {why}"}
        except (TypeError, ValueError):
            return {"error": "the process that tried it gave an answer that is not a JSON object"}

    def ask_all(
        self,
        topics: Mapping[Topic, float],
        progress: Callable[[int], object] = lambda num_new: None,
    ) -> dict[Topic, Facts]:
        """Return the facts of each topic, asked at once, and tell ``progress`` of each answer.

        ``topics`` has the timeout in seconds of each.
        """
        with ThreadPoolExecutor(len(topics)) as pool:
            asked = {
                pool.submit(self.ask, *topic, timeout=timeout): topic
                for topic, timeout in topics.items()
            }
            found = {}
            for answer in as_completed(asked):
                found[asked[answer]] = answer.result()
                progress(1)
        return found


def backend_facts(name: str) -> Facts:
    """Try a backend. There are no facts if it computes correctly."""
    from mie.lab.trial import try_operators
    from mie.load.backends import load_backend  # imports NumPy, which may be broken

    try_operators(load_backend(name))
    return {}


def package_facts() -> Facts:
    """Import the modules of all public names of mie. There are no facts if that works."""
    import mie.frontend.async_llm
    import mie.frontend.llm  # noqa: F401

    return {}


def jit_facts() -> Facts:
    """Return the facts of `mie.ops_jit.environment.jit_facts`. It imports NumPy."""
    from mie.ops_jit import environment

    return environment.jit_facts()


TOPICS: Mapping[str, Callable[..., Facts]] = {
    "numpy": numpy_facts,
    "products": products_facts,
    "jit": jit_facts,
    "driver": driver_facts,
    "cupy": cupy_facts,
    "backend": backend_facts,
    "package": package_facts,
}


def find_facts(topic: str, *arguments: str) -> Facts:
    """Return the facts of one topic, or the fact "error"."""
    try:
        return TOPICS[topic](*arguments)
    except Exception as error:
        kind = "" if isinstance(error, MieError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{one_line(error)}"}


def main(arguments: Sequence[str]) -> None:
    """Print the facts of one topic, apart from the output of libraries."""
    output = os.dup(1)
    os.dup2(2, 1)
    os.write(output, json.dumps(find_facts(*arguments)).encode() + b"\n")


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
        self.l4t_release = machine.read("/etc/nv_tegra_release")
        self.board = (machine.read("/proc/device-tree/model") or "").strip("\0\n ")
        is_tegra = bool(re.search("jetson|tegra", self.board, re.IGNORECASE))
        self.is_jetson = is_tegra or self.l4t_release is not None
        cuda = 13 if self.driver_cuda >= 13 else 12
        of_jetpack = f"pip install cupy-cuda{cuda}x"  # JetPack has the toolkit
        self.install_cupy = of_jetpack if self.is_jetson else install_command(f"cuda{cuda}")
        """The command that installs the CuPy that fits the driver."""
        driver = machine.read("/proc/driver/nvidia/version") or ""
        module = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", driver)
        self.kernel_module = module and module[1]
        on_pci = any(map(_NVIDIA_DISPLAY.search, machine.read_all("/sys/bus/pci/devices/*/uevent")))
        self.has_gpu = bool(self.gpus or self.kernel_module or self.is_jetson or on_pci)
        """Whether there is an NVIDIA GPU, even if it cannot be used."""


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers that ``text`` begins with: (14, 2, 0) for "14.2.0rc1"."""
    return tuple(int(number) for number in re.split(r"[^\d.]", text)[0].split(".") if number)
