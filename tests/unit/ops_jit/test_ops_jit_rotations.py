"""Test that rotations are computed before a step reads them, and no earlier."""

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from mie import LLM, SamplingParams
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.ops.rope import rope_table
from mie.ops_jit import rotations
from mie.ops_jit.rotations import POSITIONS, Rotations

INV_FREQ = 1 / 100.0 ** np.linspace(0, 1, 8)


@pytest.mark.parametrize("num_positions", [1, POSITIONS - 1, POSITIONS + 1, 3 * POSITIONS + 5])
def test_a_table_has_the_bits_of_the_definition_as_far_as_it_is_filled(num_positions: int) -> None:
    tables = Rotations()
    for scaling in (1.0, np.linspace(1, 2, 8)):
        wanted = rope_table(INV_FREQ, scaling, num_positions, np.float32)
        table = tables.new_table(INV_FREQ, scaling, num_positions)
        for needed in (1, POSITIONS, POSITIONS + 1, num_positions):
            tables.fill(min(needed, num_positions))
            assert np.array_equal(table[: tables.num_filled], wanted[: tables.num_filled])
            assert not table[tables.num_filled :].any()
        assert np.array_equal(table, wanted)


def test_no_more_is_computed_than_a_few_more_positions() -> None:
    tables = Rotations()
    table = tables.new_table(INV_FREQ, 1.0, 100 * POSITIONS)
    tables.fill(POSITIONS + 1)
    assert tables.num_filled == 2 * POSITIONS
    assert not table[2 * POSITIONS :].any()


def test_a_table_that_comes_later_has_the_same_positions() -> None:
    tables = Rotations()
    tables.fill(5 * POSITIONS)
    table = tables.new_table(INV_FREQ, 1.0, 6 * POSITIONS)
    wanted = rope_table(INV_FREQ, 1.0, 5 * POSITIONS, np.float32)
    assert np.array_equal(table[: 5 * POSITIONS], wanted)


def answers(model: Path, *, enforce_eager: bool) -> list[tuple[list[int], list[float]]]:
    llm = LLM(
        str(model), backend="jit", max_model_len=128, num_blocks=32, enforce_eager=enforce_eager,
        max_num_batched_tokens=16,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    found = []
    for prompt in ("Mia the fox", "Once upon a time there was an old mill by the river"):
        (output,) = llm.generate([prompt], params)[0].outputs
        assert output.logprobs is not None
        chosen = [
            each[token].logprob
            for each, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        found.append((list(output.token_ids), chosen))
    return found


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_step_has_its_rotations(enforce_eager: bool, monkeypatch) -> None:
    """Also a step that replays a program, and one that runs its operators at once."""
    wanted = answers(BUNDLED_DIRECTORY, enforce_eager=False)
    assert math.isfinite(sum(wanted[0][1]))
    monkeypatch.setattr(rotations, "POSITIONS", 4)
    assert answers(BUNDLED_DIRECTORY, enforce_eager=enforce_eager) == wanted
