"""Which plan is the faster one for matrices of a given shape, on this machine."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.blas import Blas
from mie.ops_cpu.linear_plain import PlainMatrix, PlainPlan
from mie.ops_cpu.linear_tiled import WIDTH, TiledMatrix, TiledPlan

ROWS = (4, 16, 64)
"""What is tried. One row is not: it takes either plan as long as its weights take to arrive, but
those that are tried are in the cache already."""
REPEATS = 4
"""The fastest of so many counts, for what else runs only makes them slower; the plans take turns,
so that both meet it."""
MOST_WEIGHTS = 1 << 21
"""Elements of a matrix that are tried: of a larger one as many columns as that."""
PLANS = 2
"""Counts the changes to the plans after which what was remembered does not hold any more."""
TOLERATED = 1.05
"""How much slower `tiled` may be and still be chosen, for its rows are batch-invariant."""


class Probe:
    """Tries both plans once for each shape, and remembers the answer in the user's cache.

    The cache is a convenience: without it, or where it cannot be written, the shapes of a model
    are tried at every load.
    """

    def __init__(self, plain: PlainPlan, tiled: TiledPlan, machine: str, path: Path | None) -> None:
        """``machine`` is what the answers hold for; ``path`` None: nothing is remembered."""
        self._plain = plain
        self._tiled = tiled
        self._machine = machine
        self._path = path
        self._answers: dict[str, str] = {}
        if path is not None:
            self._answers = read_answers(path).get(machine, {})

    def choose(self, num_inputs: int, num_outputs: int) -> str:
        """The name of the faster plan for a matrix [K, N]."""
        key = f"{self._tiled.dtype} {num_inputs}x{num_outputs}"
        if self._answers.get(key) not in (self._plain.name, self._tiled.name):
            self._answers[key] = self._try(num_inputs, num_outputs)
            if self._path is not None:
                write_answers(self._path, self._machine, self._answers)
        return self._answers[key]

    def _try(self, num_inputs: int, num_outputs: int) -> str:
        num_tiles = max(1, min(num_outputs, MOST_WEIGHTS // num_inputs) // WIDTH)
        # All elements are alike, so that one array is the matrix in either layout.
        tiles = np.full((num_tiles, num_inputs, WIDTH), 0.5, self._tiled.dtype)
        weight = tiles.reshape(num_inputs, -1)
        plain = PlainMatrix(self._plain, weight, None)
        tiled = TiledMatrix(self._tiled, tiles, weight.shape[1], None)
        log_ratio = 0.0
        for num_rows in ROWS:
            x = np.ones((num_rows, num_inputs), self._tiled.dtype)
            plain_seconds, tiled_seconds = _fastest((plain.apply, tiled.apply), x)
            log_ratio += math.log(tiled_seconds / plain_seconds)
        return "tiled" if log_ratio / len(ROWS) <= math.log(TOLERATED) else "plain"


def _fastest(applies: Sequence[Callable[[Floats, None], object]], x: Floats) -> list[float]:
    """Seconds of each."""
    times: list[list[float]] = [[] for _ in applies]
    for _ in range(1 + REPEATS):  # the first one warms up
        for apply, each in zip(applies, times, strict=True):
            begin = time.perf_counter()
            apply(x, None)
            each.append(time.perf_counter() - begin)
    return [min(each[1:]) for each in times]


def machine_key(blas: Blas, num_threads: int) -> str:
    """What the speed of the plans depends on: the CPU, the BLAS and its kernels, the threads."""
    parts = (_cpu_model(), blas.core, blas.version, f"numpy {np.__version__}")
    return f"{', '.join(parts)}, {num_threads} threads, plans {PLANS}"


def _cpu_model() -> str:
    with suppress(OSError):
        found = re.search(r"model name\s*: *(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def cache_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where answers are kept, or None for a user without a home."""
    folder = environment.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):
        # A relative path is to be ignored (XDG Base Directory Specification).
        base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
        return base / "mie" / "linear_plans.json"
    return None


def read_answers(path: Path) -> dict[str, dict[str, str]]:
    """By machine, then by shape; empty where the file is missing or not what we wrote."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {machine: dict(each) for machine, each in found.items() if isinstance(each, dict)}


def write_answers(path: Path, machine: str, answers: Mapping[str, str]) -> None:
    """Add to the file, whole or not at all; what another process adds meanwhile may be lost."""
    everything = read_answers(path)
    everything[machine] = {**everything.get(machine, {}), **answers}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(everything, file, indent=1, sort_keys=True)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
