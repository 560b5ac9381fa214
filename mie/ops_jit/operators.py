"""Append the instructions of each operator to a program.

The functions of `mie.ops` define the operators. Arguments of a kernel are in the order that its
docstring in `kernels` gives.
"""

from __future__ import annotations

import math

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_jit.kv_cache import JitCache, padded
from mie.ops_jit.layout import (
    BLOCK_ROWS,
    NUM_ITEMS,
    NUM_MERGES,
    NUM_ROWS,
    NUM_TOKENS,
    ROW_TILE,
)
from mie.ops_jit.panels import Panels
from mie.ops_jit.program import Program, Value
from mie.ops_jit.step import SUMS_BYTES, attention_scratch


def embed(program: Program, table: Panels) -> Value:
    """Look up the step's tokens: `ops.linear.embed`."""
    out = program.value(NUM_TOKENS, table.shape[1])
    kernel = f"embed[{table.dtype.name}]"
    arguments = table.memory, out, table.shape[1], NUM_TOKENS
    program.need_scratch(padded(table.shape[1]) * table.dtype.itemsize)
    program.emit(kernel, NUM_TOKENS, ROW_TILE, 1, *arguments)
    return out


def rms_norm(program: Program, x: Value, weight: Floats, eps: float) -> Value:
    """Normalise rows: `ops.norm.rms_norm`."""
    rows, width = x.storage.rows, x.storage.width
    out = program.value(rows, *x.tail)
    program.emit("rms_norm", rows, ROW_TILE, 1, x, weight, out, width, eps, rows)
    return out


def head_norm(
    program: Program, qkv: Value, first: int, last: int, weight: Floats, eps: float
) -> None:
    """Normalise heads in place."""
    rows, (num_heads, head_dim) = qkv.storage.rows, qkv.tail
    arguments = qkv, weight, num_heads, head_dim, eps, rows, first, last
    program.emit("head_norm", rows, ROW_TILE, 1, *arguments)


def linear(program: Program, x: Value, weight: Panels, residual: Value | None) -> Value:
    """Multiply rows by a matrix: `ops.linear.linear`."""
    rows, (num_outputs, num_inputs) = x.storage.rows, weight.shape
    out = program.value(rows, num_outputs)
    program.need_scratch(SUMS_BYTES)
    program.emit(
        f"linear[{weight.dtype.name}]", rows, BLOCK_ROWS, weight.num_groups,
        x, weight.memory, out, num_inputs, num_outputs, weight.bias, residual, rows,
        program.address_of(f"multiply[{weight.dtype.name}]"),
    )  # fmt: skip
    return out


def silu_mul(program: Program, gate_up: Value) -> Value:
    """Apply the gated activation: `ops.activation.silu_mul`."""
    rows, width = gate_up.storage.rows, gate_up.storage.width // 2
    out = program.value(rows, width)
    program.emit("silu_mul", rows, ROW_TILE, 1, gate_up, out, width, rows)
    return out


def gate_up(program: Program, x: Value, weight: Panels) -> Value:
    """Multiply rows by the matrix of gate and up, and activate while the sums are in the cache."""
    rows, width = x.storage.rows, weight.shape[0] // 2
    if width % 16:  # the second half does not begin with a panel
        return silu_mul(program, linear(program, x, weight, None))
    out = program.value(rows, width)
    program.need_scratch(2 * SUMS_BYTES)
    program.emit(
        f"gate_up[{weight.dtype.name}]", rows, BLOCK_ROWS, ceil_div(width, 64),
        x, weight.memory, out, weight.shape[1], width, weight.bias, rows,
        program.address_of(f"multiply[{weight.dtype.name}]"),
    )  # fmt: skip
    return out


def take_rows(program: Program, x: Value) -> Value:
    """Take the rows whose logits are wanted."""
    out = program.value(NUM_ROWS, *x.tail)
    program.emit("take_rows", NUM_ROWS, ROW_TILE, 1, x, out, x.storage.width, NUM_ROWS)
    return out


def rope_write_kv(program: Program, qkv: Value, rope: Floats, cache: JitCache, layer: int) -> Value:
    """Rotate queries and keys, and write keys and values: `ops.rope.rope`, `ops.kv_cache`."""
    shape = cache.shape
    num_heads = qkv.tail[0] - 2 * shape.num_kv_heads
    out = program.value(NUM_TOKENS, num_heads, shape.head_dim)
    program.need_scratch(8 * padded(shape.head_dim))  # a head in float32, and narrowed
    scales = (None, None) if cache.scales is None else cache.scales[layer]
    program.emit(
        f"rope_write[{cache.elements.dtype.name}]", NUM_TOKENS, ROW_TILE, 1,
        qkv, rope, out, *cache.elements[layer], *scales,
        num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, NUM_TOKENS,
        shape.num_blocks,
    )  # fmt: skip
    return out


def paged_attention(
    program: Program, q: Value, cache: JitCache, layer: int, window: int | None
) -> Value:
    """Attend with scale 1 / sqrt(Dh): `ops.attention.paged_attention`."""
    shape, num_heads = cache.shape, q.tail[0]
    program.heads = num_heads, shape.num_kv_heads, shape.head_dim
    program.need_scratch(attention_scratch(num_heads // shape.num_kv_heads, shape.head_dim))
    out = program.value(NUM_TOKENS, *q.tail)
    scales = (None, None) if cache.scales is None else cache.scales[layer]
    program.emit(
        f"attend[{cache.elements.dtype.name}]", NUM_ITEMS, 1, shape.num_kv_heads,
        q, *cache.elements[layer], *scales, out, shape.num_blocks,
        num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, window or 0,
        1 / math.sqrt(shape.head_dim), *_multiply(program, cache),
    )  # fmt: skip
    program.emit("merge", NUM_MERGES, 1, 1, out, num_heads, shape.head_dim)
    return out


def _multiply(program: Program, cache: JitCache) -> tuple[int, int]:
    """Return the addresses of the kernels that multiply by the cache and by gathered keys."""
    dtype = cache.elements.dtype.name
    return program.address_of(f"multiply[{dtype}]"), program.address_of("multiply[float32]")
