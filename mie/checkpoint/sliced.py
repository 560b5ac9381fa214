"""Read some rows of each tensor of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.weights import Checkpoint
from mie.ops.weights.quantised import QuantisedRows, Rows


class SlicedCheckpoint(Checkpoint):
    """A checkpoint with some rows of some tensors, and all rows of the others."""

    def __init__(self, source: Checkpoint, rows: Mapping[str, Sequence[range]]) -> None:
        """Keep ``rows`` of each tensor that they name. The ranges of a tensor rise."""
        super().__init__(source._entries, source.ignored)
        self._source = source
        self._rows = {name: own for name, own in rows.items() if name in source.shapes}
        self.nbytes, self.forms = source.nbytes, source.forms
        self.norms_hold_one = source.norms_hold_one
        for name, own in self._rows.items():
            self.shapes[name] = (sum(map(len, own)), *source.shapes[name][1:])

    def read(self, name: str) -> NDArray[Any]:
        """Return the rows of the tensor, in float32 if it is quantised."""
        tensor, rows = self._source.read(name), self._rows.get(name)
        if rows is None:
            return tensor
        return np.concatenate([tensor[each.start : each.stop] for each in rows])

    def blocks(self, name: str, max_bytes: int = 4 << 20) -> Iterator[Rows]:
        """Yield the rows of a tensor in blocks of at most ``max_bytes`` in the file."""
        rows = self._rows.get(name)
        if rows is None:
            yield from self._source.blocks(name, max_bytes)
            return
        begin = 0
        for block in self._source.blocks(name, max_bytes):
            end = begin + len(block)
            for each in rows:
                first, last = max(each.start, begin) - begin, min(each.stop, end) - begin
                if first < last:
                    own = slice(first, last)
                    yield block.take(own) if isinstance(block, QuantisedRows) else block[own]
            begin = end

    def are_copies(self, name: str, other: str) -> bool:
        """Return whether two tensors are equal in the files."""
        return self._source.are_copies(name, other)

    def release(self, name: str) -> None:
        """Drop the pages of the tensor."""
        self._source.release(name)

    def close(self) -> None:
        """Close the files."""
        self._source.close()
