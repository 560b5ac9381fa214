"""Check how the `jit` backend keeps programs, their buffers, and the memory of a step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from step_batches import step_batch

from mie.ops.backend import StepBatch
from mie.ops_jit import program as program_module
from mie.ops_jit.jit_backend import JitBackend
from mie.ops_jit.layout import NUM_TOKENS, PARTIALS
from mie.ops_jit.program import Program
from mie.ops_jit.recorder import SEGMENT
from mie.ops_jit.step import StepHeader


def batch_of(num_tokens: int) -> StepBatch:
    """Return a prompt, which no operator with a cache reads."""
    return replace(
        step_batch([(num_tokens, num_tokens)], block_size=num_tokens, num_blocks=1),
        token_ids=np.arange(num_tokens) % 5,
        logits_rows=np.arange(num_tokens),
    )


class Model:
    """More products than a segment has instructions."""

    def __init__(self, backend: JitBackend) -> None:
        rng, self.backend = np.random.default_rng(0), backend
        self.table = backend.load_embedding((5, 24), [rng.normal(size=(5, 24))])
        self.weight = backend.load_linear((24, 24), [rng.normal(size=(24, 24)) / 5])
        self.calls = 0

    def forward(self, batch: StepBatch) -> Any:
        self.calls += 1
        x = self.backend.embed(batch.token_ids, self.table)
        for _ in range(2 * SEGMENT):
            x = self.backend.linear(x, self.weight, residual=x)
        return x

    def step(self, batch: StepBatch) -> np.ndarray:
        return np.array(self.backend.run_step(self.forward, batch))


def test_a_function_that_lives_from_step_to_step_is_recorded_once() -> None:
    model = Model(JitBackend(num_threads=1))
    expected = [model.forward(batch_of(number)) for number in (3, 100, 1)]
    model.calls = 0
    kept = lambda batch: model.forward(batch)  # noqa: E731  # not a method
    for forward in (model.forward, kept):
        for number, wanted in zip((3, 100, 1), expected, strict=True):
            got = model.backend.run_step(forward, batch_of(number))
            np.testing.assert_array_equal(got, wanted)
    assert model.calls == 2


def test_a_step_that_was_interrupted_between_its_segments_can_be_run_again(monkeypatch) -> None:
    model, batch = Model(JitBackend(num_threads=2)), batch_of(100)
    expected = model.step(batch)
    real, calls = model.backend.recorder.team.run, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(model.backend.recorder.team, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.step(batch)
    np.testing.assert_array_equal(model.step(batch), expected)
    assert len(calls) >= 4


def test_the_partial_results_of_more_sequences_get_more_memory() -> None:
    header = StepHeader()
    for number in (1, 2, 9):
        batch = step_batch([(1, 1100)] * number, block_size=12, num_blocks=92 * number)
        header.set_batch(batch, 6, 2, 12)
        assert header.words[PARTIALS] == header._partials.ctypes.data
        # Three parts, each with a state of 16 numbers and a padded head.
        assert header._partials.size >= number * 3 * 6 * (16 + 16)


def recorded() -> Program:
    program = Program(lambda name: 1, 1, 1)
    first, second = program.value(NUM_TOKENS, 8), program.value(NUM_TOKENS, 8)
    program.emit("kernel", NUM_TOKENS, 8, 1, first)
    program.emit("kernel", NUM_TOKENS, 8, 1, first, second)
    third = program.value(NUM_TOKENS, 8)
    program.emit("kernel", NUM_TOKENS, 8, 1, second, third)
    program.finish(third)
    return program


def test_a_buffer_is_used_again_after_the_last_instruction_that_reads_it() -> None:
    program = recorded()
    program.bind()
    first, second, third = program.words[0, 4], program.words[1, 5], program.words[2, 5]
    assert third == first
    assert second not in (first, 0)


def test_results_of_another_width_do_not_share_a_buffer() -> None:
    program = Program(lambda name: 1, 1, 1)
    for width in (8, 16):
        program.emit("kernel", NUM_TOKENS, 8, 1, program.value(NUM_TOKENS, width))
    program.finish()
    program.bind()
    assert program.words[0, 4] != program.words[1, 4]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_memory_that_could_not_be_provided_is_provided_by_the_next_step(error, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise error

    program = recorded()
    program.bind()
    with monkeypatch.context() as patch:
        patch.setattr(program_module, "zeros", refuse)
        program.lengths[NUM_TOKENS] = 1000
        with pytest.raises(error):
            program.bind()
    program.lengths[NUM_TOKENS] = 1
    program.bind()
    assert [len(each) >= 1 for each in program._memory] == [True, True]
    addresses = {each.ctypes.data for each in program._memory}
    assert {program.words[0, 4], program.words[1, 5]} == addresses
