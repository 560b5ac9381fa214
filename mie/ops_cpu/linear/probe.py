"""Find the faster plan and tile width for matrices of a given shape on this machine."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import huge_empty
from mie.ops_cpu.linear.geometry import DEFAULT_WIDTH, KERNEL_ROWS, WIDTHS
from mie.ops_cpu.linear.layout import Layout
from mie.ops_cpu.linear.matrix import Matrix
from mie.ops_cpu.linear.plain import PlainMatrix, PlainPlan
from mie.ops_cpu.linear.plan_answers import PlanAnswers
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan
from mie.ops_cpu.threads.blas import Blas

ROWS = (4, 16, 128)
"""The row counts with which plans are tried: two of decodes, and one of a prompt.

One row is left out. Either plan then takes as long as its weights take to arrive from memory, but
in the trial they are already in the CPU cache.
"""
WIDTH_ROWS = (16, 64)
"""The row counts with which widths are tried."""
REPEATS = 2
"""Number of runs, of which the fastest counts, because other programs only make runs slower.

The candidates alternate, so that both meet the same load.
"""
ROUNDS = 3
"""Number of rounds that must agree, by the margin, before an answer is remembered."""
MOST_WEIGHTS = 1 << 20
"""Maximum number of elements of a trial matrix. A larger matrix is tried with fewer columns."""
MOST_TILE_WEIGHTS = 1 << 18
"""Maximum number of elements of a matrix with which a width is tried. It stays in a core's L2."""
PLANS = 8
"""Version of the plans. A change makes the remembered answers invalid."""
TOLERATED = 1.05
"""How much slower tiles may be and still be chosen, because its rows are batch-invariant."""
PLAN_MARGIN = 1.1
"""Factor by which a ratio must differ from TOLERATED to be clear."""
WORTH_PACKING = 0.96
"""Time, relative to tiles that NumPy multiplies by, below which packed tiles are chosen."""
WORTH_A_WIDTH = 0.96
"""Time, relative to the default width, below which another width is chosen."""
WIDTH_MARGIN = 1.02
"""Factor by which a ratio must differ from WORTH_A_WIDTH to be clear."""

Apply = Callable[[Floats, None], object]


class Found(NamedTuple):
    """What the probe found."""

    choice: str
    ratio: float
    """The time of the second choice divided by that of the first."""


class Question(NamedTuple):
    """A choice between two ways of computing the same."""

    answers: PlanAnswers
    """The answers of earlier processes."""
    subject: str
    """The dtype and the shape: "float32 576x1536"."""
    first: str
    second: str
    limit: float
    """The second is chosen where its time, relative to the first, is at most this."""
    margin: float
    """Factor by which a ratio must differ from the limit to be clear."""
    guess: str | None
    """The choice where neither is clear and no answer is known. None takes what seems better."""

    def answer(self, measure: Callable[[], float]) -> Found:
        """Return the known answer, or the one that rounds of ``measure`` find.

        If the rounds disagree or the ratio is near the limit, return the last answer, or the guess,
        for this process only. So another program that keeps the machine busy has no lasting effect.
        """
        known, today = self.answers.get(self.subject), _today()
        if known is not None and known.plan not in (self.first, self.second):
            known = None
        if known is not None and not known.is_old(today):
            return Found(known.plan, known.ratio)
        ratios = sorted(measure() for _ in range(ROUNDS))
        ratio = round(ratios[ROUNDS // 2], 3)
        choice = self.second if ratio <= self.limit else self.first
        if ratios[-1] <= self.limit / self.margin or ratios[0] >= self.limit * self.margin:
            self.answers.put(self.subject, choice, ratio, today)
        elif known is not None:
            choice = known.plan
        elif self.guess is not None:
            choice = self.guess
        return Found(choice, ratio)


class Probe:
    """Tries both plans, and tiles of several widths, and remembers the answers on disk.

    The cache is a convenience. Without it, or where it is not writable, the shapes of a model are
    tried at every load.
    """

    def __init__(
        self,
        plain: PlainPlan,
        tiled: TiledPlan,
        answers: PlanAnswers,
        layouts: PlanAnswers,
        widths: PlanAnswers,
    ) -> None:
        self._plain = plain
        self._tiled = tiled
        self.answers = answers
        self._layout_answers = layouts
        self._width_answers = widths
        self._plans: dict[tuple[int, int], Found] = {}
        self._layouts: dict[tuple[int, int], str] = {}
        self._widths: dict[int, int] = {}

    def plan(self, num_inputs: int, num_outputs: int) -> Found:
        """Return the name of the fastest plan for a matrix [K, N].

        An invariant one may be a little slower. The ratio is its time divided by that of the
        fastest other one.
        """
        shape = num_inputs, num_outputs
        if shape not in self._plans:
            invariant, other = self.invariant(*shape), self.fastest(*shape)
            question = Question(
                answers=self.answers,
                subject=f"{self._tiled.dtype} {num_inputs}x{num_outputs}",
                first=self._plain.name if other is None else other.name,
                second=invariant.name,
                limit=TOLERATED,
                margin=PLAN_MARGIN,
                guess=invariant.name if other is None else None,
            )
            ratio = partial(self._layout_ratio, *shape, other, invariant)
            self._plans[shape] = question.answer(ratio)
        return self._plans[shape]

    def fastest(self, num_inputs: int, num_outputs: int) -> Layout | None:
        """Return the fastest layout whose rows may depend on each other, or None for plain.

        Plain multiplies with the kernel of the packed layout, and packs for it at every call.
        """
        if not self._tiled.has_packed:
            return None
        return self._tiled.packed(num_inputs, num_outputs, is_invariant=False)

    def invariant(self, num_inputs: int, num_outputs: int) -> Layout:
        """Return the fastest layout for a matrix [K, N] whose rows are batch-invariant."""
        tiles = self._tiled.layouts[self.width(num_inputs)]
        if not self._tiled.has_packed:
            return tiles
        packed = self._tiled.packed(num_inputs, num_outputs, is_invariant=True)
        shape = num_inputs, num_outputs
        if shape not in self._layouts:
            question = Question(
                answers=self._layout_answers,
                subject=f"{self._tiled.dtype} {num_inputs}x{num_outputs}",
                first=tiles.name,
                second=packed.name,
                limit=WORTH_PACKING,
                margin=WIDTH_MARGIN,
                guess=packed.name,  # Tiles lose a factor of two where packed ones are faster.
            )
            found = question.answer(partial(self._layout_ratio, *shape, tiles, packed))
            self._layouts[shape] = found.choice
        return packed if self._layouts[shape] == packed.name else tiles

    def width(self, num_inputs: int) -> int:
        """Return the width of tiles [K, W]: the default, unless another is clearly faster."""
        if num_inputs not in self._widths:
            others = KERNEL_ROWS.keys() - {DEFAULT_WIDTH}
            ratios = {DEFAULT_WIDTH: 1.0}
            for width in others:
                found = self._compare_widths(num_inputs, width)
                if found.choice == str(width):
                    ratios[width] = found.ratio
            self._widths[num_inputs] = min(ratios, key=ratios.__getitem__)
        return self._widths[num_inputs]

    def _compare_widths(self, num_inputs: int, width: int) -> Found:
        if not self._tiled.geometry.is_possible(num_inputs, width):
            return Found(str(DEFAULT_WIDTH), math.inf)
        question = Question(
            answers=self._width_answers,
            subject=f"{self._tiled.dtype} {num_inputs}x{width}",
            first=str(DEFAULT_WIDTH),
            second=str(width),
            limit=WORTH_A_WIDTH,
            margin=WIDTH_MARGIN,
            guess=str(DEFAULT_WIDTH),
        )
        return question.answer(lambda: self._width_ratio(num_inputs, width))

    def _layout_ratio(
        self, num_inputs: int, num_outputs: int, first: Layout | None, second: Layout
    ) -> float:
        """Return the time of the second layout divided by that of the first, or of plain."""
        multiple = math.lcm(*WIDTHS)
        num_columns = min(num_outputs, MOST_WEIGHTS // num_inputs)
        num_columns = max(1, num_columns // multiple) * multiple
        # All elements are equal, so one array is the matrix in any layout.
        weights = self._trial_weights(num_inputs * num_columns)

        def matrix(layout: Layout | None) -> Matrix:
            if layout is None:
                return PlainMatrix(self._plain, weights.reshape(num_inputs, -1), None)
            tiles = weights.reshape(-1, num_inputs, layout.width)
            return TiledMatrix(self._tiled, layout, tiles, num_columns, None)

        applies = [matrix(layout).apply for layout in (first, second)]
        return self._ratio(applies, num_inputs, ROWS)

    def _width_ratio(self, num_inputs: int, width: int) -> float:
        """Return the time of tiles of this width, divided by that of the default width."""
        num_columns = max(1, MOST_TILE_WEIGHTS // num_inputs // DEFAULT_WIDTH) * DEFAULT_WIDTH
        weights = self._trial_weights(num_inputs * num_columns)
        default, other = (
            TiledMatrix(
                self._tiled,
                self._tiled.layouts[each],
                weights.reshape(-1, num_inputs, each),
                num_columns,
                None,
            )
            for each in (DEFAULT_WIDTH, width)
        )
        return self._ratio((default.apply, other.apply), num_inputs, WIDTH_ROWS)

    def _trial_weights(self, size: int) -> Floats:
        """Return equal numbers, in memory like that of weights."""
        dtype = self._tiled.dtype
        weights: Floats = huge_empty(size * dtype.itemsize).view(dtype)[:size]
        weights.fill(0.5)
        return weights

    def _ratio(self, applies: Sequence[Apply], num_inputs: int, rows: Sequence[int]) -> float:
        """Return the time of the second divided by that of the first, on geometric average."""
        log_ratio = 0.0
        for num_rows in rows:
            x = np.ones((num_rows, num_inputs), self._tiled.dtype)
            first_seconds, second_seconds = _fastest(applies, x)
            log_ratio += math.log(second_seconds / first_seconds)
        return math.exp(log_ratio / len(rows))


def _today() -> date:
    return date.today()


def _fastest(applies: Sequence[Apply], x: Floats) -> list[float]:
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
