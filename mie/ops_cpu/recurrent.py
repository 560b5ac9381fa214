"""Compute the recurrences and convolutions of many sequences at once, or with threads.

Every number equals that of the plain operators bit for bit.
"""

from collections.abc import Sequence

import numpy as np

from mie.ops.arrays import Bools, Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops.numpy_recurrent import Recurrence, slots_of
from mie.ops.recurrent import causal_conv, convolve, runs
from mie.ops_cpu.workers import Workers

WORTH_SHARING = 1 << 18
"""Numbers of a step's states, times tokens, below which a hand-over takes longer than it saves."""


def conv_with_decodes(
    x: Floats, weight: Floats, bias: Floats | None, columns: Floats, of: tuple[Ints, Ints, Bools]
) -> Floats:
    """Compute `causal_conv` with all sequences of one token in few calls."""
    starts, slots, fresh = of
    decodes = np.flatnonzero(np.diff(starts) == 1)
    if decodes.size < 2:
        return causal_conv(x, weight, bias, columns, of)
    y = np.empty_like(x)
    rows, own = starts[decodes], slots[decodes]
    before = columns[own]
    before[fresh[decodes]] = 0
    inputs = np.concatenate([before, x[rows, None]], axis=1)
    columns[own] = inputs[:, 1:]
    y[rows] = convolve(inputs, weight, bias)[:, 0]
    for s in np.flatnonzero(np.diff(starts) != 1).tolist():
        tokens = slice(int(starts[s]), int(starts[s + 1]))
        one = np.array([0, tokens.stop - tokens.start]), slots[s : s + 1], fresh[s : s + 1]
        y[tokens] = causal_conv(x[tokens], weight, bias, columns, one)
    return y


def recur_with_threads(
    recurrence: Recurrence,
    of_tokens: Sequence[Floats],
    others: Sequence[Floats],
    states: Floats,
    batch: StepBatch,
    workers: Workers,
) -> Floats:
    """Run a recurrence over sequences. The threads share sequences, and heads of each.

    ``of_tokens`` [T, G or H, …] have the letters of `mie.ops.recurrent`.
    """
    heads, num_tokens = states.shape[1], len(of_tokens[0])
    num_groups = min(each.shape[1] for each in of_tokens)
    units = heads if num_groups == 1 else num_groups
    is_worth = states[0].size * num_tokens >= WORTH_SHARING
    parts = max(n for n in range(1, workers.num_threads + 1) if units % n == 0) if is_worth else 1
    y = np.empty((num_tokens, heads, states.shape[-1]), states.dtype)

    def cut(array: Floats, axis: int, part: int) -> Floats:
        """Return a part of the heads, or of the groups. One group serves all heads."""
        size = array.shape[axis]
        if size == 1 and heads > 1:
            return array
        some = slice(part * size // parts, (part + 1) * size // parts)
        return array[some] if axis == 0 else array[:, some]

    def work(item: tuple[tuple[int, int, int, bool], int]) -> None:
        (begin, end, slot, is_fresh), part = item
        state = cut(states[slot], 0, part)
        if is_fresh:
            state[...] = 0
        own = [cut(each[begin:end], 1, part) for each in of_tokens]
        cut(y[begin:end], 1, part)[...] = recurrence(
            *own, *(cut(each, 0, part) for each in others), state
        )

    sequences = runs(batch.cu_seqlens_q, *slots_of(batch))
    items = [(run, part) for run in sequences for part in range(parts)]
    workers.share(work, items, None if is_worth else 1)
    return y.reshape(num_tokens, -1)
