"""Kernels that pass over rows: embeddings, norms, rotations and gated activations.

Every kernel is called as kernel(args, step, tile, scratch): the addresses of its arguments and of
the step's header, the index of the tile of work to do, and memory of the calling thread.
`mie.ops_jit.layout` numbers the header's words.
"""

import math
from collections.abc import Callable

import numpy as np

from mie.ops.activation import ACTIVATIONS, CLAMP_LIMIT, CLAMP_SLOPE, GELU_CUBIC, GELU_SLOPE
from mie.ops_jit.kernels.formats import Format
from mie.ops_jit.kernels.panels import widener
from mie.ops_jit.kernels.vectors import (
    absolute,
    everywhere,
    exp,
    fma,
    fma1,
    kernel_function,
    larger,
    largest_of,
    load,
    load_first,
    number,
    set_number,
    smaller,
    store,
    store_first,
    sum_of,
    word,
    words,
)
from mie.ops_jit.layout import (
    K_BLOCK,
    LOGITS_ROWS,
    POSITIONS,
    REGION,
    ROW_TILE,
    RUN,
    SLOTS,
    TOKEN_IDS,
)

ONE = np.float32(1)
STEEPNESS, LIMIT = np.float32(CLAMP_SLOPE), np.float32(CLAMP_LIMIT)
CLAMPED = ACTIVATIONS.index("clamped_silu")
CUBIC, SLOPE, LEAST = np.float32(GELU_CUBIC), np.float32(GELU_SLOPE), np.float32(-1e4)


@kernel_function
def normalise(x, weight, out, dim, eps, residual):
    """Write x / sqrt(mean(x²) + eps) * weight, of ``dim`` numbers. ``out`` may be ``x``.

    Add the numbers at ``residual`` unless that is 0.
    """
    total = everywhere(np.float32(0))
    whole = dim - dim % 16
    for i in range(0, whole, 16):
        v = load(x + 4 * i)
        total = fma(v, v, total)
    v = load_first(x + 4 * whole, dim - whole)
    mean = sum_of(fma(v, v, total)) / np.float32(dim)
    scale = everywhere(ONE / np.float32(math.sqrt(mean + eps)))
    for i in range(0, whole, 16):
        normed = load(x + 4 * i) * scale * load(weight + 4 * i)
        if residual != 0:
            normed = normed + load(residual + 4 * i)
        store(out + 4 * i, normed)
    v = v * scale * load_first(weight + 4 * whole, dim - whole)
    if residual != 0:
        v = v + load_first(residual + 4 * whole, dim - whole)
    store_first(out + 4 * whole, v, dim - whole)


@kernel_function
def rms_norm(args, step, tile, scratch):
    """Normalise ``count`` vectors of each row from ``first`` on, to the same places of ``out``.

    Arguments: x [T, W], weight, out, W, the size of a vector, eps, the word with T, first, count,
    and the residual or 0.
    """
    x, weight, out, width, dim, _, rows_word, first, count, residual = words(args, 10)
    eps = number(args + 8 * 5, 0)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        for i in range(count):
            at = (row * width + first + i * dim) * 4
            normalise(x + at, weight, out + at, dim, eps, residual + at if residual != 0 else 0)


@kernel_function
def gated(gate, up, kind):
    """Return gate / (1 + e**-z) * up, with z = gate for SiLU. ``kind`` is one of `ACTIVATIONS`."""
    if kind == CLAMPED:
        limit = everywhere(LIMIT)
        gate = smaller(gate, limit)
        up = larger(smaller(up, limit), everywhere(-LIMIT)) + everywhere(ONE)
    z = gate
    if kind == CLAMPED:
        z = everywhere(STEEPNESS) * gate
    elif kind != 0:
        cubic, slope = everywhere(CUBIC), everywhere(SLOPE)
        z = slope * fma(gate * gate * gate, cubic, gate)
    if kind != 0:
        z = larger(z, everywhere(LEAST))  # exp of an infinity is a NaN
    one = everywhere(ONE)
    return gate / (one + exp(everywhere(np.float32(0)) - z)) * up


@kernel_function
def gate_mul(args, step, tile, scratch):
    """Activate gate_up [T, 2 F] to out [T, F].

    Arguments: gate_up, out, F, the word with T, the activation.
    """
    gate_up, out, dim, rows_word, kind = words(args, 5)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        gate = gate_up + row * dim * 8
        for i in range(0, dim, 16):
            count = dim - i
            up = load_first(gate + 4 * (dim + i), count)
            v = gated(load_first(gate + 4 * i, count), up, kind)
            store_first(out + (row * dim + i) * 4, v, count)


@kernel_function
def capped(x, cap):
    """Return cap * tanh(x / cap), with tanh(z) = 1 - 2 / (1 + e**2z)."""
    one, limit = everywhere(ONE), everywhere(cap)
    z = x / limit
    return limit * (one - (one + one) / (one + exp(z + z)))


@kernel_function
def soft_cap(args, step, tile, scratch):
    """Bound the numbers of rows. Arguments: x [T, D], out, D, the cap, the word with T."""
    x, out, dim, _, rows_word = words(args, 5)
    cap = number(args + 8 * 3, 0)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        for i in range(0, dim, 16):
            at = (row * dim + i) * 4
            store_first(out + at, capped(load_first(x + at, dim - i), cap), dim - i)


@kernel_function
def take_rows(args, step, tile, scratch):
    """Copy the rows that need logits. Arguments: x, out, D, the word with R."""
    x, out, dim, rows_word = words(args, 4)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        source = x + word(word(step, LOGITS_ROWS), row) * dim * 4
        for i in range(0, dim, 16):
            store_first(out + (row * dim + i) * 4, load_first(source + 4 * i, dim - i), dim - i)


def embed(fmt: Format) -> Callable[..., None]:
    """Return the kernel that looks up tokens in a table of this format."""
    widen, group, group_bytes = widener(fmt), fmt.together, fmt.bytes_together

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Take a lane of a panel for each token.

        Arguments: panels, out, D, the word with T, the scale.
        """
        table, out, dim, rows_word = words(args, 4)
        scale = number(args + 8 * 4, 0)
        end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
        for row in range(tile * ROW_TILE, end):
            token = word(word(step, TOKEN_IDS), row)
            panel = table + token // 16 * ((dim + group - 1) // group * group_bytes)
            for first in range(0, dim, K_BLOCK):
                count = min(K_BLOCK, dim - first)
                widen(panel + first // group * group_bytes, 0, count, scratch)
                for i in range(count):
                    set_number(
                        out, row * dim + first + i, number(scratch, 16 * i + token % 16) * scale
                    )

    return kernel


@kernel_function
def place_of(block, head, all_heads):
    """Return the place of a block of a head among the keys of a layer, or among the values.

    ``all_heads`` is the number of heads of all layers.
    """
    place = (block // REGION * all_heads + head) * REGION + block % REGION
    return place + place // RUN * RUN


@kernel_function
def rotate(x, cos_sin, out, half):
    """Turn pairs of channels."""
    for i in range(half):
        first, second = number(x, i), number(x, half + i)
        cos, sin = number(cos_sin, i), number(cos_sin, half + i)
        set_number(out, i, fma1(first, cos, -(second * sin)))
        set_number(out, half + i, fma1(second, cos, first * sin))


def rope_write(fmt: Format) -> Callable[..., None]:
    """Return the kernel that rotates queries and keys, and writes a cache of this format.

    `mie.ops_jit.memory` describes where an element is.
    """
    narrow, copy_item = fmt.storer(), fmt.copier()
    itemsize = fmt.itemsize
    largest = np.float32(0 if fmt.largest is None else fmt.largest)
    smallest = np.float32(2.0**-100)

    @kernel_function
    def quantise(x, dim, scale_at):
        """Divide a vector by its scale, and write the scale."""
        top = everywhere(np.float32(0))
        check = top  # stays 0 without an infinity or a NaN
        for i in range(0, dim, 16):
            size = absolute(load(x + 4 * i))
            top, check = larger(size, top), check + (size - size)
        scale = largest_of(top) / largest
        if sum_of(check) != 0:
            scale = np.float32(np.nan)
        elif scale < smallest:
            scale = np.float32(0)
        set_number(scale_at, 0, scale)
        for i in range(0, dim, 16):
            if scale > 0:
                store(x + 4 * i, load(x + 4 * i) / everywhere(scale))
            else:
                store(x + 4 * i, everywhere(np.float32(0)))

    @kernel_function
    def write(x, spare, dim, elements, scales, place, offset, block_size, is_panel):
        """Write a vector x [padded Dh], which is overwritten, to an offset of a block."""
        padded, base = (dim + 15) // 16 * 16, place * block_size
        own = elements + base * padded * itemsize
        if largest > 0:
            quantise(x, padded, scales + (base + offset) * 4)
        target = spare if is_panel else own + offset * padded * itemsize
        for i in range(0, padded, 16):
            narrow(load(x + 4 * i), target + i * itemsize)
        if is_panel:
            first = offset // 16 * 16 * padded + offset % 16
            for i in range(dim):
                copy_item(spare + i * itemsize, own + (first + i * 16) * itemsize)

    return rope_write_of(write)


def rope_write_of(write: Callable[..., None]) -> Callable[..., None]:
    """Return the kernel that rotates queries and keys, and writes vectors with ``write``."""

    @kernel_function
    def kernel(args, step, tile, scratch):
        """Rotate heads, and write a cache.

        Arguments: qkv, the rotations, q, keys, values, their scales, Hq, Hkv, Dh, B, the word with
        T, the heads of all layers, the group of the slots to write.
        """
        qkv, table, q, keys, values, key_scales, value_scales = words(args, 7)
        heads, kv_heads, dim, block_size, rows_word, all_heads, group = words(args + 8 * 7, 7)
        padded = (dim + 15) // 16 * 16
        positions = word(step, POSITIONS)
        slots = word(step, SLOTS) + group * word(step, rows_word) * 8
        end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
        for i in range(0, padded, 16):
            store(scratch + 4 * i, everywhere(np.float32(0)))
        spare = scratch + 4 * padded
        for row in range(tile * ROW_TILE, end):
            own = qkv + row * (heads + 2 * kv_heads) * dim * 4
            cos_sin = table + word(positions, row) * dim * 4
            for head in range(heads):
                rotate(own + head * dim * 4, cos_sin, q + (row * heads + head) * dim * 4, dim // 2)
            slot = word(slots, row)
            block, offset = slot // block_size, slot % block_size
            for head in range(kv_heads):
                place = place_of(block, head, all_heads)
                rotate(own + (heads + head) * dim * 4, cos_sin, scratch, dim // 2)
                is_panel = block_size % 16 == 0
                write(scratch, spare, dim, keys, key_scales, place, offset, block_size, is_panel)
                value = own + (heads + kv_heads + head) * dim * 4
                for i in range(0, dim, 16):
                    store(scratch + 4 * i, load_first(value + 4 * i, dim - i))
                write(scratch, spare, dim, values, value_scales, place, offset, block_size, False)

    return kernel
