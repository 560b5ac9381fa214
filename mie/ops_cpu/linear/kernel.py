"""Call the inner kernel of OpenBLAS's sgemm on operands that are packed already.

sgemm packs both operands at every call, because its kernel reads them in an order of its own. With
few rows this takes longer than the product. Weights never change, so they are packed once.

OpenBLAS exports these functions without documenting them. They have had the same signatures since
GotoBLAS2 (driver/level3/level3.c calls them). `find_kernel` tries them before anything uses them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.samples import samples
from mie.ops_cpu.threads.blas import Blas

MACHINES = ("x86_64", "aarch64")
"""The machines on which the functions have these signatures."""
VERSION = "OpenBLAS 0.3."
"""How the description of a known OpenBLAS begins."""
MOST_COLUMNS = 16
"""Maximum number of columns of a panel."""
MULTIPLY = (c_long, c_long, c_long, c_float, c_void_p, c_void_p, c_void_p, c_long)
PACK = (c_long, c_long, c_void_p, c_long, c_void_p)


@dataclass(frozen=True, eq=False)
class Kernel:
    """The functions of OpenBLAS for the CPU that it runs on. Pointers are addresses.

    Weights [K, N] are packed as panels [N / columns, K, columns].
    """

    multiply: Callable[[int, int, int, float, int, int, int, int], object]
    """Add weights @ rows to out: N, rows, K, 1, weights, rows, out, elements from row to row."""
    pack_rows: Callable[[int, int, int, int, int], object]
    """Pack rows [R, K]: K, R, rows, elements from row to row, packed. One row does not change."""
    columns: int
    """The number of columns of a panel."""


def prepared(function: Callable[..., object], types: tuple[Any, ...], *args: float) -> partial[Any]:
    """Return a call whose operands are converted, so that it takes half as long."""
    return partial(function, *(make(value) for make, value in zip(types, args, strict=True)))


def address(array: Floats) -> int:
    """Return where an array begins in memory."""
    number: int = array.__array_interface__["data"][0]
    return number


def numpy_kernel() -> Kernel | None:
    """Return the kernel of NumPy's BLAS, or None."""
    return find_kernel(Blas())


def find_kernel(blas: Blas) -> Kernel | None:
    """Return the kernel, or None if this BLAS has none that multiplies as described."""
    if platform.machine() not in MACHINES or not blas.version.startswith(VERSION):
        return None
    multiply, pack_rows, pack_weights = (
        _function(blas, name, types)
        for name, types in (
            ("sgemm_kernel", MULTIPLY),
            ("sgemm_oncopy", PACK),
            ("sgemm_incopy", PACK),
        )
    )
    if multiply is None or pack_rows is None:
        return None
    columns = _panel_columns(pack_weights or pack_rows)
    if columns is None:
        return None
    kernel = Kernel(multiply, pack_rows, columns)
    return kernel if _multiplies(kernel) else None


def _function(blas: Blas, name: str, types: tuple[Any, ...]) -> Any:
    """Return a function for the CPU's core type, or for the only one that the library has."""
    found = blas.symbol(f"{name}_{blas.core.upper()}") or blas.symbol(name)
    if found is not None:
        found.argtypes, found.restype = types, c_int
    return found


def _panel_columns(pack: Callable[[int, int, int, int, int], object]) -> int | None:
    """Return how many columns are packed next to each other, or None if the order is another."""
    num_inputs = 5
    rows = np.arange(MOST_COLUMNS * num_inputs, dtype=np.float32).reshape(MOST_COLUMNS, num_inputs)
    packed = np.zeros_like(rows)
    pack(num_inputs, MOST_COLUMNS, address(rows), num_inputs, address(packed))
    columns = MOST_COLUMNS
    while columns > 1:
        panels = rows.reshape(-1, columns, num_inputs).transpose(0, 2, 1)
        if (packed.ravel() == panels.ravel()).all():
            return columns
        columns //= 2
    return None


def _multiplies(kernel: Kernel) -> bool:
    """Return whether the kernel gives the product of the operands that it is given."""
    num_rows, num_inputs, num_outputs = 13, 29, 2 * MOST_COLUMNS
    x = samples(num_rows, num_inputs).astype(np.float32)
    weights = samples(num_outputs, num_inputs).astype(np.float32)[::-1]
    panels = weights.reshape(-1, kernel.columns, num_inputs).transpose(0, 2, 1).copy()
    rows, out = np.zeros_like(x), np.ones((num_rows, num_outputs + 3), np.float32)
    kernel.pack_rows(num_inputs, num_rows, address(x), num_inputs, address(rows))
    sizes = num_outputs, num_rows, num_inputs
    kernel.multiply(*sizes, 1.0, address(panels), address(rows), address(out), out.shape[1])
    wanted = np.ones_like(out)
    # A product of BLAS would take some megabytes for its buffers.
    wanted[:, :num_outputs] += (x[:, None] * weights).sum(2)
    return bool(np.allclose(out, wanted, rtol=0, atol=1e-4))
