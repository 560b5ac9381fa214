"""Read quantised checkpoints in safetensors, matrix by matrix, as rows of a form."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.entries import TensorEntry
from mie.checkpoint.layouts import Layout, Tensor, layout_of
from mie.checkpoint.quantisation import scheme_of
from mie.checkpoint.tensors import Shape
from mie.checkpoint.weights import Checkpoint, check_names, check_tensor
from mie.errors import ModelError, WeightsError, shown
from mie.model.layers.config import Quantisation, Scheme
from mie.ops.weights.quantised import QuantisedRows, Rows, dequantise

_SCALES = ("weight_scale", "scales")
_ROWS = 8
"""Blocks begin at a multiple of this row, because zero points of neighbours share an int32."""
_TURNED_BYTES = 16 << 20
"""Codes of a block if its rows are columns in the file. Each block reads the whole tensor."""


class QuantisedCheckpoint(Checkpoint):
    """A checkpoint of plain and quantised matrices. All their names end in ".weight"."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        ignored: Iterable[str],
        layouts: Mapping[str, Layout],
        stored: Mapping[str, Mapping[str, TensorEntry]],
    ) -> None:
        """Use `Checkpoint.open`. ``stored`` has the tensors of each quantised matrix."""
        self._layouts, self._stored = dict(layouts), dict(stored)
        self.forms = {name: layout.form for name, layout in layouts.items()}
        super().__init__(entries, ignored)
        self.nbytes -= sum(entries[name].nbytes for name in layouts)
        self.nbytes += sum(each.nbytes for parts in stored.values() for each in parts.values())

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor, in float32 if it is quantised."""
        if name not in self._layouts:
            return super().read(name)
        blocks = (dequantise(rows) for rows in self._quantised_blocks(name, _TURNED_BYTES))
        return np.concatenate(list(blocks))

    def blocks(self, name: str, max_bytes: int = _TURNED_BYTES) -> Iterator[Rows]:
        """Yield blocks of rows, quantised if the matrix is."""
        if name in self._layouts:
            return self._quantised_blocks(name, max_bytes)
        return super().blocks(name, max_bytes)

    def _quantised_blocks(self, name: str, max_bytes: int) -> Iterator[QuantisedRows]:
        layout, stored = self._layouts[name], self._stored[name]

        def read(end: str) -> NDArray[Any]:
            return self._view(stored[end])

        with _about(self._entries[name].path, name):
            problem = layout.problem(read)
            if problem is not None:
                raise problem
        num_rows, num_columns = layout.shape
        size = max_bytes if layout.by_rows else max(max_bytes, _TURNED_BYTES)
        step = max(_ROWS, size // num_columns // _ROWS * _ROWS)
        for first in range(0, num_rows, step):
            try:
                yield layout.rows(read, first, min(first + step, num_rows))
            finally:  # also if the caller takes no further block
                for entry in stored.values():
                    self._drop(entry)

    def release(self, name: str) -> None:
        """Drop the pages of the tensor. `blocks` drops the pages of a quantised matrix."""
        if name not in self._layouts:
            super().release(name)


def open_quantised(
    directory: Path,
    found: Mapping[str, TensorEntry],
    ignored: Iterable[str],
    expected: Mapping[str, Shape],
    quantisation: Quantisation,
) -> QuantisedCheckpoint:
    """Return the checkpoint with the tensors ``found``. They are checked. No data is read.

    Raises:
        WeightsError: a tensor is missing or unexpected, or has another type or shape.
        UnsupportedModelError: a matrix has no exact form.
    """
    layouts: dict[str, Layout] = {}
    stored: dict[str, dict[str, TensorEntry]] = {}
    entries, left = {}, found.keys() - set(ignored)
    for name, shape in expected.items():
        module = name.removesuffix(".weight")
        layout = _layout(directory, name, shape, found, quantisation)
        if layout is None:
            if name in found:
                check_tensor(name, found[name], shape)
                entries[name] = found[name]
            continue
        for end, tensor in layout.tensors().items():
            _check(directory, f"{module}.{end}", found, tensor)
        with _about(directory, name):
            _ = layout.form
        layouts[name] = layout
        stored[name] = {end: found[f"{module}.{end}"] for end in layout.tensors()}
        [first, *_] = stored[name].values()
        entries[name] = replace(first, dtype=layout.scheme.format, shape=shape)
        left -= {f"{module}.{end}" for end in (*layout.tensors(), *layout.optional())}
    check_names(directory, (left - expected.keys()) | entries.keys(), expected)
    ignored = [name for name in ignored if name in found]
    entries |= {name: found[name] for name in ignored}
    return QuantisedCheckpoint(entries, ignored, layouts, stored)


def _layout(
    directory: Path,
    name: str,
    shape: Shape,
    found: Mapping[str, TensorEntry],
    quantisation: Quantisation,
) -> Layout | None:
    """Return how the files hold a matrix, or None if it is not quantised."""
    module = name.removesuffix(".weight")
    scheme = _scheme(module, shape, found, quantisation)
    if scheme is None:
        return None
    scales = [f"{module}.{end}" for end in _SCALES if f"{module}.{end}" in found]
    if not scales:
        raise WeightsError(
            f"{directory}: {name!r} is quantised ({scheme.format}) in config.json, but its scales "
            f"({' or '.join(_SCALES)}) are missing"
        )
    rows, columns = shape
    return layout_of((rows, columns), scheme, found[scales[0]].dtype)


def _scheme(
    module: str, shape: Shape, found: Mapping[str, TensorEntry], quantisation: Quantisation
) -> Scheme | None:
    """Return the scheme of a tensor, or None if it is not quantised.

    Files of GPTQ, AWQ and MXFP4 do not list the matrices that are left as they are, or need not.
    """
    if len(shape) != 2:
        return None
    codes = "blocks" if quantisation.method == "mxfp4" else "qweight"
    if quantisation.method != "compressed-tensors" and f"{module}.{codes}" not in found:
        return None
    return scheme_of(quantisation, module)


def _check(directory: Path, name: str, found: Mapping[str, TensorEntry], tensor: Tensor) -> None:
    entry = found.get(name)
    if entry is None:
        raise WeightsError(
            f"{directory}: tensor {name!r} is missing, which config.json's quantization_config "
            "asks for"
        )
    if entry.dtype not in tensor.dtypes:
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has dtype {entry.dtype}; quantization_config asks for "
            f"{' or '.join(tensor.dtypes)}"
        )
    if entry.shape not in tensor.shapes:
        wanted = " or ".join(str(list(shape)) for shape in tensor.shapes)
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has shape {shown(list(entry.shape))}; config.json asks "
            f"for {wanted}"
        )


@contextmanager
def _about(path: Path, name: str) -> Iterator[None]:
    """Begin the message of an error with the file and the matrix."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{path}: matrix {name!r}: {error}") from error
