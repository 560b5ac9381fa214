"""Sample tokens with threads, and read only the allowed logits of a row with a mask.

Every token is that of the plain operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mie.ops import sampling
from mie.ops.arrays import Floats, Ints
from mie.ops.sampling import RowControls
from mie.ops.weights import exponents, scale_of
from mie.ops_cpu.threads.workers import Workers

ROW_WORTH_SHARING = 1 << 14
"""Logits of the shortest rows that threads share.

NumPy's calls for shorter rows are so short that threads wait for each other's GIL. For rows of
2,048 and 8,192 logits, two threads took 1.1 to 1.3 times as long as one.
"""
ROWS_DRAWN = 4
"""Rows that a thread samples at a time."""
LOGITS_AT_A_TIME = 1 << 18
"""Logits whose masks are read at a time, so that their tokens stay in the cache."""
MAX_BANNED = 0.25
"""Share of banned logits above which it is faster to copy the allowed ones."""


def sample(logits: Floats, rows: Sequence[RowControls], workers: Workers) -> list[int]:
    """Compute `ops.sampling.sample`, with the rows shared out among the threads."""
    vocab_size = logits.shape[1]
    is_shared = vocab_size >= ROW_WORTH_SHARING and any(row.temperature for row in rows)
    size = ROWS_DRAWN if is_shared else max(1, LOGITS_AT_A_TIME // vocab_size)
    if len(rows) <= size:
        return _sample(logits, rows)
    token_ids = [0] * len(rows)

    def work(_: int, starts: Iterable[int]) -> None:
        for start in starts:
            some = slice(start, start + size)
            token_ids[some] = _sample(logits[some], rows[some])

    starts = range(0, len(rows), size)
    if is_shared:
        workers.share(work, starts)
    else:
        work(0, starts)
    return token_ids


def _sample(logits: Floats, rows: Sequence[RowControls]) -> list[int]:
    own = [row for row in rows if row is not sampling.GREEDY]
    if not any(row.allowed or row.forced_id is not None for row in own):
        return sampling.sample(logits, rows)
    token_ids = [0] * len(rows)
    greedy: list[int] = []
    refused: list[int] = []
    drawn: list[int] = []
    others: list[int] = []
    for i, row in enumerate(rows):
        if row.forced_id is not None:
            token_ids[i] = row.forced_id
        elif row.has_other_edits or (row.temperature > 0.0 and row.allowed is None):
            others.append(i)
        else:
            (drawn if row.temperature > 0.0 else greedy).append(i)
    if greedy:
        largest = logits.argmax(axis=-1).tolist()
        for i in greedy:
            token_ids[i], allowed = largest[i], rows[i].allowed
            if allowed is not None and not allowed.allows(largest[i]):
                refused.append(i)
    sampled: list[int] = []
    if others:
        sampled += sampling.sample(logits[others], [rows[i] for i in others])
    for masked in (refused, drawn):
        if masked:
            sampled += _sample_masked(logits, masked, [rows[i] for i in masked])
    for i, token_id in zip([*others, *refused, *drawn], sampled, strict=True):
        token_ids[i] = token_id
    return token_ids


def _sample_masked(logits: Floats, at: list[int], rows: Sequence[RowControls]) -> list[int]:
    """Sample a token for each of ``rows``, which have masks and no other edits.

    Their logits are ``logits[at]``, and all are greedy or none is. One call reads the masks of all
    rows, because a call takes as long as some thousand tokens.
    """
    vocab_size = logits.shape[1]
    words = np.array([row.allowed.words() for row in rows if row.allowed])
    banned = np.unpackbits((~words).view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    if np.count_nonzero(banned) > MAX_BANNED * banned.size:
        return _sample_few(logits, at, rows, banned == 0)
    token_ids: list[int] = []
    size = max(1, sampling.LOGITS_WEIGHED // vocab_size)
    for start in range(0, len(rows), size):
        some = slice(start, start + size)
        x = logits[at[some]]
        x.reshape(-1)[banned[some].reshape(-1).view(np.bool_).nonzero()] = -np.inf
        is_greedy = rows[start].temperature == 0.0
        token_ids += x.argmax(axis=1).tolist() if is_greedy else sampling.draw_rows(x, rows[some])
    return token_ids


def _sample_few(
    logits: Floats, at: list[int], rows: Sequence[RowControls], allowed: NDArray[np.bool_]
) -> list[int]:
    """Sample a token for each of ``rows``, and read only the logits that ``allowed`` [R, V] has."""
    num_rows, vocab_size = allowed.shape
    token_ids = [0] * num_rows
    [flat_ids] = allowed.reshape(-1).nonzero()
    bounds = np.arange(num_rows + 1) * vocab_size
    ends = flat_ids.searchsorted(bounds).tolist()
    places = flat_ids
    if num_rows < len(logits):
        shifts = np.array(at) * vocab_size - bounds[:-1]
        places = flat_ids + shifts.repeat(np.diff(ends))
    allowed_logits = logits.reshape(-1).take(places)
    some = [i for i in range(num_rows) if ends[i] < ends[i + 1]]
    begins = [ends[i] for i in some]
    largest = np.maximum.reduceat(allowed_logits, begins).tolist() if some else []
    drawn: list[tuple[int, Ints, Floats]] = []
    for i, begin, most in zip(some, begins, largest, strict=True):
        ids: Ints = flat_ids[begin : ends[i + 1]]
        x = allowed_logits[begin : ends[i + 1]]
        if rows[i].temperature == 0.0:
            if most != -math.inf:  # or nothing is possible
                token_ids[i] = int(ids[x.argmax()]) - i * vocab_size
        elif math.isfinite(most):  # or every weight would be NaN
            if 0 < rows[i].top_k < x.size:
                kept = sampling.first_ids(x, rows[i].top_k)
                ids, x = ids[kept], x[kept]
            drawn.append((i, ids, x))
    if drawn:
        columns = _draw([x for _, _, x in drawn], [rows[i] for i, _, _ in drawn], vocab_size)
        for (i, ids, _), column in zip(drawn, columns, strict=True):
            token_ids[i] = int(ids[column]) - i * vocab_size
    return token_ids


def _draw(parts: Sequence[Floats], rows: Sequence[RowControls], vocab_size: int) -> list[int]:
    """Draw an index of each part, which has the logits of a row that masks and top-k leave."""
    x, counts = np.concatenate(parts), [len(part) for part in parts]
    ends = np.cumsum([0, *counts])
    largest = np.maximum.reduceat(x, ends[:-1])
    scale = np.array([scale_of(row.temperature) for row in rows], x.dtype)
    z = exponents(x, largest.repeat(counts), scale.repeat(counts))
    return sampling.draw_columns(x, z, ends.tolist(), rows, vocab_size)
