"""Load and store the formats of weights and caches, widened to float32 in registers.

Quantised weights are groups of inputs of a panel, as `mie.ops.weights.quantised` defines them. A
group is 16 scales, perhaps 16 offsets, and then 16 codes for each input. Scales and offsets are
float32 or float16. Two groups of float16 scales without offsets are together: their scales, and
then their codes. Where scales have units, all groups of a unit are together: 16 units, perhaps the
units of the offsets, the 16 scales of each group in bytes, perhaps the offsets, and then the codes.
Codes of "int4" are the nibbles of
words, a word for eight inputs of an output, and `layout.INPUTS_OF_SEXTETS` describes words of codes
of six bits. Signed codes of "int4" are shifted to the high end of the word,
one after the other, and are masked and converted there, where the word's sign is the code's, and so
they are 2**28 times as large. Unsigned ones are converted where they are in the word, up to 2**24
times as large. Exact products divide the scale by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops.weights.integer import ACTIVATION_GROUP
from mie.ops.weights.quantised import GROUPS, Codes, Form, ScaleBits
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
    like,
    load_lanes,
    plain,
    pointer,
    splat,
    splat_like,
    vector,
)
from mie.ops_jit.layout import (
    BYTES_OF_WORD,
    INPUTS_OF_SEXTETS,
    INPUTS_OF_WORD,
    LANES,
    SEXTET_BIAS,
    SEXTET_WORDS,
    format_name,
    inputs_together,
)

Widen = Callable[[ir.IRBuilder, ir.Value], ir.Value]


def _bfloat16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.bitcast(b.shl(b.zext(x, like(x, I32)), splat_like(x, I32, 16)), like(x, F32))


def _float16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.fpext(x, like(x, F32))


def _int8(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.sitofp(b.sext(x, like(x, I32)), like(x, F32))


def _highest_byte(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return _int32(b, b.ashr(words, splat_like(words, I32, 24)))


def _high_sextet(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return _int32(b, b.lshr(words, splat_like(words, I32, 24)))


def _high_signed_sextet(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    codes = b.lshr(words, splat_like(words, I32, 24))
    return _int32(b, b.sub(codes, splat_like(codes, I32, SEXTET_BIAS)))


def _after_byte(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return b.shl(words, splat_like(words, I32, 8))


def _highest(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return _int32(b, b.and_(words, splat_like(words, I32, 15 << 28)))


def _after_highest(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    return b.shl(words, splat_like(words, I32, 4))


def _int32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.sitofp(x, like(x, F32))


def _fp8(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Move an E4M3 number's bits to their places in float32. Its bias is 120 larger.

    The sign is extended over the byte, so that one mask keeps the sign and the other bits. There is
    no NaN.
    """
    bits = b.shl(b.sext(x, like(x, I32)), splat_like(x, I32, 20))
    kept = b.and_(bits, splat_like(x, I32, 0x87F00000))
    return b.fmul(b.bitcast(kept, like(x, F32)), splat_like(x, F32, 2.0**120))


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


def _float32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return x


def _narrow_float32(b: ir.IRBuilder, x: ir.Value, address: ir.Value) -> None:
    b.store(x, pointer(b, address, VECTOR), align=1)


@dataclass(frozen=True)
class Format:
    """How a panel's weights, or 16 elements of a cache, are stored."""

    name: str
    element: ir.Type
    """The type that is loaded: an element, a code, or a word of codes."""
    itemsize: int
    """Bytes of an ``element``."""
    widen: Widen
    """Return the elements, or codes of words, exactly as float32."""
    narrow: Callable[[ir.IRBuilder, ir.Value, ir.Value], None] | None = None
    """Store 16 numbers, rounded to nearest, ties to even."""
    largest: float | None = None
    """The element that the largest magnitude of a vector of a cache maps to, if it has a scale."""
    group: int = 1
    """Inputs of a panel that share scales, if there are some."""
    together: int = 1
    """Inputs of a panel with scales and codes together: a group, or the groups of a unit."""
    headers: int = 0
    """Vectors that a group begins with: none, scales, or scales and offsets."""
    scale_bits: int = 32
    """Bits of a scale or an offset. With 8 bits, several groups have a unit."""
    after: Widen | None = None
    """Shift the next codes of words to where ``widen`` reads them, if they are signed."""
    inputs: int = 1
    """The inputs of a load."""
    has_sextets: bool = False
    """Whether words hold codes of six bits. They are bytes after the load."""

    @property
    def is_in_place(self) -> bool:
        """Whether codes of words are converted where they are."""
        return self.inputs > 1 and self.after is None

    @property
    def segment(self) -> int:
        """The inputs of a segment, where rows are rounded."""
        return min(self.group, ACTIVATION_GROUP)

    @property
    def order(self) -> tuple[int, ...]:
        """The inputs of a segment in the order in which products with rounded rows take them.

        A product takes four codes of a word at once: every other nibble from the lowest on, then
        the others, or all bytes.
        """
        per_word, words = self.inputs, self.segment // self.inputs
        halves = per_word // 4
        parts = [
            (word, halves * place + half)
            for word in range(words)
            for half in range(halves)
            for place in range(4)
        ]
        if self.is_in_place:
            return tuple(part * words + word for word, part in parts)
        return tuple(word * per_word + per_word - 1 - part for word, part in parts)

    @property
    def scale_bytes(self) -> int:
        """The bytes of 16 scales."""
        return 2 * self.scale_bits

    @property
    def header_bytes(self) -> int:
        """The bytes before the codes of groups that are together."""
        units = 64 * (self.scale_bits == 8)
        return self.headers * (units + self.scale_bytes * self.together // self.group)

    @property
    def code_bytes(self) -> int:
        """The codes of a group of a panel."""
        return self.load_bytes * self.group // self.inputs_of_load

    @property
    def bytes_together(self) -> int:
        """The size of the groups of a panel that are together."""
        return self.header_bytes + self.code_bytes * (self.together // self.group)

    @property
    def load_bytes(self) -> int:
        """The bytes from load to load, where panels are contiguous."""
        return LANES * self.itemsize * self.words

    @property
    def words(self) -> int:
        """The number of elements of an output that are loaded together."""
        return SEXTET_WORDS if self.has_sextets else 1

    @property
    def inputs_of_load(self) -> int:
        """The number of inputs that are loaded together."""
        return INPUTS_OF_SEXTETS if self.has_sextets else self.inputs

    def load(self, b: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
        """Return elements of ``count`` outputs."""
        own = load_lanes(b, address, self.element, count)
        return b.and_(own, splat_like(own, I32, 0x3F3F3F3F)) if self.has_sextets else own

    def load_last(self, b: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
        """Return the codes of six bits that share three words. The first is at the address."""
        last = None
        for number in range(SEXTET_WORDS):
            word = load_lanes(b, b.add(address, I64(64 * number)), I32, count)
            word = b.lshr(word, splat_like(word, I32, 6 - 2 * number))
            word = b.and_(word, splat_like(word, I32, 0x03030303 << 2 * number))
            last = word if last is None else b.or_(last, word)
        return last

    def loader(self) -> Any:
        """Return a function for kernels: an address to 16 numbers."""
        element, widen = self.element, self.widen

        @intrinsic
        def load_widened(_: Any, address: Any) -> Emitted:
            return plain(vector, [int64], lambda b, at: widen(b, load_lanes(b, at, element)))

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


def weights_of(b: ir.IRBuilder, codes: ir.Value, header: Sequence[ir.Value]) -> ir.Value:
    """Return codes times scales, plus offsets if there are some, rounded once."""
    if not header:
        return codes
    return b.fmul(codes, *header) if len(header) == 1 else fused(b, codes, *header)


def _quantised(
    codes: Codes,
    group: int,
    has_offsets: bool,
    scale_bits: ScaleBits,
    in_words: bool = False,
    has_six_bits: bool = False,
) -> Format:
    """Return the format of a quantised matrix."""
    form = Form(
        codes=codes,
        group=group,
        has_offsets=has_offsets,
        scale_bits=scale_bits,
        has_six_bits=has_six_bits,
    )
    name, headers = format_name(form, in_words), 1 + has_offsets
    sizes = {"group": group, "together": inputs_together(form), "headers": headers}
    sizes["scale_bits"] = scale_bits
    if in_words:
        widen = _highest_byte
        if has_six_bits:
            sizes["has_sextets"] = has_six_bits
            widen = _high_sextet if has_offsets else _high_signed_sextet
        return Format(name, I32, 4, widen, after=_after_byte, inputs=BYTES_OF_WORD, **sizes)
    if codes != "int4":
        return Format(name, I8, 1, _int8 if codes == "int8" else _fp8, **sizes)
    widen, after = (_int32, None) if has_offsets else (_highest, _after_highest)
    return Format(name, I32, 4, widen, after=after, inputs=INPUTS_OF_WORD, **sizes)


_BOTH = (False, True)
_WIDE_SCALES = tuple(itertools.product(GROUPS, _BOTH, (32,)))
_INTEGERS = (
    *_WIDE_SCALES,
    *itertools.product((32,), _BOTH, (16,)),
    *itertools.product((16, 32), _BOTH, (8,)),
)
"""Groups of integers, whether they have offsets, and the bits of the scales."""
FORMATS = {
    each.name: each
    for each in (
        Format("float32", F32, 4, _float32, _narrow_float32),
        Format("bfloat16", I16, 2, _bfloat16, _narrow_bfloat16),
        Format("float16", ir.HalfType(), 2, _float16, _narrow_float16),
        Format("int8", I8, 1, _int8, _narrow_int8, 127.0),
        Format("float8_e4m3fn", I8, 1, _fp8, _narrow_fp8, 448.0),
        *(_quantised("float8_e4m3fn", *each) for each in _WIDE_SCALES),
        *(_quantised("int4", *each) for each in _INTEGERS),
        *(_quantised("int8", *each) for each in _INTEGERS),
        *(_quantised("int8", *each, in_words=True) for each in _INTEGERS),
        *(_quantised("int8", *each, in_words=True, has_six_bits=True) for each in _INTEGERS),
    )
}
