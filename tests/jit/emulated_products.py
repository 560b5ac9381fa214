"""Compare integer products with their definition on an emulated CPU of aarch64.

A test runs this in the emulator with a folder of object files, which were compiled for other CPUs
on another machine. So neither Numba nor LLVM's compiler runs there.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from quantised_rows import columns, quantised

from mie.ops.weights.integer import integer_product, round_activations
from mie.ops.weights.quantised import Form
from mie.ops_jit.layout import HEADER_WORDS, NUM_TOKENS, ROUNDED_GROUPS, ROW_TILE, rounded_words
from mie.ops_jit.linker import Library
from mie.ops_jit.memory import HugePages, Panels, address, segments_of
from mie.ops_jit.team import function_at

FORMS = (
    Form(codes="int4", group=32, has_offsets=True),
    Form(codes="int4", group=64, has_offsets=False),
    Form(codes="int4", group=16, has_offsets=True),
    Form(codes="int8", group=32, has_offsets=False),
    Form(codes="int8", group=16, has_offsets=True, scale_bits=8),
    Form(codes="int8", group=32, has_offsets=False, scale_bits=16, has_six_bits=True),
    Form(codes="int8", group=16, has_offsets=True, scale_bits=8, has_six_bits=True),
)
ROWS = 17


Array = NDArray[np.float32]


def panels_of(form: Form, num_rows: int = 1, least: int = 1) -> tuple[Panels, tuple[Array, Array]]:
    """Return a random matrix, random rows, and the products of both."""
    rows = quantised(form, num_rows, columns(form, least))
    rows.codes[: num_rows // 4] = rows.codes.min()
    x = np.random.default_rng(1).normal(size=(ROWS, rows.shape[1])).astype(np.float32)
    x[3], x[4], x[5, :64], x[6, -1], x[7] = 1, -1, 0, np.nan, 1e-32
    with np.errstate(all="ignore"):
        wanted = integer_product(round_activations(x), rows)
    [panels] = segments_of(
        [(len(rows), form)], iter([rows]), rows.shape[1], HugePages(), None, in_words=True
    )
    return panels, (x, wanted)


def check(library: Library, folder: Path, form: Form) -> None:
    """Compare the products of 1 … 17 rows."""
    nothing = ctypes.c_void_p()
    result = ctypes.addressof(nothing)
    for num_outputs, least in ((64, 131), (40, 77), (64, 560)):
        panels, (x, wanted) = panels_of(form, num_outputs, least)
        names = f"multiply_int8[{panels.format}]", panels.rounding
        multiply, round_rows = (
            function_at(library.load((folder / name).read_bytes()), count)
            for name, count in zip(names, (9, 4), strict=True)
        )
        width, num_inputs = rounded_words(x.shape[1], panels.segment), x.shape[1]
        rounded, header = np.zeros((ROWS, width), np.float32), np.zeros(HEADER_WORDS, np.int64)
        header[NUM_TOKENS] = ROWS
        parts = -(-num_inputs // (32 * ROUNDED_GROUPS))
        words = np.array([address(x), address(rounded), num_inputs, NUM_TOKENS, parts], np.int64)
        for tile in range(-(-ROWS // ROW_TILE) * parts):
            round_rows(result, None, address(words), address(header), tile, 0)
        for count in range(1, ROWS + 1):
            out = np.zeros((count, 64), np.float32)
            multiply(
                result, None, address(rounded), 4 * width, address(panels.memory),
                panels.memory.nbytes // 4, 4096, -(-num_inputs // panels.segment), address(out),
                count, 4,
            )  # fmt: skip
            got, own = out[:, :num_outputs], wanted[:count]
            same = (got.view(np.int32) == own.view(np.int32)) | (np.isnan(got) & np.isnan(own))
            assert same.all(), (form, num_inputs, count, np.argwhere(~same)[:3])


if __name__ == "__main__":
    for each in FORMS:
        check(Library(), Path(sys.argv[1]), each)
        print(each, flush=True)
