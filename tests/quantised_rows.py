"""Make random quantised matrices, and cut them into blocks."""

import itertools
from collections.abc import Iterator
from typing import get_args

import ml_dtypes
import numpy as np

from mie.ops.weights.quantised import GROUPS, UNIT_INPUTS, Codes, Form, QuantisedRows

SOME_GROUPS = {32: GROUPS, 16: (32,), 8: (16, 32)}
FORMS = [
    Form(codes=codes, group=group, has_offsets=has_offsets, scale_bits=scale_bits)
    for scale_bits in SOME_GROUPS
    for codes, group, has_offsets in itertools.product(
        get_args(Codes), SOME_GROUPS[scale_bits], (False, True)
    )
    if scale_bits == 32 or codes != "float8_e4m3fn"
]
"""Forms with scales of 32 bits, then of 16, and then with units."""


def columns(form: Form, least: int) -> int:
    """Return how many columns a matrix of this form has, from ``least`` on: two units or more."""
    return max(2, -(-least // UNIT_INPUTS)) * UNIT_INPUTS if form.has_units else least


def quantised(form: Form, num_rows: int, num_columns: int, seed: int = 0) -> QuantisedRows:
    """Return random codes, all of which occur, with scales and offsets of group size."""
    rng = np.random.default_rng([seed, num_rows, num_columns])
    if form.codes == "float8_e4m3fn":
        codes = rng.normal(size=(num_rows, num_columns)).astype(ml_dtypes.float8_e4m3fn)
    else:
        low, high = (0, 16) if form.has_offsets else (-8, 8)
        if form.codes != "int4":
            low, high = (0, 64) if form.has_offsets else (-32, 32)
            low, high = (low, high) if form.has_six_bits else (-128, 128)
        codes = rng.integers(low, high, (num_rows, num_columns)).astype(np.int8)
    planes, groups = {"codes": codes}, (num_rows, -(-num_columns // form.group))
    for kind, least in (("scale", 1), ("offset", -999))[: 1 + form.has_offsets]:
        floats, shape = f"{kind}s", groups
        if form.has_units:
            planes[floats] = rng.integers(-128, 128, groups).astype(np.int8)
            floats, shape = f"{kind}_units", (num_rows, num_columns // UNIT_INPUTS)
        planes[floats] = rng.integers(least, 999, shape).astype(np.float32) / np.float32(2**14)
    return QuantisedRows.of_kept(form, planes)


def in_blocks(rows: QuantisedRows, size: int) -> Iterator[QuantisedRows]:
    """Yield blocks of rows. A block is spoiled once the next one is asked for."""
    for start in range(0, len(rows), size):
        block = rows.take(slice(start, start + size))
        yield block
        block.codes.fill(1)
        for floats in (block.scales, block.scale_units):
            if floats is not None:
                floats.fill(77.0)
