"""Cut work into parts of similar size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def shares(start: int, stop: int, number: int) -> Iterator[slice]:
    """Yield at most ``number`` slices of start … stop - 1 of nearly equal length."""
    number = min(number, stop - start)
    bounds = (start + (stop - start) * i // number for i in range(number + 1))
    yield from (slice(first, last) for first, last in pairwise(bounds))


def batches_of(sizes: Sequence[int], number: int) -> list[int]:
    """Return the starts of at most ``number`` batches of similar padded size.

    ``sizes`` descend. The padded size of a batch is the number of sequences times the first size.
    """
    most = sum(sizes) // number
    while True:
        starts, at = [], 0
        while at < len(sizes):
            starts.append(at)
            at += max(1, most // sizes[at])
        if len(starts) <= number:
            return starts
        most += most // 16 + 1
