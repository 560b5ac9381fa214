"""Load and store the formats of weights and caches, widened to float32 in registers.

A format of groups keeps a panel's weights as `mie.ops.quantised` defines them. For each group of
inputs a panel has 16 float32 scales, perhaps 16 offsets, and the codes of 16 outputs for each input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops.quantised import GROUPS, Codes, Form
from mie.ops_jit.kernels.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VECTOR,
    Emitted,
    call,
    fused,
    int64,
    lanes,
    load_lanes,
    plain,
    pointer,
    splat,
    vector,
)
from mie.ops_jit.layout import format_name

Vectors = tuple[ir.Value, ...]


def _bfloat16(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    bits = b.zext(load_lanes(b, address, I16), lanes(I32))
    return (b.bitcast(b.shl(bits, splat(I32, 16)), VECTOR),)


def _float16(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    return (b.fpext(load_lanes(b, address, ir.HalfType()), VECTOR),)


def _int8(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    return (b.sitofp(b.sext(load_lanes(b, address, I8), lanes(I32)), VECTOR),)


def _signed_pairs(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    """Widen the low four bits of each byte, then the high ones. Both are two's complement."""
    bits = b.sext(load_lanes(b, address, I8), lanes(I32))
    low = b.ashr(b.shl(bits, splat(I32, 28)), splat(I32, 28))
    return tuple(b.sitofp(each, VECTOR) for each in (low, b.ashr(bits, splat(I32, 4))))


def _unsigned_pairs(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    bits = b.zext(load_lanes(b, address, I8), lanes(I32))
    parts = b.and_(bits, splat(I32, 15)), b.lshr(bits, splat(I32, 4))
    return tuple(b.sitofp(each, VECTOR) for each in parts)


def _fp8(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    """Move an E4M3 number's bits to their places in float32, whose bias is 120 larger.

    There is no NaN.
    """
    bits = b.zext(load_lanes(b, address, I8), lanes(I32))
    sign = b.shl(b.and_(bits, splat(I32, 0x80)), splat(I32, 24))
    rest = b.shl(b.and_(bits, splat(I32, 0x7F)), splat(I32, 20))
    return (b.fmul(b.bitcast(b.or_(sign, rest), VECTOR), splat(F32, 2.0**120)),)


def _narrow_bfloat16(b: ir.IRBuilder, x: ir.Value, address: ir.Value) -> None:
    """Round to nearest, ties to even. A NaN stays one."""
    bits = b.bitcast(x, lanes(I32))
    odd = b.and_(b.lshr(bits, splat(I32, 16)), splat(I32, 1))
    rounded = b.add(bits, b.add(odd, splat(I32, 0x7FFF)))
    quiet = b.or_(bits, splat(I32, 0x400000))
    chosen = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    short = b.trunc(b.lshr(chosen, splat(I32, 16)), lanes(I16))
    b.store(short, pointer(b, address, lanes(I16)), align=1)


def _narrow_float16(b: ir.IRBuilder, x: ir.Value, address: ir.Value) -> None:
    half = lanes(ir.HalfType())
    b.store(b.fptrunc(x, half), pointer(b, address, half), align=1)


def _narrow_int8(b: ir.IRBuilder, x: ir.Value, address: ir.Value) -> None:
    whole = b.fptosi(call(b, "llvm.rint.v16f32", VECTOR, (x,)), lanes(I32))
    b.store(b.trunc(whole, lanes(I8)), pointer(b, address, lanes(I8)), align=1)


def _narrow_fp8(b: ir.IRBuilder, x: ir.Value, address: ir.Value) -> None:
    """Round to E4M3, ties to even. |x| is at most 448.

    Normal numbers round like bfloat16 does, at bit 20. Subnormal ones are multiples of 2**-9, and
    adding 2**14 leaves exactly those bits.
    """
    bits = b.bitcast(x, lanes(I32))
    sign = b.and_(b.lshr(bits, splat(I32, 24)), splat(I32, 0x80))
    size = b.and_(bits, splat(I32, 0x7FFFFFFF))
    odd = b.and_(b.lshr(size, splat(I32, 20)), splat(I32, 1))
    rounded = b.add(size, b.add(odd, splat(I32, 0x7FFFF)))
    normal = b.sub(b.lshr(rounded, splat(I32, 20)), splat(I32, 120 << 3))
    moved = b.fadd(b.bitcast(size, VECTOR), splat(F32, 2.0**14))
    tiny = b.sub(b.bitcast(moved, lanes(I32)), splat(I32, 141 << 23))
    small = b.icmp_signed("<", size, splat(I32, 121 << 23))
    result = b.or_(b.select(small, tiny, normal), sign)
    b.store(b.trunc(result, lanes(I8)), pointer(b, address, lanes(I8)), align=1)


def _float32(b: ir.IRBuilder, address: ir.Value) -> Vectors:
    return (load_lanes(b, address, F32),)


def _narrow_float32(b: ir.IRBuilder, x: ir.Value, address: ir.Value) -> None:
    b.store(x, pointer(b, address, VECTOR), align=1)


@dataclass(frozen=True)
class Format:
    """How a panel's weights, or 16 elements of a cache, are stored."""

    name: str
    itemsize: int
    """Bytes of an output's code, or of its codes for a pair of inputs."""
    widen: Callable[[ir.IRBuilder, ir.Value], Vectors]
    """Load 16 codes, or 16 pairs of codes, as float32, which is exact."""
    narrow: Callable[[ir.IRBuilder, ir.Value, ir.Value], None] | None = None
    """Store 16 numbers, rounded to nearest, ties to even."""
    largest: float | None = None
    """The element that the largest magnitude of a vector of a cache maps to, if it has a scale."""
    group: int = 1
    """Inputs of a panel that share scales, if it has scales."""
    headers: int = 0
    """Vectors that a group begins with: none, 16 scales, or 16 scales and 16 offsets."""
    inputs: int = 1
    """Inputs whose codes are loaded at once."""

    @property
    def group_bytes(self) -> int:
        """The size of a group of a panel."""
        return 64 * self.headers + 16 * self.itemsize * self.group // self.inputs

    def header(self, b: ir.IRBuilder, address: ir.Value) -> Vectors:
        """Load a group's scales, and its offsets if it has some."""
        places = (b.add(address, I64(64 * i)) for i in range(self.headers))
        return tuple(load_lanes(b, place, F32) for place in places)

    def weights(self, b: ir.IRBuilder, address: ir.Value, header: Vectors) -> Vectors:
        """Load the weights of one input or more, rounded as `mie.ops.quantised` defines them."""
        codes = self.widen(b, address)
        if len(header) == 2:
            return tuple(fused(b, each, *header) for each in codes)
        return tuple(b.fmul(each, *header) for each in codes) if header else codes

    def loader(self) -> Any:
        """Return a function for kernels: an address to 16 numbers."""
        widen = self.widen

        @intrinsic
        def load_widened(_: Any, address: Any) -> Emitted:
            return plain(vector, [int64], lambda b, address: widen(b, address)[0])

        return load_widened

    def storer(self) -> Any:
        """Return a function for kernels that stores 16 numbers at an address."""
        narrow = self.narrow
        assert narrow is not None

        @intrinsic
        def store_narrowed(_: Any, x: Any, address: Any) -> Emitted:
            return plain(types.void, [vector, int64], narrow)

        return store_narrowed

    def copier(self) -> Any:
        """Return a function for kernels that copies one element from an address to another."""
        size, element = self.itemsize, ir.IntType(8 * self.itemsize)

        @intrinsic
        def copy_item(_: Any, source: Any, target: Any) -> Emitted:
            def emit(b: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
                item = b.load(pointer(b, source, element), align=size)
                b.store(item, pointer(b, target, element), align=size)

            return plain(types.void, [int64, int64], emit)

        return copy_item


def _grouped(codes: Codes, group: int, has_offsets: bool) -> Format:
    """Return the format of a quantised matrix."""
    name = format_name(Form(codes=codes, group=group, has_offsets=has_offsets))
    if codes == "int4":
        widen, inputs = _unsigned_pairs if has_offsets else _signed_pairs, 2
    else:
        widen, inputs = _int8 if codes == "int8" else _fp8, 1
    return Format(name, 1, widen, group=group, headers=1 + has_offsets, inputs=inputs)


FORMATS = {
    each.name: each
    for each in (
        Format("float32", 4, _float32, _narrow_float32),
        Format("bfloat16", 2, _bfloat16, _narrow_bfloat16),
        Format("float16", 2, _float16, _narrow_float16),
        Format("int8", 1, _int8, _narrow_int8, 127.0),
        Format("float8_e4m3fn", 1, _fp8, _narrow_fp8, 448.0),
        *itertools.starmap(_grouped, itertools.product(get_args(Codes), GROUPS, (False, True))),
    )
}
