"""Record a forward pass as a program, and run programs on the threads of a team."""

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_jit.kernel_cache import Kernels
from mie.ops_jit.layout import SUMS_BYTES, WIDE_BYTES
from mie.ops_jit.program import Program, Value
from mie.ops_jit.step import StepHeader
from mie.ops_jit.team import Team

Forward = Callable[[StepBatch], Any]
SEGMENT = 16
"""Instructions of a large step between two moments in which an interrupt can arrive."""
LARGE_STEP = 64
"""Tokens from which a step is large."""
SCRATCH_BYTES = 2 * SUMS_BYTES + WIDE_BYTES
"""Memory of a thread at first, which is enough for products."""


class Recorder:
    """Records the operators of a step, and replays them in later steps.

    Outside a step, an operator is recorded as a program of its own and runs at once.
    """

    def __init__(self, num_threads: int, *, enforce_eager: bool) -> None:
        """Start the threads. With ``enforce_eager`` each operator runs at once in steps, too."""
        self.kernels = Kernels()
        self.header = StepHeader()
        """The words that describe the step to the kernels."""
        self.more_kernels: tuple[str, ...] = ()
        """The names of kernels that not every model needs."""
        self.enforce_eager = enforce_eager
        self.recording: Program | None = None
        self.recorded: tuple[Callable[[], Any], tuple[Program, Value]] | None = None
        self.team = Team(self.kernels, num_threads, SCRATCH_BYTES)

    @property
    def program(self) -> Program:
        """The program that is being recorded."""
        assert self.recording is not None
        return self.recording

    def multipliers(self, kind: str) -> tuple[int, int]:
        """Return the kernels that multiply by panels of a kind, and by panels of float32."""
        return self.kernels[f"multiply{kind}"], self.kernels["multiply[float32]"]

    def run_now(
        self, append: Callable[..., Value | None], owner: Any, x: Any, *others: Any, **options: Any
    ) -> Floats | None:
        """Run an operator outside a recording, as a program of its own.

        A batch is then that of a group, whose tables are the only ones.
        """
        others = tuple(
            replace(each, group=0) if isinstance(each, StepBatch) else each for each in others
        )
        program = Program(self.kernels.__getitem__, len(x), len(x))
        first = program.given(x) if x.dtype.kind == "f" else x
        result = self._record(program, append, owner, first, *others, **options)
        for each in others:
            if isinstance(each, StepBatch):
                self.header.set_batch(each, *program.heads)
        self._run(program, len(program))
        return None if result is None else program.array(result)

    def run_step(self, forward: Forward, batch: StepBatch) -> Floats:
        """Return the logits [R, V] of a step. The first step is recorded, and later ones replay."""
        batch = batch.with_tokens()
        if self.enforce_eager:
            self.header.set_adapters(batch)  # products come before the first operator with a batch
            logits: Floats = forward(batch)
            return logits
        program, result = self._program_of(forward, batch)
        program.set_step(len(batch.token_ids), len(batch.logits_rows))
        self.header.set_batch(batch, *program.heads)
        self._run(program, len(program) if len(batch.token_ids) < LARGE_STEP else SEGMENT)
        return program.array(result)

    def _run(self, program: Program, segment: int) -> None:
        """Run a program with the lengths that it has now."""
        program.bind()
        self.header.words[[*program.lengths]] = [*program.lengths.values()]
        team, begin = self.team_for(program), 0
        for stop in (*program.calls, len(program)):
            for first in range(begin, stop, segment):
                team.run(program.words, self.header.words, first, min(first + segment, stop))
            if stop in program.calls:
                program.run_call(stop)
            begin = stop + 1

    def team_for(self, program: Program) -> Team:
        """Return a team whose threads have enough memory for a program."""
        if program.scratch_bytes > self.team.scratch_bytes:
            self.team = Team(self.kernels, self.team.num_threads, program.scratch_bytes)
        return self.team

    def _program_of(self, forward: Forward, batch: StepBatch) -> tuple[Program, Value]:
        """Return the program of the last step, or a new one if that step ran another function."""
        if self.recorded is None or self.recorded[0]() != forward:
            program = Program(
                self.kernels.__getitem__, len(batch.token_ids), len(batch.logits_rows)
            )
            recorded = program, self._record(program, forward, batch)
            # The function refers to a model, which may be deleted before the backend.
            refer = weakref.WeakMethod if hasattr(forward, "__self__") else weakref.ref
            self.recorded = refer(forward), recorded
        return self.recorded[1]

    def _record(
        self, program: Program, run: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Record the operators of a function as a program, and return the function's result."""
        self.recording = program
        try:
            result = run(*arguments, **options)
        finally:
            self.recording = None
        program.finish(result)
        return result


def operator(append: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method append to the program that its recorder records, or run at once."""

    @functools.wraps(append)
    def operator(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.recorder.recording is not None:
            return append(self, *arguments, **options)
        return self.recorder.run_now(append, self, *arguments, **options)

    return operator
