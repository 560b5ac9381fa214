"""Sample tokens with threads, and read only the allowed logits of a row with a mask.

Every token is that of the plain operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops import sampling
from mie.ops.arrays import Floats, Ints
from mie.ops.sampling import RowControls
from mie.ops.weights import exponents, scale_of
from mie.ops_cpu.threads.workers import Workers

Words = NDArray[np.int32]
"""A bit for each token [ceil(V / 32)], as in `RowControls.allowed_words`."""

DRAWS_WORTH_SHARING = 1 << 16
"""Logits of a step below which a hand-over takes longer than it saves."""
ROWS_DRAWN = 4
"""Rows that a thread samples at a time, or more if they are short."""
LOGITS_AT_A_TIME = 1 << 18
"""Logits whose masks are read at a time, so that their tokens stay in the cache."""


def sample(logits: Floats, rows: Sequence[RowControls], workers: Workers) -> list[int]:
    """Compute `ops.sampling.sample`, with the rows shared out among the threads."""
    vocab_size = logits.shape[1]
    is_shared = logits.size >= DRAWS_WORTH_SHARING and any(row.temperature for row in rows)
    size = max(1, LOGITS_AT_A_TIME // vocab_size)
    if is_shared:
        together = sampling.LOGITS_WEIGHED // vocab_size
        size = max(ROWS_DRAWN, min(together, ceil_div(len(rows), workers.num_threads)))
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
    masks = {i: mask for i, row in enumerate(rows) if (mask := _only_mask(row)) is not None}
    if not masks:
        return sampling.sample(logits, rows)
    others = [i for i in range(len(rows)) if i not in masks]
    token_ids = [0] * len(rows)
    if any(rows[i].temperature == 0.0 for i in masks):
        token_ids = logits.argmax(axis=-1).tolist()
        for i, mask in list(masks.items()):
            if rows[i].temperature == 0.0 and _allows(mask, token_ids[i]):
                del masks[i]
    if others:
        sampled = sampling.sample(logits[others], [rows[i] for i in others])
        for i, token_id in zip(others, sampled, strict=True):
            token_ids[i] = token_id
    if masks:
        _sample_masked(logits, rows, masks, token_ids)
    return token_ids


def _only_mask(row: RowControls) -> Words | None:
    """Return the row's mask if that is all that keeps it from its logits."""
    if row.allowed_words is None or row.has_other_edits or row.forced_id is not None:
        return None
    return row.allowed_words


def _allows(words: Words, token_id: int) -> bool:
    return bool(int(words[token_id >> 5]) >> (token_id & 31) & 1)


def _sample_masked(
    logits: Floats, rows: Sequence[RowControls], masks: dict[int, Words], token_ids: list[int]
) -> None:
    """Set the tokens of the rows in ``masks``, and read only the logits that these allow.

    One call finds the allowed tokens of all rows, because a call takes as long as some thousand
    tokens.
    """
    num_rows, vocab_size = logits.shape
    words = np.zeros((num_rows, ceil_div(vocab_size, 32)), np.int32)
    for i, mask in masks.items():
        words[i] = mask
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    [allowed] = bits.reshape(-1).view(np.bool_).nonzero()
    allowed_logits = logits.reshape(-1).take(allowed)
    ends = np.searchsorted(allowed, np.arange(num_rows + 1) * vocab_size).tolist()
    drawn: list[tuple[int, Ints, Floats]] = []
    for i in masks:
        ids: Ints = allowed[ends[i] : ends[i + 1]]
        x = allowed_logits[ends[i] : ends[i + 1]]
        index = int(x.argmax()) if x.size else 0
        token_ids[i] = 0
        if not x.size or x[index] == -np.inf:
            continue  # nothing is possible
        if rows[i].temperature == 0.0:
            token_ids[i] = int(ids[index]) - i * vocab_size
        elif np.isfinite(x[index]):  # or every weight would be NaN
            if 0 < rows[i].top_k < x.size:
                kept = sampling.first_ids(x, rows[i].top_k)
                ids, x = ids[kept], x[kept]
            drawn.append((i, ids, x))
    if drawn:
        columns = _draw([x for _, _, x in drawn], [rows[i] for i, _, _ in drawn], vocab_size)
        for (i, ids, _), column in zip(drawn, columns, strict=True):
            token_ids[i] = int(ids[column]) - i * vocab_size


def _draw(parts: Sequence[Floats], rows: Sequence[RowControls], vocab_size: int) -> list[int]:
    """Draw an index of each part, which has the logits of a row that masks and top-k leave."""
    x, counts = np.concatenate(parts), [len(part) for part in parts]
    ends = np.cumsum([0, *counts])
    largest = np.maximum.reduceat(x, ends[:-1])
    scale = np.array([scale_of(row.temperature) for row in rows], x.dtype)
    z = exponents(x, largest.repeat(counts), scale.repeat(counts))
    return sampling.draw_columns(x, z, ends.tolist(), rows, vocab_size)
