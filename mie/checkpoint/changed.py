"""Change tensors of a checkpoint while they are read: keep some rows, or round them to a form."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.weights import Checkpoint
from mie.ops.weights.quantised import Form, QuantisedRows, Rows, dequantise, quantise

Change = Callable[[Iterable[Rows]], Iterator[Rows]]
"""A function from the blocks of a tensor, in order, to the blocks of the changed tensor."""


class ChangedCheckpoint(Checkpoint):
    """A checkpoint that changes some tensors of another checkpoint as they are read."""

    def __init__(self, source: Checkpoint, changes: Mapping[str, Change]) -> None:
        """Use `sliced` or `rounded`, which also set the shapes or the forms of these tensors."""
        super().__init__(source._entries, source.ignored)
        self._source, self._changes = source, dict(changes)
        self.nbytes, self.norms_hold_one = source.nbytes, source.norms_hold_one
        self.shapes, self.forms = dict(source.shapes), dict(source.forms)

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor. A changed tensor is a copy, in float32 if it is quantised."""
        if name not in self._changes:
            return self._source.read(name)
        blocks = self.blocks(name)
        return np.concatenate(
            [dequantise(rows) if isinstance(rows, QuantisedRows) else rows for rows in blocks]
        )

    def blocks(self, name: str, max_bytes: int = 4 << 20) -> Iterator[Rows]:
        """Yield blocks of rows that take at most ``max_bytes`` in the file."""
        blocks, change = self._source.blocks(name, max_bytes), self._changes.get(name)
        return blocks if change is None else change(blocks)

    def are_copies(self, name: str, other: str) -> bool:
        """Return whether two tensors are equal in the files."""
        return self._source.are_copies(name, other)

    def release(self, name: str) -> None:
        """Drop the pages of the tensor."""
        self._source.release(name)

    def close(self) -> None:
        """Close the files."""
        self._source.close()


def sliced(source: Checkpoint, rows: Mapping[str, Sequence[range]]) -> Checkpoint:
    """Return a checkpoint with some rows of the tensors in ``rows``, and all rows of the others.

    The ranges of a tensor rise. Names that ``source`` lacks have no effect.
    """

    def taken(ranges: Sequence[range]) -> Change:
        def change(blocks: Iterable[Rows]) -> Iterator[Rows]:
            begin = 0
            for block in blocks:
                end = begin + len(block)
                for each in ranges:
                    first, last = max(each.start, begin) - begin, min(each.stop, end) - begin
                    if first < last:
                        own = slice(first, last)
                        yield block.take(own) if isinstance(block, QuantisedRows) else block[own]
                begin = end

        return change

    own = {name: ranges for name, ranges in rows.items() if name in source.shapes}
    changed = ChangedCheckpoint(source, {name: taken(ranges) for name, ranges in own.items()})
    for name, ranges in own.items():
        changed.shapes[name] = (sum(map(len, ranges)), *source.shapes[name][1:])
    return changed


def rounded(source: Checkpoint, forms: Mapping[str, Form]) -> Checkpoint:
    """Return a checkpoint with matrices in ``forms``. Those quantised in ``source`` stay so."""

    def in_form(form: Form) -> Change:
        def change(blocks: Iterable[Rows]) -> Iterator[Rows]:
            for block in blocks:
                yield block if isinstance(block, QuantisedRows) else quantise(block, form)

        return change

    changed = ChangedCheckpoint(source, {name: in_form(form) for name, form in forms.items()})
    changed.forms = {**source.forms, **forms}
    return changed
