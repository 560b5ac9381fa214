"""Examine a machine: run all checks, try backends, and compile the kernels of backend jit."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mie.cli.diagnosis.cpu import CPU_CHECKS
from mie.cli.diagnosis.gpu import GPU_CHECKS, JETSON_CHECKS
from mie.cli.diagnosis.machine import Machine
from mie.cli.diagnosis.survey import Check, Survey
from mie.system.cache_dir import CacheError, open_cache

if TYPE_CHECKING:
    from mie.ops.backend import Progress  # imports NumPy, which may be broken

BACKENDS = ("numpy", "jit", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, from those that every machine can run to those that few can.

numpy-plain is left out, because it runs on the same machines as numpy.
"""


def examine(
    machine: Machine, backends: Sequence[str], progress: Progress
) -> tuple[list[Check], dict[str, str | None]]:
    """Return the results in the order of the tables of checks, and of each backend's trial.

    A trial's result is the reason why the backend does not work, or None.
    """
    trials = {name: ("backend", name) for name in backends}
    topics = [*Survey.topics, *trials.values()]
    with progress(len(topics)) as count:
        facts = machine.ask_all(topics, count)
    survey = Survey(machine, facts)
    checks = {**CPU_CHECKS, **GPU_CHECKS, **(JETSON_CHECKS if survey.is_jetson else {})}
    results = [Check(name, *found) for name, check in checks.items() for found in check(survey)]
    return results, {name: facts[topic].get("error") for name, topic in trials.items()}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of a compilation, and its folder."""

    num_compiled: int
    num_present: int
    """Kernels that had been compiled before."""
    seconds: float
    folder: str
    """Where they are kept, or why they are not."""
    is_kept: bool

    def __str__(self) -> str:
        before = f"; {self.num_present} had been before" if self.num_present else ""
        return (
            f"compiled {self.num_compiled} kernels in {self.seconds:.1f} s{before}; "
            f"they are {'kept in' if self.is_kept else 'not kept:'} {self.folder}"
        )


def compile_kernels(
    progress: Progress,
    weight_dtypes: Collection[str] | None = None,
    cache_dtypes: Collection[str] | None = None,
) -> Compiled:
    """Compile the kernels for these dtypes of weights and KV caches, by default for all.

    Raises:
        ConfigError: backend jit cannot run here.
    """
    from mie.ops_jit.kernel_cache import CACHE_DTYPES, WEIGHT_DTYPES, Kernels, kernel_names

    began = time.perf_counter()
    names = kernel_names(weight_dtypes or WEIGHT_DTYPES, cache_dtypes or CACHE_DTYPES)
    kernels = Kernels()
    num_compiled = kernels.prepare(names, progress)
    seconds = time.perf_counter() - began
    is_kept = kernels.num_kept(names) == len(names)
    try:
        folder = str(open_cache("jit"))
        folder = folder if is_kept else f"{folder} cannot be written"
    except CacheError as error:
        folder = str(error)
    return Compiled(
        num_compiled=num_compiled,
        num_present=len(names) - num_compiled,
        seconds=seconds,
        folder=folder,
        is_kept=is_kept,
    )


def compile_for_gpu(model: str) -> Compiled:
    """Compile the kernels of a model for this machine's GPU, by loading it.

    Raises:
        ConfigError: backend cupy cannot run here.
        ModelError: the model cannot be used.
    """
    from mie.llm import LLM

    try:
        folder, is_kept = open_cache("cubins"), True
    except CacheError as error:
        folder, is_kept = Path(str(error)), False
    began, num_before = time.perf_counter(), len(list(folder.glob("*.cubin")))
    LLM(model, backend="cupy")
    return Compiled(
        num_compiled=len(list(folder.glob("*.cubin"))) - num_before,
        num_present=num_before,
        seconds=time.perf_counter() - began,
        folder=str(folder),
        is_kept=is_kept,
    )
