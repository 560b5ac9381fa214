"""Multiply bytes by bytes, four inputs of an output at once, as a CPU can.

A *dot* adds the products of four codes of an output and four numbers of a rounded row to a sum of
32 bits. All are exact, so CPUs get equal sums in different ways. Codes of 4 bits are bytes 0 … 15,
and codes of 6 bits are bytes 0 … 63.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from mie.ops_jit.compiler import Cpu
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.vectors import I8, I16, I32, call_machine, lanes, splat, splat_like
from mie.ops_jit.layout import SEXTET_BIAS

SIGNED_NIBBLE_BIAS, SIGNED_BYTE_BIAS = 8, 128


@dataclass(frozen=True)
class Dot:
    """How a CPU multiplies the codes of a format."""

    lanes: int
    """Outputs of a vector."""
    widths: tuple[int, ...]
    """The number of columns of a tile of 1, 2, 3 … rows, as a divisor of the columns of a panel.

    Tiles of one panel read memory as one stream, which is faster than several.
    """
    add: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
    """Return a sum plus the products of codes and numbers. All are lanes of four bytes."""
    end: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value] | None = None
    """Return sums of 32 bits of what was added to 0 and of the first sum, if ``add`` has others."""
    bias: int = 0
    """What is added to each code, so that it has no sign."""
    unrolls: bool = False
    """Whether the words of a segment are no loop. LLVM keeps the order of few loads only."""
    row_words: int = 1
    """Words of a row that a load has. A dot of Arm can read one lane instead of equal lanes."""


AVX2_WIDTHS = (2, 2, 2, 2, *(1,) * 6)


def dot_of(fmt: Format, cpu: Cpu) -> Dot:
    """Return how a CPU multiplies the codes of a format."""
    is_byte = fmt.inputs == 4 and not fmt.has_sextets
    bias = 0 if is_byte or fmt.is_in_place else SIGNED_NIBBLE_BIAS
    if fmt.has_sextets:
        bias = 0 if fmt.headers > 1 else SEXTET_BIAS
    if cpu.architecture == "aarch64":
        if cpu.has("dotprod"):
            widths = (4, 4, 2, 2, 2, 2)
            return Dot(4, widths, _sdot, bias=bias, unrolls=True, row_words=2)
        return Dot(4, (4, 2, 2, 1), _wide, bias=bias)
    if cpu.has("avx512vnni") or cpu.has("avxvnni"):
        bias = SIGNED_BYTE_BIAS if is_byte else bias
        if cpu.has("avx512vnni"):
            return Dot(16, (1,) * 12, _vpdpbusd, bias=bias, unrolls=True)
        return Dot(8, AVX2_WIDTHS, _vpdpbusd, bias=bias)
    if is_byte:
        return Dot(8, AVX2_WIDTHS, _signed_pairs)
    if fmt.has_sextets:
        return Dot(8, AVX2_WIDTHS, _joined_pairs, bias=bias)
    return Dot(8, AVX2_WIDTHS, _pairs, _end_pairs, bias)


def _as(b: ir.IRBuilder, x: ir.Value, element: ir.IntType) -> ir.Value:
    """Return a vector of words as smaller integers."""
    return b.bitcast(x, lanes(element, x.type.count * 32 // element.width))


def _vpdpbusd(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Use VNNI: codes without a sign times numbers with one."""
    values = (total, codes, numbers)
    return call_machine(b, f"x86.avx512.vpdpbusd.{32 * codes.type.count}", codes.type, values)


def _products(b: ir.IRBuilder, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Use AVX2: sums of two products of 16 bits, of codes without a sign and numbers with one."""
    values = _as(b, codes, I8), _as(b, numbers, I8)
    return call_machine(b, "x86.avx2.pmadd.ub.sw", lanes(I16, 2 * codes.type.count), values)


def _joined(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    """Return sums of two neighbours, of 32 bits."""
    values = pairs, splat(I16, 1, pairs.type.count)
    return call_machine(b, "x86.avx2.pmadd.wd", lanes(I32, pairs.type.count // 2), values)


def _pairs(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Add up in 16 bits: a segment's sum of 8 pairs is at most 8 * 2 * 15 * 127 < 2**15."""
    return b.bitcast(b.add(_as(b, total, I16), _products(b, codes, numbers)), codes.type)


def _end_pairs(b: ir.IRBuilder, total: ir.Value, first: ir.Value) -> ir.Value:
    return b.add(_joined(b, _as(b, total, I16)), first)


def _joined_pairs(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Add up in 32 bits, because 16 bits hold two pairs of six bits only."""
    return b.add(total, _joined(b, _products(b, codes, numbers)))


def _signed_pairs(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Move a code's sign to its number. A pair is at most 2 * 128 * 127 < 2**15."""
    size, kind = _as(b, codes, I8), lanes(I8, 4 * codes.type.count)
    sizes = b.select(b.icmp_signed("<", size, splat_like(size, I8, 0)), b.neg(size), size)
    signed = call_machine(b, "x86.avx2.psign.b", kind, (_as(b, numbers, I8), size))
    joined = _joined(b, _products(b, b.bitcast(sizes, codes.type), b.bitcast(signed, codes.type)))
    return b.add(total, joined)


def _sdot(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Use the dot product of Armv8.2."""
    values = total, _as(b, codes, I8), _as(b, numbers, I8)
    return call_machine(b, "aarch64.neon.sdot.v4i32.v16i8", codes.type, values)


def _wide(b: ir.IRBuilder, total: ir.Value, codes: ir.Value, numbers: ir.Value) -> ir.Value:
    """Add two products in 16 bits (at most 2 * 128 * 127 < 2**15), and two of these in 32."""

    def halves(x: ir.Value) -> tuple[ir.Value, ir.Value]:
        x, eight = _as(b, x, I16), splat(I16, 8, 2 * x.type.count)
        return b.ashr(b.shl(x, eight), eight), b.ashr(x, eight)

    products = [b.mul(*pair) for pair in zip(halves(codes), halves(numbers), strict=True)]
    pairs, half = b.bitcast(b.add(*products), codes.type), splat_like(codes, I32, 16)
    total = b.add(total, b.ashr(b.shl(pairs, half), half))
    return b.add(total, b.ashr(pairs, half))
