"""Quantise a checkpoint while it is read."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.weights import Checkpoint
from mie.ops.weights.quantised import Form, QuantisedRows, Rows, dequantise, quantise


class RoundedCheckpoint(Checkpoint):
    """A checkpoint that rounds some matrices of floats to forms as they are read."""

    def __init__(self, source: Checkpoint, forms: Mapping[str, Form]) -> None:
        """Round the matrices in ``forms`` that are not quantised in ``source``."""
        super().__init__(source._entries, source.ignored)
        self.nbytes = source.nbytes
        self.forms = {**source.forms, **forms}
        self._source, self._rounded = source, dict(forms)

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor, in float32 if it is quantised."""
        blocks = self.blocks(name)
        return np.concatenate(
            [dequantise(rows) if isinstance(rows, QuantisedRows) else rows for rows in blocks]
        )

    def blocks(self, name: str, max_bytes: int = 4 << 20) -> Iterator[Rows]:
        """Yield blocks of rows of at most ``max_bytes`` in the file, rounded to their form."""
        form = self._rounded.get(name)
        for block in self._source.blocks(name, max_bytes):
            if form is None or isinstance(block, QuantisedRows):
                yield block
            else:
                yield quantise(block, form)

    def are_copies(self, name: str, other: str) -> bool:
        """Return whether two tensors are equal in the files."""
        return self._source.are_copies(name, other)

    def release(self, name: str) -> None:
        """Drop the pages of the tensor."""
        self._source.release(name)

    def close(self) -> None:
        """Close the files."""
        self._source.close()
