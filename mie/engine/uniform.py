"""Draw the random numbers of a request. They depend on nothing but the request."""

import numpy as np

POSITIONS = 64
"""Number of positions with numbers drawn at a time.

A generator costs more than the numbers of 100 positions. A request keeps the numbers of 64
positions.
"""


class Uniforms:
    """Numbers in [0, 1) with 53 random bits, one for each choice and position.

    They are Philox (Salmon et al., 2011) keyed by (seed, choice) and counted by (position, stream).
    """

    def __init__(self, seed: int, stream: int) -> None:
        self._seed, self._stream = seed % 2**64, stream
        self._choice = self._first = 0
        self._numbers: list[float] = []  # of the choice, from the first position on

    def at(self, choice: int, position: int) -> float:
        """Return the number of a choice at a position."""
        index = position - self._first
        if choice != self._choice or not 0 <= index < len(self._numbers):
            self._draw(choice, position)
            index = 0
        return self._numbers[index]

    def _draw(self, choice: int, first: int) -> None:
        generator = np.random.Philox(
            key=np.array([self._seed, choice], np.uint64),
            counter=np.array([first, self._stream, 0, 0], np.uint64),
        )
        # A counter gives four numbers. A position takes the first.
        bits = generator.random_raw(4 * POSITIONS)[::4] >> 11
        self._choice, self._first = choice, first
        self._numbers = (bits * 2.0**-53).tolist()
