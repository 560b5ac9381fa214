"""Test the random numbers of requests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mie.ops.uniform import Uniforms

POSITIONS = st.integers(0, 2**40)


def alone(seed: int, stream: int, choice: int, position: int) -> float:
    """Return the number from a generator of its own."""
    key = np.array([seed % 2**64, choice], np.uint64)
    counter = np.array([position, stream, 0, 0], np.uint64)
    return float((int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) / 2**53)


@given(
    seed=st.integers(-(2**70), 2**70),
    stream=st.integers(0, 2**63),
    asked=st.lists(st.tuples(st.integers(0, 2), POSITIONS | st.integers(0, 6)), max_size=30),
)
def test_a_number_does_not_depend_on_what_was_drawn_before(
    seed: int, stream: int, asked: list[tuple[int, int]]
):
    uniforms = Uniforms(seed, stream)
    assert [uniforms.at(*each) for each in asked] == [alone(seed, stream, *each) for each in asked]
