"""Sample tokens with threads, and read only the allowed logits of a row with a mask.

Every token is that of the plain operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops import sampling
from mie.ops.arrays import Floats
from mie.ops.sampling import RowControls
from mie.ops_cpu.threads.workers import Workers

Words = NDArray[np.int32]
"""A bit for each token [ceil(V / 32)], as in `RowControls.allowed_words`."""

DRAWS_WORTH_SHARING = 1 << 16
"""Logits of a step below which a hand-over takes longer than it saves."""
ROWS_DRAWN = 4
"""Rows that a thread samples at a time, if random numbers are needed."""
LOGITS_AT_A_TIME = 1 << 18
"""Logits whose masks are read at a time, so that their tokens stay in the cache."""


def sample(logits: Floats, rows: Sequence[RowControls], workers: Workers) -> list[int]:
    """Compute `ops.sampling.sample`, with the rows shared out among the threads."""
    is_shared = logits.size >= DRAWS_WORTH_SHARING and any(row.temperature for row in rows)
    size = ROWS_DRAWN if is_shared else max(1, LOGITS_AT_A_TIME // logits.shape[1])
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
    needs_argmax = any(row.temperature == 0.0 for row in rows)
    token_ids = logits.argmax(axis=-1).tolist() if needs_argmax else [0] * len(rows)
    masks: dict[int, Words] = {}  # of the rows whose only edit is a mask
    for i, row in enumerate(rows):
        if row.forced_id is not None or row.has_other_edits:
            token_ids[i] = sampling.sample_row(logits[i], row)
        elif row.allowed_words is not None:
            if row.temperature > 0.0 or not _allows(row.allowed_words, token_ids[i]):
                masks[i] = row.allowed_words
        elif row.temperature > 0.0:
            token_ids[i] = sampling.sample_row(logits[i], row)
    if masks:
        _sample_masked(logits, rows, masks, token_ids)
    return token_ids


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
    for i in masks:
        x = allowed_logits[ends[i] : ends[i + 1]]
        index = _choose(x, rows[i], vocab_size) if x.size else None
        token_ids[i] = 0 if index is None else int(allowed[ends[i] + index]) - i * vocab_size


def _choose(x: Floats, row: RowControls, vocab_size: int) -> int | None:
    """Return the index of the token in x, which has the allowed logits, or None as `draw_row`."""
    if row.temperature > 0.0:
        return sampling.draw_row(x.astype(np.float64), row, vocab_size)
    index = int(x.argmax())
    return None if x[index] == -np.inf else index
