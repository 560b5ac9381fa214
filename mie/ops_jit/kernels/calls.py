"""Call a compiled kernel at an address, so that each is compiled once and alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mie.ops_jit.kernels.vectors import I8, I32, Emitted, int64, plain


def _emit(b: ir.IRBuilder, kernel: ir.Value, *values: ir.Value) -> None:
    """Call as Numba compiles functions: the result's address and one for exceptions come first.

    Kernels return nothing and do not raise.
    """
    byte = I8.as_pointer()
    arguments: Sequence[ir.Type] = [value.type for value in values]
    signature = ir.FunctionType(I32, [byte.as_pointer(), byte.as_pointer(), *arguments])
    result, nothing = cgutils.alloca_once(b, byte), ir.Constant(byte.as_pointer(), None)
    b.call(b.inttoptr(kernel, signature.as_pointer()), [result, nothing, *values])


@intrinsic
def call_kernel(_: Any, kernel, args, step, tile, scratch) -> Emitted:
    """Call the kernel of an operator."""
    return plain(types.void, [int64] * 5, _emit)


@intrinsic
def call_multiply(
    _: Any,
    kernel,
    x,
    x_stride,
    w,
    w_stride,
    k_stride,
    ahead,
    k,
    out,
    out_stride,
    rows,
    panels,
    resume,
) -> Emitted:
    """Call a kernel of `products.multiply`."""
    return plain(types.void, [int64] * 13, _emit)
