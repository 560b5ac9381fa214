"""Kernels of recurrent layers: a tile is one head, or some channels, of one sequence.

A tile runs over the tokens of its sequence in order, whether there is one or a chunk of a prompt.
So a token's result depends on the tokens before it only, not on chunks, batches or threads.
"""

import math

import numpy as np

from mie.ops_jit.kernels.elementwise import gated, normalise
from mie.ops_jit.kernels.vectors import (
    everywhere,
    exp,
    first_of,
    fma,
    fma1,
    kernel_function,
    load,
    load_first,
    number,
    set_number,
    store,
    store_first,
    sum_of,
    word,
    words,
)
from mie.ops_jit.layout import CHANNELS, FRESH, ROW_TILE, STARTS, STATE_SLOTS

ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
LEAST_SQUARE = np.float32(1e-6)
ODD = tuple(np.float32(1 / odd) for odd in (15, 13, 11, 9, 7, 5, 3, 1))


@kernel_function
def exp1(x):
    """Return e**x of a number."""
    return first_of(exp(everywhere(x)))


@kernel_function
def softplus(x):
    """Return log(1 + e**x) of a number.

    With y = e**-|x|, log(1 + y) is 2 artanh(s) = 2 (s + s³/3 + s⁵/5 + …), where s = y / (2 + y) is
    at most 1/3. Eight terms suffice for float32.
    """
    y = exp1(-abs(x))
    s = y / (TWO + y)
    square = s * s
    series = ODD[0]
    for coefficient in ODD[1:]:
        series = fma1(series, square, coefficient)
    return fma1(TWO * s, series, max(x, ZERO))


@kernel_function
def convolve(args, step, tile, scratch):
    """Convolve channels with a sequence's last inputs, then activate.

    Arguments: x, columns, weights [W, C], biases or 0, out, C, W, N, whether x [T, 3 C] has b, c
    and x. b · x is convolved then, and c multiplies the result. Else SiLU is applied to it.
    """
    x, columns, weights, biases, out, dim, width, is_gated = words(args, 8)
    num_parts = (dim + CHANNELS - 1) // CHANNELS
    sequence, part = tile // num_parts, tile % num_parts
    begin, end = words(word(step, STARTS) + 8 * sequence, 2)
    is_fresh = word(word(step, FRESH), sequence)
    columns += word(word(step, STATE_SLOTS), sequence) * (width - 1) * dim * 4
    stride = 3 * dim if is_gated != 0 else dim
    one = everywhere(ONE)
    for c in range(part * CHANNELS, min(dim, (part + 1) * CHANNELS), 16):
        count = dim - c
        for j in range(width - 1):
            before = everywhere(ZERO)
            if is_fresh == 0:
                before = load_first(columns + (j * dim + c) * 4, count)
            store(scratch + 64 * j, before)
        for row in range(begin, end):
            own = x + (row * stride + c) * 4
            if is_gated != 0:
                v = load_first(own, count) * load_first(own + 8 * dim, count)
            else:
                v = load_first(own, count)
            store(scratch + 64 * (width - 1), v)
            total = everywhere(ZERO)
            for j in range(width):
                kernel = load_first(weights + (j * dim + c) * 4, count)
                total = fma(load(scratch + 64 * j), kernel, total)
            if biases != 0:
                total = total + load_first(biases + 4 * c, count)
            if is_gated != 0:
                total = total * load_first(own + 4 * dim, count)
            else:
                total = gated(total, one, 0)
            store_first(out + (row * dim + c) * 4, total, count)
            for j in range(width - 1):
                store(scratch + 64 * j, load(scratch + 64 * (j + 1)))
        for j in range(width - 1):
            store_first(columns + (j * dim + c) * 4, load(scratch + 64 * j), count)


@kernel_function
def clear(state, count):
    """Write zeros."""
    for i in range(0, count, 16):
        store_first(state + 4 * i, everywhere(ZERO), count - i)


@kernel_function
def l2_normalise(x, out, dim, factor):
    """Write x / sqrt(Σ x² + 1e-6) * factor, of ``dim`` numbers."""
    total = everywhere(ZERO)
    for i in range(0, dim, 16):
        v = load_first(x + 4 * i, dim - i)
        total = fma(v, v, total)
    scale = everywhere(factor / np.float32(math.sqrt(sum_of(total) + LEAST_SQUARE)))
    for i in range(0, dim, 16):
        store_first(out + 4 * i, load_first(x + 4 * i, dim - i) * scale, dim - i)


@kernel_function
def delta_lanes(state, k, q, v, out, keys, values, count, decay, beta):
    """Advance up to 16 columns of a state [Dk, Dv] by a token of the gated delta rule."""
    shrink, row = everywhere(decay), 4 * values
    seen = everywhere(ZERO)
    for i in range(keys):
        s = load_first(state + i * row, count) * shrink
        seen = fma(s, everywhere(number(k, i)), seen)
    change = everywhere(beta) * (load_first(v, count) - seen)
    total = everywhere(ZERO)
    for i in range(keys):
        s = load_first(state + i * row, count) * shrink
        s = fma(everywhere(number(k, i)), change, s)
        store_first(state + i * row, s, count)
        total = fma(s, everywhere(number(q, i)), total)
    store_first(out, total, count)


@kernel_function
def delta_64(state, k, q, v, out, keys, values, decay, beta):
    """Do the same for 64 columns at once, so that additions do not wait for each other."""
    shrink, strength, row = everywhere(decay), everywhere(beta), 4 * values
    a = everywhere(ZERO)
    b, c, d = a, a, a
    for i in range(keys):
        at, x = state + i * row, everywhere(number(k, i))
        a = fma(load(at) * shrink, x, a)
        b = fma(load(at + 64) * shrink, x, b)
        c = fma(load(at + 128) * shrink, x, c)
        d = fma(load(at + 192) * shrink, x, d)
    a, b = strength * (load(v) - a), strength * (load(v + 64) - b)
    c, d = strength * (load(v + 128) - c), strength * (load(v + 192) - d)
    e = everywhere(ZERO)
    f, g, h = e, e, e
    for i in range(keys):
        at, x, y = state + i * row, everywhere(number(k, i)), everywhere(number(q, i))
        s = fma(x, a, load(at) * shrink)
        store(at, s)
        e = fma(s, y, e)
        s = fma(x, b, load(at + 64) * shrink)
        store(at + 64, s)
        f = fma(s, y, f)
        s = fma(x, c, load(at + 128) * shrink)
        store(at + 128, s)
        g = fma(s, y, g)
        s = fma(x, d, load(at + 192) * shrink)
        store(at + 192, s)
        h = fma(s, y, h)
    store(out, e)
    store(out + 64, f)
    store(out + 128, g)
    store(out + 192, h)


@kernel_function
def gated_delta(args, step, tile, scratch):
    """Run the gated delta rule for a head of a sequence.

    Arguments: qkv, b and a [T, 2 H], states, out, rates, dt_bias, G, H, Dk, Dv, the largest beta.
    """
    qkv, gates, states, out, rates, biases = words(args, 6)
    groups, heads, keys, values = words(args + 8 * 6, 4)
    most = number(args + 8 * 10, 0)
    sequence, head = tile // heads, tile % heads
    begin, end = words(word(step, STARTS) + 8 * sequence, 2)
    slot, size = word(word(step, STATE_SLOTS), sequence), keys * values
    state = states + (slot * heads + head) * size * 4
    if word(word(step, FRESH), sequence) != 0:
        clear(state, size)
    group, width = head // (heads // groups), 2 * groups * keys + heads * values
    q, k = scratch, scratch + (keys + 15) // 16 * 64
    factor = ONE / np.float32(math.sqrt(np.float32(keys)))
    for row in range(begin, end):
        own, gate = qkv + row * width * 4, gates + row * heads * 8
        l2_normalise(own + group * keys * 4, q, keys, factor)
        l2_normalise(own + (groups + group) * keys * 4, k, keys, ONE)
        beta = most / (ONE + exp1(-number(gate, head)))
        step_size = softplus(number(gate, heads + head) + number(biases, head))
        decay = exp1(-number(rates, head) * step_size)
        v = own + (2 * groups * keys + head * values) * 4
        y = out + (row * heads + head) * values * 4
        j = 0
        while j + 64 <= values:
            at = 4 * j
            delta_64(state + at, k, q, v + at, y + at, keys, values, decay, beta)
            j += 64
        while j < values:
            at = 4 * j
            delta_lanes(state + at, k, q, v + at, y + at, keys, values, values - j, decay, beta)
            j += 16


@kernel_function
def mamba(args, step, tile, scratch):
    """Run Mamba 2 for a head of a sequence.

    Arguments: x, B and C [T, C], dt [T, H], states, out, rates, dt_bias, D, G, H, Dk, Dv.
    """
    xbc, dt, states, out, rates, biases, skips = words(args, 7)
    groups, heads, keys, values = words(args + 8 * 7, 4)
    sequence, head = tile // heads, tile % heads
    begin, end = words(word(step, STARTS) + 8 * sequence, 2)
    slot, size = word(word(step, STATE_SLOTS), sequence), keys * values
    state = states + (slot * heads + head) * size * 4
    if word(word(step, FRESH), sequence) != 0:
        clear(state, size)
    group, width = head // (heads // groups), 2 * groups * keys + heads * values
    for row in range(begin, end):
        own = xbc + row * width * 4
        step_size = softplus(number(dt, row * heads + head) + number(biases, head))
        shrink = everywhere(exp1(-number(rates, head) * step_size))
        b = own + (heads * values + group * keys) * 4
        c = b + groups * keys * 4
        for i in range(keys):
            set_number(scratch, i, number(b, i) * step_size)
        for j in range(0, values, 16):
            x, count = load_first(own + (head * values + j) * 4, values - j), values - j
            total = everywhere(ZERO)
            for i in range(keys):
                at = state + (i * values + j) * 4
                s = fma(everywhere(number(scratch, i)), x, load_first(at, count) * shrink)
                store_first(at, s, count)
                total = fma(s, everywhere(number(c, i)), total)
            total = fma(everywhere(number(skips, head)), x, total)
            store_first(out + ((row * heads + head) * values + j) * 4, total, count)


@kernel_function
def gated_norm(args, step, tile, scratch):
    """Normalise groups of each row, times SiLU of the gate.

    Arguments: x, gate, weight, out, K, the size of a group, the weights of all groups, eps, the
    word with T, whether the gate comes before the norm.
    """
    x, gate, weight, out, dim, size, num_weights, _, rows_word, gates_first = words(args, 10)
    eps = number(args + 8 * 7, 0)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    one = everywhere(ONE)
    for row in range(tile * ROW_TILE, end):
        for first in range(0, dim, size):
            at = (row * dim + first) * 4
            source = x + at
            if gates_first != 0:
                for i in range(0, size, 16):
                    v = gated(load_first(gate + at + 4 * i, size - i), one, 0)
                    v = load_first(source + 4 * i, size - i) * v
                    store_first(scratch + 4 * i, v, size - i)
                source = scratch
            normalise(source, weight + first % num_weights * 4, out + at, size, eps, 0)
            if gates_first == 0:
                for i in range(0, size, 16):
                    own = out + at + 4 * i
                    v = gated(load_first(gate + at + 4 * i, size - i), load_first(own, size - i), 0)
                    store_first(own, v, size - i)


@kernel_function
def sigmoid_mul(args, step, tile, scratch):
    """Multiply rows by sigmoid(gate).

    Arguments: x [T, K], gate [T, K] or [T, 1], out, K, the width of the gate, the word with T.
    """
    x, gate, out, dim, gate_dim, rows_word = words(args, 6)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    one, zero = everywhere(ONE), everywhere(ZERO)
    for row in range(tile * ROW_TILE, end):
        for i in range(0, dim, 16):
            at, count = (row * dim + i) * 4, dim - i
            g = everywhere(number(gate, row))
            if gate_dim > 1:
                g = load_first(gate + at, count)
            store_first(out + at, load_first(x + at, count) / (one + exp(zero - g)), count)
