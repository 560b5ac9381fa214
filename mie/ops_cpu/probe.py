"""Which plan is the faster one for matrices of a given shape, on this machine."""

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
from mie.ops_cpu.blas import Blas
from mie.ops_cpu.linear_plain import PlainMatrix, PlainPlan
from mie.ops_cpu.linear_tiled import WIDTH, TiledMatrix, TiledPlan
from mie.ops_cpu.plan_answers import PlanAnswers

ROWS = (4, 16, 64)
"""What is tried. One row is not: it takes either plan as long as its weights take to arrive, but
those that are tried are in the cache already."""
REPEATS = 2
"""The fastest of so many counts, for what else runs only makes them slower; the plans take turns,
so that both meet it."""
ROUNDS = 3
"""Of which each must give the same answer, by the margin, for it to be remembered."""
MARGIN = 1.1
"""How far a ratio must be from TOLERATED, as a factor, to be clear."""
MOST_WEIGHTS = 1 << 21
"""Elements of a matrix that are tried: of a larger one as many columns as that."""
PLANS = 3
"""Counts the changes to the plans after which what was remembered does not hold any more."""
TOLERATED = 1.05
"""How much slower `tiled` may be and still be chosen, for its rows are batch-invariant."""


class Probe:
    """Tries both plans for each shape, and remembers the answer in the user's cache.

    The cache is a convenience: without it, or where it cannot be written, the shapes of a model
    are tried at every load.
    """

    def __init__(self, plain: PlainPlan, tiled: TiledPlan, answers: PlanAnswers) -> None:
        self._plain = plain
        self._tiled = tiled
        self.answers = answers
        self._chosen: dict[str, str] = {}

    def choose(self, num_inputs: int, num_outputs: int) -> str:
        """Return the name of the faster plan for a matrix [K, N].

        Where the rounds do not agree, or the plans are nearly equal, that is the last answer, or
        tiled, for this process only. Another program that keeps the machine busy then has no
        lasting effect.
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
        """Return the time of tiled by that of plain, over all numbers of rows."""
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
        return math.exp(log_ratio / len(ROWS))


def _today() -> date:
    return date.today()


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
