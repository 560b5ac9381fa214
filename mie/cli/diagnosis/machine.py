"""Give the checks access to the machine: its files, commands and libraries.

A library may be missing, broken or slow. `Machine.ask` therefore gets its facts from another
process, which runs `main` and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mie.errors import MieError
from mie.ops_cpu.environment import numpy_facts, products_facts
from mie.ops_gpu.environment import cupy_facts, driver_facts, one_line
from mie.system.commands import CommandError, run_command
from mie.system.resources import read_text, usable_cpus

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

    def ask(self, *topic: str) -> Facts:
        """Return the facts of ``topic``, which `find_facts` finds in a separate process.

        If it crashes, hangs or prints something else, the only fact is an "error" that says so.
        """
        # Warnings are not facts, even if the user has turned them into errors.
        command = (sys.executable, "-W", "ignore", "-c", _ASK, "\n".join(sys.path), *topic)
        try:
            printed = self.run(command, timeout=ASK_SECONDS)
            return dict(json.loads(printed.strip().rpartition("\n")[2]))
        except CommandError as why:
            return {"error": f"the process that tried it {why}"}
        except (TypeError, ValueError):
            return {"error": "the process that tried it gave an answer that is not a JSON object"}

    def ask_all(
        self, topics: Sequence[Topic], progress: Callable[[int], object] = lambda num_new: None
    ) -> dict[Topic, Facts]:
        """Return the facts of each topic, asked at once, and tell ``progress`` of each answer."""
        with ThreadPoolExecutor(max(2, self.num_usable_cpus)) as pool:
            asked = {pool.submit(self.ask, *topic): topic for topic in topics}
            found = {}
            for answer in as_completed(asked):
                found[asked[answer]] = answer.result()
                progress(1)
        return found


def backend_facts(name: str) -> Facts:
    """Try a backend. There are no facts if it computes correctly."""
    from mie.load.backends import load_backend  # imports NumPy, which may be broken
    from mie.ops.trial import try_operators

    try_operators(load_backend(name))
    return {}


def jit_facts() -> Facts:
    """Return the facts of `mie.ops_jit.environment.jit_facts`, which imports NumPy."""
    from mie.ops_jit import environment

    return environment.jit_facts()


TOPICS: Mapping[str, Callable[..., Facts]] = {
    "numpy": numpy_facts,
    "products": products_facts,
    "jit": jit_facts,
    "driver": driver_facts,
    "cupy": cupy_facts,
    "backend": backend_facts,
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
