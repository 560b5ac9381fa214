"""Take the matrices of experts from tensors that hold those of all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mie.checkpoint.entries import TensorEntry
from mie.checkpoint.tensors import Shape


def unstacked(
    found: Mapping[str, TensorEntry], expected: Mapping[str, Shape]
) -> Mapping[str, TensorEntry]:
    """Return the tensors with the matrix of each expert in place of a stack.

    A stack "x.weight" is [E, N, K]. The matrix of expert 3 is called "x.3.weight".
    """
    entries: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        module = name.removesuffix(".weight")
        if f"{module}.0.weight" in expected and entry.shape:
            matrices = enumerate(_matrices(entry))
            entries |= {f"{module}.{expert}.weight": matrix for expert, matrix in matrices}
        else:
            entries[name] = entry
    return entries


def _matrices(entry: TensorEntry) -> Iterator[TensorEntry]:
    """Yield the parts of a tensor along its first axis."""
    number, *shape = entry.shape
    for start in range(entry.start, entry.stop, max(1, entry.nbytes // max(1, number))):
        stop = start + entry.nbytes // number
        yield replace(entry, shape=tuple(shape), start=start, stop=stop)
