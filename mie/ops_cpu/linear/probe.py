"""Find the faster plan for matrices of a given shape on this machine."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.linear.plain import PlainMatrix, PlainPlan
from mie.ops_cpu.linear.plan_answers import PlanAnswers
from mie.ops_cpu.linear.tiled import WIDTH, TiledMatrix, TiledPlan
from mie.ops_cpu.threads.blas import Blas

ROWS = (4, 16, 64)
"""The row counts that are tried.

One row is left out. Either plan then takes as long as its weights take to arrive from memory, but
in the trial they are already in the CPU cache.
"""
REPEATS = 2
"""Number of runs, of which the fastest counts, because other programs only make runs slower.

The plans alternate, so that both meet the same load.
"""
ROUNDS = 3
"""Number of rounds that must agree, by the margin, before an answer is remembered."""
MARGIN = 1.1
"""Factor by which a ratio must differ from TOLERATED to be clear."""
MOST_WEIGHTS = 1 << 21
"""Maximum number of elements of a trial matrix. A larger matrix is tried with fewer columns."""
PLANS = 3
"""Version of the plans. A change makes the remembered answers invalid."""
TOLERATED = 1.05
"""How much slower `tiled` may be and still be chosen, because its rows are batch-invariant."""


class Probe:
    """Tries both plans for each shape and remembers the answer in the user's cache.

    The cache is a convenience. Without it, or where it is not writable, the shapes of a model are
    tried at every load.
    """

    def __init__(self, plain: PlainPlan, tiled: TiledPlan, answers: PlanAnswers) -> None:
        self._plain = plain
        self._tiled = tiled
        self.answers = answers
        self._chosen: dict[str, str] = {}

    def choose(self, num_inputs: int, num_outputs: int) -> str:
        """Return the name of the faster plan for a matrix [K, N].

        If the rounds disagree or the plans are nearly equal, return the last answer, or tiled, for
        this process only. So another program that keeps the machine busy has no lasting effect.
        """
        shape = f"{self._tiled.dtype} {num_inputs}x{num_outputs}"
        if shape not in self._chosen:
            self._chosen[shape] = self._choose(shape, num_inputs, num_outputs)
        return self._chosen[shape]

    def _choose(self, shape: str, num_inputs: int, num_outputs: int) -> str:
        names, today = (self._plain.name, self._tiled.name), _today()
        known = self.answers.get(shape)
        if known is not None and known.plan not in names:
            known = None
        if known is not None and not known.is_old(today):
            return known.plan
        ratios = [self._ratio(num_inputs, num_outputs) for _ in range(ROUNDS)]
        if max(ratios) <= TOLERATED / MARGIN or min(ratios) >= TOLERATED * MARGIN:
            name = self._tiled.name if max(ratios) <= TOLERATED else self._plain.name
            self.answers.put(shape, name, round(sorted(ratios)[ROUNDS // 2], 3), today)
            return name
        return self._tiled.name if known is None else known.plan

    def _ratio(self, num_inputs: int, num_outputs: int) -> float:
        """Return the time of tiled divided by that of plain, over all numbers of rows."""
        num_tiles = max(1, min(num_outputs, MOST_WEIGHTS // num_inputs) // WIDTH)
        # All elements are equal, so one array is the matrix in either layout.
        tiles = np.full((num_tiles, num_inputs, WIDTH), 0.5, self._tiled.dtype)
        weight = tiles.reshape(num_inputs, -1)
        plain = PlainMatrix(self._plain, weight, None)
        tiled = TiledMatrix(self._tiled, tiles, weight.shape[1], None)
        log_ratio = 0.0
        for num_rows in ROWS:
            x = np.ones((num_rows, num_inputs), self._tiled.dtype)
            plain_seconds, tiled_seconds = _fastest((plain.apply, tiled.apply), x)
            log_ratio += math.log(tiled_seconds / plain_seconds)
        return math.exp(log_ratio / len(ROWS))


def _today() -> date:
    return date.today()


def _fastest(applies: Sequence[Callable[[Floats, None], object]], x: Floats) -> list[float]:
    """Return the fastest time of each, in seconds."""
    times: list[list[float]] = [[] for _ in applies]
    for _ in range(1 + REPEATS):  # the first one warms up
        for apply, each in zip(applies, times, strict=True):
            begin = time.perf_counter()
            apply(x, None)
            each.append(time.perf_counter() - begin)
    return [min(each[1:]) for each in times]


def machine_key(blas: Blas, num_threads: int) -> str:
    """Return what the speed of the plans depends on: CPU, BLAS, its kernels, and threads."""
    parts = (_cpu_model(), blas.core, blas.version, f"numpy {np.__version__}")
    return f"{', '.join(parts)}, {num_threads} threads, plans {PLANS}"


def _cpu_model() -> str:
    with suppress(OSError):
        found = re.search(r"model name\s*: *(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()
