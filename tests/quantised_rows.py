"""Make random quantised matrices, and cut them into blocks."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from mie.ops.quantised import Form, QuantisedRows


def quantised(form: Form, num_rows: int, num_columns: int, seed: int = 0) -> QuantisedRows:
    """Return random codes, all of which occur, with scales and offsets of group size."""
    rng = np.random.default_rng([seed, num_rows, num_columns])
    shape = (num_rows, -(-num_columns // form.group))
    if form.codes == "float8_e4m3fn":
        codes = rng.normal(size=(num_rows, num_columns)).astype(ml_dtypes.float8_e4m3fn)
    else:
        low, high = (0, 16) if form.has_offsets else (-8, 8)
        low, high = (low, high) if form.codes == "int4" else (-128, 128)
        codes = rng.integers(low, high, (num_rows, num_columns)).astype(np.int8)
    scales = rng.integers(1, 999, shape).astype(np.float32) / np.float32(2**14)
    offsets = rng.integers(-999, 999, shape).astype(np.float32) / np.float32(2**14)
    return QuantisedRows(
        form=form, codes=codes, scales=scales, offsets=offsets if form.has_offsets else None
    )


def in_blocks(rows: QuantisedRows, size: int) -> Iterator[QuantisedRows]:
    """Yield blocks of rows. A block is spoiled once the next one is asked for."""
    for start in range(0, len(rows), size):
        place = slice(start, start + size)
        offsets = None if rows.offsets is None else rows.offsets[place].copy()
        block = QuantisedRows(
            form=rows.form,
            codes=rows.codes[place].copy(),
            scales=rows.scales[place].copy(),
            offsets=offsets,
        )
        yield block
        block.codes.fill(1)
        block.scales.fill(77.0)
