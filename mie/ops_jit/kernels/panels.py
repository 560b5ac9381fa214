"""Go over the inputs of panels of weights, widened to float32 in registers.

A panel holds K inputs of 16 outputs. Floats are [K, 16], and `mie.ops_jit.memory` describes panels
of quantised weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops_jit.kernels.formats import Format, Widen, weights_of
from mie.ops_jit.kernels.vectors import (
    F32,
    I8,
    I32,
    I64,
    VECTOR,
    Emitted,
    broadcast,
    emit_prefetch,
    fused,
    int64,
    lanes,
    load_lanes,
    opaque,
    plain,
    pointer,
    splat,
    splat_like,
)
from mie.ops_jit.layout import INPUTS_OF_WORD, LANES, SIGNED_NIBBLE, words_of_block

Vectors = Sequence[ir.Value]
Load = Callable[[], ir.Value]


class Columns(NamedTuple):
    """Outputs of panels, as vectors of ``lanes`` outputs."""

    panels: Sequence[ir.Value]
    """The addresses of the panels."""
    firsts: Sequence[ir.Value] = (I64(0),)
    """The first outputs of the vectors of each panel."""
    lanes: int = LANES

    def places(
        self, b: ir.IRBuilder, panels: Sequence[ir.Value], itemsize: int
    ) -> Sequence[ir.Value]:
        """Return the place of each vector, from places in the panels on."""
        own = [b.mul(first, I64(itemsize)) for first in self.firsts]
        return [b.add(panel, each) for panel in panels for each in own]


def over_inputs(
    b: ir.IRBuilder, fmt: Format, columns: Columns, stride: Any, ahead: Any, count: Any,
    state: Vectors, use: Callable[[ir.Value, Vectors, Vectors], Vectors],
    keeps_offsets: bool = True,
) -> Vectors:  # fmt: skip
    """Emit state = use(k, weights, state) for the inputs k of panels. Return the last state.

    There is a vector of weights for each of the columns. ``stride`` is from load to load.
    ``keeps_offsets`` keeps the offsets of codes that are read in place in registers.
    """

    def over_loads(
        begin: ir.Value, number: ir.Value, codes: Sequence[ir.Value], headers: Sequence[Vectors],
        state: Vectors,
    ) -> Vectors:  # fmt: skip
        """Go over inputs that share scales, from ``begin`` on."""

        def widened(codes: Vectors) -> Vectors:
            return [
                weights_of(b, fmt.widen(b, each), header)
                for each, header in zip(codes, headers, strict=True)
            ]

        def step(i: ir.Value, state: Vectors) -> Vectors:
            own = [b.add(each, b.mul(i, stride)) for each in codes]
            prefetch(b, own, ahead, fmt.words)
            at = columns.places(b, own, fmt.itemsize)
            if fmt.after is None:
                loaded = [fmt.load(b, each, columns.lanes) for each in at]
                return use(b.add(begin, i), widened(loaded), state)
            after, count = fmt.after, len(state)

            def over_word(first: ir.Value, loaded: Vectors, state: Vectors) -> Vectors:
                """Go over the inputs of a word of each output, from ``first`` on."""

                def step_of_words(j: ir.Value, both: Vectors) -> Vectors:
                    words, k = both[count:], b.add(begin, b.add(first, j))
                    shifted = [after(b, each) for each in words]
                    return [*use(k, widened(words), both[:count]), *shifted]

                left = least(b, b.sub(number, first), I64(fmt.inputs))
                return loop(b, left, step_of_words, [*state, *loaded])[:count]

            first = b.mul(i, I64(fmt.inputs_of_load))
            for word in range(fmt.words):
                places = [b.add(opaque(b, each), I64(64 * word)) if word else each for each in at]
                loaded = [fmt.load(b, each, columns.lanes) for each in places]
                state = over_word(b.add(first, I64(fmt.inputs * word)), loaded, state)
            if fmt.has_sextets:
                loaded = [fmt.load_last(b, opaque(b, each), columns.lanes) for each in at]
                state = over_word(b.add(first, I64(fmt.inputs * fmt.words)), loaded, state)
            return state

        return loop(b, ceil_div(b, number, fmt.inputs_of_load), step, state)

    if not fmt.headers:
        none = [()] * (len(columns.panels) * len(columns.firsts))
        return over_loads(I64(0), count, columns.panels, none, state)

    def step(group: ir.Value, own: Vectors, index: ir.Value, state: Vectors) -> Vectors:
        begin = b.mul(group, I64(fmt.group))
        number = least(b, b.sub(count, begin), I64(fmt.group))
        headers, codes = headers_of(b, fmt, columns, own, index, ahead)
        if fmt.is_in_place:
            return _over_words(
                b, fmt, columns, headers, codes, ahead, keeps_offsets, begin, number, state, use
            )
        loaded = [[load() for load in each] for each in headers]
        if fmt.inputs == INPUTS_OF_WORD:  # the codes are read at the top of words
            loaded = [
                [b.fmul(each, splat_like(each, F32, 1 / SIGNED_NIBBLE))] for (each,) in loaded
            ]
        return over_loads(begin, number, codes, loaded, state)

    return over_groups(b, fmt, columns.panels, ceil_div(b, count, fmt.group), state, step)


def over_groups(
    b: ir.IRBuilder, fmt: Format, panels: Vectors, count: ir.Value, state: Vectors,
    use: Callable[[ir.Value, Vectors, ir.Value, Vectors], Vectors],
) -> Vectors:  # fmt: skip
    """Emit state = use(group, own, index, state) for the first ``count`` groups of panels.

    ``own`` is where the groups begin that are together with the group in each panel, and ``index``
    is the number of the group among them.
    """
    num_together = fmt.together // fmt.group

    def step(i: ir.Value, state: Vectors) -> Vectors:
        own = [b.add(each, b.mul(i, I64(fmt.bytes_together))) for each in panels]
        if num_together == 1:
            return use(i, own, I64(0), state)
        first = b.mul(i, I64(num_together))
        number = least(b, b.sub(count, first), I64(num_together))
        return loop(b, number, lambda j, state: use(b.add(first, j), own, j, state), state)

    return loop(b, ceil_div(b, count, num_together), step, state)


def widener(fmt: Format) -> Any:
    """Return a function for kernels that widens inputs of a panel to float32 [count, 16].

    It prefetches the weights ``ahead`` bytes on.
    """

    @intrinsic
    def widen_panel(_: Any, panel: Any, ahead: Any, count: Any, out: Any) -> Emitted:
        def emit(
            b: ir.IRBuilder, panel: ir.Value, ahead: ir.Value, count: ir.Value, out: ir.Value
        ) -> None:
            def use(k: ir.Value, weights: Vectors, state: Vectors) -> Vectors:
                b.store(weights[0], pointer(b, b.add(out, b.shl(k, I64(6))), VECTOR), align=4)
                return state

            stride = I64(fmt.load_bytes)
            over_inputs(b, fmt, Columns([panel]), stride, ahead, count, [], use)

        return plain(types.void, [int64] * 4, emit)

    return widen_panel


def headers_of(
    b: ir.IRBuilder, fmt: Format, columns: Columns, own: Vectors, index: ir.Value, ahead: Any
) -> tuple[Sequence[Sequence[Load]], Sequence[ir.Value]]:
    """Return how to load each column's scales and offsets, and where each panel's codes are.

    The group is number ``index`` of those that begin at ``own``.
    """
    lanes_, num_groups = columns.lanes, fmt.together // fmt.group
    # There are at least as many groups as lines of a header, and each of several prefetches one.
    lines = fmt.header_bytes // 64 if num_groups == 1 else 1
    prefetch(b, [b.add(each, b.shl(index, I64(6))) for each in own], ahead, lines)
    codes = b.add(I64(fmt.header_bytes), b.mul(index, I64(fmt.code_bytes)))

    def product(unit: ir.Value, byte: ir.Value, i: int) -> ir.Value:
        at = b.add(b.shl(index, I64(4)), I64(64 * fmt.headers + 16 * num_groups * i))
        number = load_lanes(b, b.add(byte, at), I8, lanes_)
        number = b.sitofp(b.sext(number, lanes(I32, lanes_)), lanes(F32, lanes_))
        return b.fmul(load_lanes(b, b.add(unit, I64(64 * i)), F32, lanes_), number)

    if fmt.scale_bits == 8:
        places = zip(columns.places(b, own, 4), columns.places(b, own, 1), strict=True)
        values = [[product(*each, i) for i in range(fmt.headers)] for each in places]
        headers: Sequence[Sequence[Load]] = [[*map(_kept, each)] for each in values]
    else:
        element = F32 if fmt.scale_bits == 32 else ir.HalfType()
        load, size = _load_anew if fmt.is_in_place else _load, fmt.scale_bytes
        firsts = [
            b.add(b.mul(index, I64(size)), I64(size * num_groups * i)) for i in range(fmt.headers)
        ]
        headers = [
            [partial(load, b, b.add(each, first), element, lanes_) for first in firsts]
            for each in columns.places(b, own, size // LANES)
        ]
    return headers, [b.add(each, codes) for each in own]


def _kept(vector: ir.Value) -> Load:
    return lambda: vector


def _load(b: ir.IRBuilder, address: ir.Value, element: ir.Type, count: int) -> ir.Value:
    numbers = load_lanes(b, address, element, count)
    return numbers if element == F32 else b.fpext(numbers, lanes(F32, count))


def _load_anew(b: ir.IRBuilder, address: ir.Value, element: ir.Type, count: int) -> ir.Value:
    """Load a vector here, because LLVM would keep it in a register or on the stack."""
    return _load(b, opaque(b, address), element, count)


def _over_words(
    b: ir.IRBuilder, fmt: Format, columns: Columns, headers: Sequence[Sequence[Load]],
    codes: Sequence[ir.Value], ahead: Any, keeps_offsets: bool, begin: ir.Value, number: ir.Value,
    state: Vectors, use: Callable[[ir.Value, Vectors, Vectors], Vectors],
) -> Vectors:  # fmt: skip
    """Go over the inputs of groups with words of codes, from ``begin`` on.

    A nibble k is read in place, times 2**4k, and its scale is divided by that. Both are exact. No
    CPU has registers for all words of a block, so each nibble reads them from the cache again.
    """
    words, last = words_of_block(fmt.group), INPUTS_OF_WORD - 1
    size = INPUTS_OF_WORD * words

    def scales() -> Vectors:
        return [load() for load, _ in headers]

    def offsets() -> Vectors:
        return [load() for _, load in headers]

    kept = offsets() if keeps_offsets else None

    def word(address: ir.Value) -> ir.Value:
        return load_lanes(b, address, I32, columns.lanes)

    def weights(codes: Vectors, scales: Vectors) -> Vectors:
        numbers = [fmt.widen(b, each) for each in codes]
        return [fused(b, *each) for each in zip(numbers, scales, kept or offsets(), strict=True)]

    def block(i: ir.Value, state: Vectors) -> Vectors:
        first, at = b.add(begin, b.mul(i, I64(size))), b.mul(i, I64(64 * words))
        own = [b.add(each, at) for each in codes]
        prefetch(b, own, ahead, words)
        places = columns.places(b, own, 4)

        def nibble(k: ir.Value, state: Vectors, scales: Vectors, cut: Widen) -> Vectors:
            def step(j: ir.Value, state: Vectors) -> Vectors:
                own = [word(opaque(b, b.add(each, b.shl(j, I64(6))))) for each in places]
                values = weights([cut(b, each) for each in own], scales)
                return use(b.add(first, b.add(b.mul(k, I64(words)), j)), values, state)

            return loop(b, I64(words), step, state)

        def step(k: ir.Value, both: Vectors) -> Vectors:
            *own, mask = both[len(state) :]
            sums = nibble(k, both[: len(state)], own, lambda b, each: b.and_(each, mask))
            smaller = [b.fmul(each, splat_like(each, F32, 1 / 16)) for each in own]
            return [*sums, *smaller, b.shl(mask, splat_like(mask, I32, 4))]

        # The highest nibble would be the sign of the word.
        lowest = splat(I32, 15, columns.lanes)
        state = loop(b, I64(last), step, [*state, *scales(), lowest])[: len(state)]
        shift = splat(I32, 4 * last, columns.lanes)
        return nibble(I64(last), state, scales(), lambda b, each: b.lshr(each, shift))

    def rest(i: ir.Value, state: Vectors) -> Vectors:
        """Use an input of a block that ends early."""
        at = b.shl(b.add(b.mul(whole, I64(words)), b.urem(i, I64(words))), I64(6))
        number = b.trunc(b.shl(b.udiv(i, I64(words)), I64(2)), I32)
        shift = broadcast(b, number, columns.lanes)
        shifted = [b.lshr(word(b.add(each, at)), shift) for each in columns.places(b, codes, 4)]
        values = weights([b.and_(each, splat_like(each, I32, 15)) for each in shifted], scales())
        return use(b.add(begin, b.add(b.mul(whole, I64(size)), i)), values, state)

    whole = b.udiv(number, I64(size))
    state = loop(b, whole, block, state)
    return loop(b, b.sub(number, b.mul(whole, I64(size))), rest, state)


def prefetch(
    b: ir.IRBuilder, addresses: Sequence[ir.Value], ahead: ir.Value | None, lines: int = 1
) -> None:
    """Prefetch cache lines from ``ahead`` bytes after each address on. None prefetches nothing."""
    if ahead is not None:
        for each, line in itertools.product(addresses, range(lines)):
            emit_prefetch(b, b.add(b.add(each, ahead), I64(64 * line)))


def least(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return the smaller integer."""
    return b.select(b.icmp_signed("<", x, y), x, y)


def ceil_div(b: ir.IRBuilder, x: ir.Value, divisor: int) -> ir.Value:
    """Return a quotient, rounded up."""
    return b.udiv(b.add(x, I64(divisor - 1)), I64(divisor))


def loop(
    b: ir.IRBuilder, count: ir.Value, step: Callable[[ir.Value, Vectors], Vectors], state: Vectors
) -> Vectors:
    """Return the state after ``count`` steps."""
    before = b.block
    head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    k = b.phi(I64)
    kept = [b.phi(each.type) for each in state]
    for phi, first in zip([k, *kept], [I64(0), *state], strict=True):
        phi.add_incoming(first, before)
    b.cbranch(b.icmp_signed("<", k, count), body, after)
    b.position_at_end(body)
    moved = [b.add(k, I64(1)), *step(k, kept)]
    for phi, total in zip([k, *kept], moved, strict=True):
        phi.add_incoming(total, b.block)
    b.branch(head).set_metadata("llvm.loop", _not_unrolled(b.module))
    b.position_at_end(after)
    return kept


def _not_unrolled(module: ir.Module) -> ir.MDValue:
    """Return the metadata of a loop that LLVM must leave as it is.

    It would unroll, and then keep more numbers than there are registers. The first operand of such
    a node is the node itself (LLVM's language reference, "llvm.loop").
    """
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.MDValue(module, (), name=str(len(module.metadata)))
    node.operands = (node, disable)
    return node
