"""Give Numba a vector of 16 float32 numbers, and loads and stores at addresses.

Addresses are integers in bytes, as in assembly. So a kernel has no bounds checks, no reference
counts, and nothing that raises. A vector is one register of a CPU with 512-bit registers, and two
or four of others, with equal results in every lane.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from mie.ops_jit.compiler import MACHINE
from mie.ops_jit.layout import LANES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
int64, float32 = types.int64, types.float32


def lanes(element: ir.Type, count: int = LANES) -> ir.VectorType:
    """Return the LLVM type of ``count`` elements."""
    return ir.VectorType(element, count)


def like(x: ir.Value, element: ir.Type) -> ir.VectorType:
    """Return the LLVM type of as many elements as a vector has."""
    return ir.VectorType(element, x.type.count)


VECTOR = lanes(F32)


class Vector(types.Type):
    """The type of a vector in Numba."""

    def __init__(self) -> None:
        super().__init__("float32x16")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, VECTOR)


kernel_function = njit(
    nogil=True,
    error_model="numpy",
    boundscheck=False,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)
"""Compile a function that cannot raise.

The wrappers for callers in Python and in C would be a third of the compilation.
"""


def splat(element: ir.Type, number: float, count: int = LANES) -> ir.Constant:
    """Return a constant of ``count`` equal elements."""
    return ir.Constant(lanes(element, count), [ir.Constant(element, number)] * count)


def splat_like(x: ir.Value, element: ir.Type, number: float) -> ir.Constant:
    """Return a constant of as many equal elements as a vector has."""
    return splat(element, number, x.type.count)


def call(b: ir.IRBuilder, name: str, result: ir.Type, values: Sequence[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    signature = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), values)


def call_machine(
    b: ir.IRBuilder, name: str, result: ir.Type, values: Sequence[ir.Value]
) -> ir.Value:
    """Call an LLVM intrinsic of one architecture, such as "x86.avx512.vpdpbusd.512".

    Numba compiles for this machine before LLVM compiles for a kernel's CPU, and this machine may
    lack the instruction. So the intrinsic is a function of another name for Numba, and
    `compiler.intermediate_code` renames it.
    """
    name = MACHINE + name
    llvm.add_symbol(name, 1)  # Numba looks it up, and nothing calls it
    signature = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(b.module, signature, name)
    function.attributes.add("readnone")
    function.attributes.add("nounwind")
    return b.call(function, values)


def call_kernel_at(b: ir.IRBuilder, kernel: ir.Value, *values: ir.Value) -> None:
    """Call a kernel at an address, so that each is compiled once and alone.

    Numba compiles functions like this: the addresses of the result and of an exception come first.
    Kernels return nothing and do not raise.
    """
    byte = I8.as_pointer()
    result, nothing = cgutils.alloca_once(b, byte), ir.Constant(byte.as_pointer(), None)
    arguments = [result, nothing, *values]
    signature = ir.FunctionType(I32, [value.type for value in arguments])
    b.call(b.inttoptr(kernel, signature.as_pointer()), arguments)


def pointer(b: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    """Return an address as a pointer."""
    return b.inttoptr(address, element.as_pointer())


def load_lanes(
    b: ir.IRBuilder, address: ir.Value, element: ir.Type, count: int = LANES
) -> ir.Value:
    """Load ``count`` elements from any address."""
    return b.load(pointer(b, address, lanes(element, count)), align=1)


def broadcast(b: ir.IRBuilder, number: ir.Value, count: int = LANES) -> ir.Value:
    """Return a vector of ``count`` equal numbers."""
    undefined = ir.Constant(lanes(number.type, count), ir.Undefined)
    one = b.insert_element(undefined, number, I32(0))
    return b.shuffle_vector(one, undefined, splat(I32, 0, count))


def fused(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """Return x * y + z, rounded once."""
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, (x, y, z))


def opaque(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return an address that LLVM cannot know, so that loads from it stay where they are."""
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [address], True)


def emit_prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """Begin to load a cache line. Any address will do."""
    values = (b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), values)


def _before(b: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Return a mask of the lanes before ``count``."""
    numbers = ir.Constant(lanes(I32), [I32(index) for index in range(LANES)])
    undefined = ir.Constant(lanes(I32), ir.Undefined)
    bound = b.insert_element(undefined, b.trunc(count, I32), I32(0))
    return b.icmp_signed("<", numbers, b.shuffle_vector(bound, undefined, splat(I32, 0)))


Emitted = tuple[Any, Callable[..., Any]]


def plain(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Emitted:
    """Return the signature of an intrinsic and its code, called with the builder and values."""

    def code(context: Any, b: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> Any:
        value = emit(b, *values)
        return context.get_dummy_value() if result == types.void else value

    return result(*arguments), code


@intrinsic
def load(_: Any, address: Any) -> Emitted:
    """Load 16 numbers."""
    return plain(vector, [int64], lambda b, at: load_lanes(b, at, F32))


@intrinsic
def store(_: Any, address: Any, x: Any) -> Emitted:
    """Store 16 numbers."""
    return plain(
        types.void, [int64, vector], lambda b, at, v: b.store(v, pointer(b, at, VECTOR), align=4)
    )


@intrinsic
def load_first(_: Any, address: Any, count: Any) -> Emitted:
    """Load the first ``count`` of 16 numbers, and zeros for the others. These are not read."""

    def emit(b: ir.IRBuilder, at: ir.Value, count: ir.Value) -> ir.Value:
        where, mask = pointer(b, at, VECTOR), _before(b, count)
        values = (where, I32(4), mask, splat(F32, 0.0))
        return call(b, "llvm.masked.load.v16f32.p0", VECTOR, values)

    return plain(vector, [int64, int64], emit)


@intrinsic
def store_first(_: Any, address: Any, x: Any, count: Any) -> Emitted:
    """Store the first ``count`` of 16 numbers. Memory after them is not touched."""

    def emit(b: ir.IRBuilder, at: ir.Value, x: ir.Value, count: ir.Value) -> None:
        values = (x, pointer(b, at, VECTOR), I32(4), _before(b, count))
        call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), values)

    return plain(types.void, [int64, vector, int64], emit)


@intrinsic
def everywhere(_: Any, number: Any) -> Emitted:
    """Return a vector of 16 equal numbers."""
    return plain(vector, [float32], broadcast)


@intrinsic
def fma(_: Any, x: Any, y: Any, z: Any) -> Emitted:
    """Return x * y + z, rounded once."""
    return plain(vector, [vector, vector, vector], fused)


@intrinsic
def fma1(_: Any, x: Any, y: Any, z: Any) -> Emitted:
    """Return x * y + z of single numbers, rounded once."""
    return plain(float32, [float32] * 3, lambda b, *values: call(b, "llvm.fma.f32", F32, values))


def _define(function: Callable[..., Any], instruction: str) -> None:
    """Let an operator of Python, between two vectors, be an instruction of LLVM."""

    @intrinsic
    def own(_: Any, x: Any, y: Any) -> Emitted:
        return plain(vector, [vector, vector], lambda b, x, y: getattr(b, instruction)(x, y))

    @overload(function)
    def typed(x, y):
        if isinstance(x, Vector) and isinstance(y, Vector):
            return lambda x, y: own(x, y)
        return None


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")
_define(operator.truediv, "fdiv")


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@intrinsic
def larger(_: Any, x: Any, y: Any) -> Emitted:
    """Return the larger number of each lane, or y where one of them is NaN."""
    return plain(vector, [vector, vector], _larger)


@intrinsic
def smaller(_: Any, x: Any, y: Any) -> Emitted:
    """Return the smaller number of each lane, or x where one of them is NaN."""

    def emit(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        return b.select(b.fcmp_ordered(">", x, y), y, x)

    return plain(vector, [vector, vector], emit)


@intrinsic
def within(_: Any, x: Any, begin: Any, end: Any, other: Any) -> Emitted:
    """Return x in the lanes begin … end - 1, and the number ``other`` in all others."""

    def emit(b: ir.IRBuilder, x: Any, begin: Any, end: Any, other: Any) -> ir.Value:
        own = b.and_(_before(b, end), b.not_(_before(b, begin)))
        return b.select(own, x, broadcast(b, other))

    return plain(vector, [vector, int64, int64, float32], emit)


def _tree(b: ir.IRBuilder, x: ir.Value, join: Callable[..., ir.Value]) -> ir.Value:
    """Join the 16 lanes as a tree, with the same result on every CPU."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    width = LANES // 2
    while width:
        order = [I32((index + width) % LANES) for index in range(LANES)]
        x = join(b, x, b.shuffle_vector(x, undefined, ir.Constant(lanes(I32), order)))
        width //= 2
    return b.extract_element(x, I32(0))


@intrinsic
def sum_of(_: Any, x: Any) -> Emitted:
    """Return the sum of the 16 numbers."""
    return plain(float32, [vector], lambda b, x: _tree(b, x, lambda b, x, y: b.fadd(x, y)))


@intrinsic
def largest_of(_: Any, x: Any) -> Emitted:
    """Return the largest of the 16 numbers."""
    return plain(float32, [vector], lambda b, x: _tree(b, x, _larger))


@intrinsic
def first_of(_: Any, x: Any) -> Emitted:
    """Return the first of the 16 numbers."""
    return plain(float32, [vector], lambda b, x: b.extract_element(x, I32(0)))


@intrinsic
def absolute(_: Any, x: Any) -> Emitted:
    """Return the magnitudes."""
    return plain(vector, [vector], lambda b, x: call(b, "llvm.fabs.v16f32", VECTOR, (x,)))


LOG2_E = 1.4426950408889634
EXP_COEFFICIENTS = (
    1.5353362e-4,
    1.3398874e-3,
    9.6184370e-3,
    5.5503324e-2,
    2.4022648e-1,
    6.9314720e-1,
    1.0,
)


@intrinsic
def exp(_: Any, x: Any) -> Emitted:
    """Return e**x of each lane to about 2 units in the last place.

    It is 0 below -87.3 and infinite above 88.3. 2**z is 2**n * 2**f with an integer n and |f| <=
    1/2. The polynomial for 2**f is Cephes' exp2f (Moshier, 1992). It is exactly 1 for x = 0.
    """

    def emit(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        z = b.fmul(x, splat(F32, LOG2_E))
        high = b.fcmp_ordered("<", z, splat(F32, 128.0))
        n = call(b, "llvm.rint.v16f32", VECTOR, (z,))
        f = fused(b, x, splat(F32, LOG2_E), b.fneg(n))
        power = splat(F32, EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            power = fused(b, power, f, splat(F32, coefficient))
        low = b.fcmp_ordered("<", z, splat(F32, -126.0))
        n = b.select(b.or_(low, b.not_(high)), splat(F32, 0.0), n)
        bits = b.shl(b.add(b.fptosi(n, lanes(I32)), splat(I32, 127)), splat(I32, 23))
        power = b.fmul(power, b.bitcast(bits, VECTOR))
        power = b.select(low, splat(F32, 0.0), power)
        # A z that is not below 128, a NaN included, gives infinity or NaN.
        return b.select(high, power, b.fadd(b.fmul(x, splat(F32, 0.0)), splat(F32, float("inf"))))

    return plain(vector, [vector], emit)


def _array_of(element: ir.Type, kind: Any, size: int) -> tuple[Any, Any]:
    """Return functions that load and store an element of ``size`` bytes of an array."""

    def place(b: ir.IRBuilder, array: ir.Value, index: ir.Value) -> ir.Value:
        return pointer(b, b.add(array, b.mul(index, I64(size))), element)

    @intrinsic
    def load_element(_: Any, array: Any, index: Any) -> Emitted:
        def emit(b: ir.IRBuilder, array: ir.Value, index: ir.Value) -> ir.Value:
            return b.load(place(b, array, index), align=size)

        return plain(kind, [int64, int64], emit)

    @intrinsic
    def store_element(_: Any, array: Any, index: Any, value: Any) -> Emitted:
        def emit(b: ir.IRBuilder, array: ir.Value, index: ir.Value, value: ir.Value) -> None:
            b.store(value, place(b, array, index), align=size)

        return plain(types.void, [int64, int64, kind], emit)

    return load_element, store_element


word, set_word = _array_of(I64, int64, 8)
number, set_number = _array_of(F32, float32, 4)


@intrinsic(prefer_literal=True)
def words(_: Any, array: Any, count: Any) -> Emitted:
    """Load the first ``count`` words of an array. ``count`` is a literal number."""
    result = types.UniTuple(int64, count.literal_value)

    def code(context: Any, b: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> Any:
        places = [b.add(values[0], I64(8 * index)) for index in range(count.literal_value)]
        loaded = [b.load(pointer(b, place, I64), align=8) for place in places]
        return context.make_tuple(b, result, loaded)

    return result(int64, count), code
