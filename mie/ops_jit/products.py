"""Record the products of rows with a matrix, or with the matrix of each row's expert."""

from mie.base.arithmetic import ceil_div
from mie.ops.activation import ACTIVATIONS, Activation
from mie.ops.weights.integer import ACTIVATION_GROUP
from mie.ops_jit.adapters import add_adapters
from mie.ops_jit.layout import (
    BLOCK_ROWS,
    LANES,
    NUM_EXPERT_ITEMS,
    PANELS,
    ROUNDED_GROUPS,
    ROW_TILE,
    SUMS_BYTES,
    rounded_words,
)
from mie.ops_jit.memory import ExpertMatrices, JitMatrix, Panels
from mie.ops_jit.program import Program, Value
from mie.ops_jit.recorder import Recorder


def multiply(
    recorder: Recorder,
    x: Value,
    weight: JitMatrix | ExpertMatrices,
    residual: Value | None = None,
    items: Value | None = None,
) -> Value:
    """Record the product [T, N]. ``items`` are the rows of experts that a kernel has sorted."""
    program, rows, (num_outputs, num_inputs) = recorder.program, x.storage.rows, weight.shape
    out, first = program.value(rows, num_outputs), 0
    for panels, memory in zip(weight.segments, weight.arrays, strict=True):
        program.need_scratch(SUMS_BYTES + panels.widened_bytes)
        program.emit(
            f"linear{panels.kind}", *_tiles(rows, items), panels.num_groups,
            _operand(program, x, panels), memory, out, num_inputs, panels.shape[0], weight.bias,
            residual, 0 if items else rows, *recorder.multipliers(panels.kind), num_outputs, first,
            items,
        )  # fmt: skip
        first += panels.shape[0]
    if weight.slots is not None:
        add_adapters(recorder, x, weight.slots, out)
    return out


def multiply_gated(
    recorder: Recorder,
    x: Value,
    weight: JitMatrix | ExpertMatrices,
    activation: Activation,
    items: Value | None = None,
) -> Value:
    """Record a product with gate and up, and the activation while the sums are in the cache."""
    program, rows, width = recorder.program, x.storage.rows, weight.shape[0] // 2
    panels, *others = weight.segments
    # The second half may not begin with a panel. Adapters change gate and up before they meet.
    if others or width % LANES or weight.slots is not None:
        return activate(recorder, multiply(recorder, x, weight, items=items), activation)
    out, num_groups = program.value(rows, width), ceil_div(width, LANES * PANELS)
    program.need_scratch(2 * SUMS_BYTES + panels.widened_bytes)
    program.emit(
        f"gate_up{panels.kind}", *_tiles(rows, items), num_groups,
        _operand(program, x, panels), weight.arrays[0], out, weight.shape[1], width, weight.bias,
        0 if items else rows, *recorder.multipliers(panels.kind), ACTIVATIONS.index(activation),
        items,
    )  # fmt: skip
    return out


def activate(recorder: Recorder, gate_up: Value, activation: Activation) -> Value:
    """Record a gated activation."""
    rows, width = gate_up.storage.rows, gate_up.storage.width // 2
    out, kind = recorder.program.value(rows, width), ACTIVATIONS.index(activation)
    recorder.program.emit("gate_mul", rows, ROW_TILE, 1, gate_up, out, width, rows, kind)
    return out


def _tiles(rows: int, items: Value | None) -> tuple[int, int]:
    """Return the header's word with the number of rows or items, and how many make a tile."""
    return (rows, BLOCK_ROWS) if items is None else (NUM_EXPERT_ITEMS, 1)


def _operand(program: Program, x: Value, panels: Panels) -> Value:
    """Return x, or x rounded to 8 bits. Products with one order of codes share the rounded rows."""
    if panels.rounding is None:
        return x
    key = x.storage, panels.rounding
    if key not in program.rounded:
        rows, width = x.storage.rows, x.storage.width
        rounded = program.value(rows, rounded_words(width, panels.segment))
        parts = ceil_div(width, ROUNDED_GROUPS * ACTIVATION_GROUP)
        arguments = x, rounded, width, rows, parts
        program.emit(panels.rounding, rows, ROW_TILE, parts, *arguments)
        program.rounded[key] = rounded
    return program.rounded[key]
