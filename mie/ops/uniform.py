"""Draw the random numbers of a request, which depend on nothing but the request."""

from __future__ import annotations

import numpy as np


class Uniforms:
    """Numbers in [0, 1) with 53 random bits, one for each choice and position.

    They are Philox (Salmon et al., 2011) keyed by (seed, choice) and counted by (position, stream).
    """

    def __init__(self, seed: int, stream: int) -> None:
        self._seed, self._stream = seed % 2**64, stream
        self._generator: np.random.Philox | None = None
        self._choice = self._next = 0

    def at(self, choice: int, position: int) -> float:
        """Return the number of a choice at a position."""
        if self._generator is None or choice != self._choice or position < self._next:
            self._generator = np.random.Philox(
                key=np.array([self._seed, choice], np.uint64),
                counter=np.array([position, self._stream, 0, 0], np.uint64),
            )
        else:
            # This drops the rest of the last counter's four numbers, and costs a tenth of a new
            # generator.
            self._generator.advance(position - self._next)
        self._choice, self._next = choice, position + 1
        return float(int(self._generator.random_raw()) >> 11) * 2.0**-53
