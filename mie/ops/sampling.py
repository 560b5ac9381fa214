"""Turn logits into tokens: log-probabilities, logit edits, and the draw.

The edits are applied in vLLM's order: logit bias and masks, penalties, temperature, min-p, top-k,
top-p.

The random number is an input, and weights are integers (`mie.ops.token_weights`), so the same
logits, controls and number give the same token on every backend.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats, Ints
from mie.ops.token_weights import exponents, lowest_kept_z, num_weight_bits, scale_of, weights_of

LOGITS_WEIGHED = 1 << 15
"""Logits that are weighed at a time. The arrays of more would leave the caches."""


Words = NDArray[np.int32]
"""A bit for each token [ceil(V / 32)]: token i is bit i % 32 of word i // 32."""


class AllowedTokens(Protocol):
    """The tokens that a row may get. Sampling calls only the methods that it needs."""

    def words(self) -> Words:
        """Return all of them. This may take long, and may raise."""

    def allows(self, token_id: int) -> bool:
        """Return whether a token is one of them. This may take long, and may raise."""


class TokenMask:
    """Allowed tokens that are known as bits."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def words(self) -> Words:
        """Return the bits."""
        return self._words

    def allows(self, token_id: int) -> bool:
        """Return whether the bit of a token is set."""
        return bool(int(self._words[token_id >> 5]) >> (token_id & 31) & 1)


@dataclass(kw_only=True, eq=False, slots=True)
class RowControls:
    """How one row of logits becomes a token. Every id is in 0 … V - 1.

    Rows may share one, so it must not be changed. It is not frozen, because each step makes one for
    each row, and this would take four times as long.

    The edits (None: no such edit) make the row's effective logits:

    * ``bias`` (ids, values): added to the logits.
    * ``allowed_ids``: every other token gets -inf. ``banned_ids``: these get -inf.
    * ``allowed``: the same as ``allowed_ids``, as bits that are computed when they are needed.
    * ``repetition_penalty`` over ``seen_ids`` (prompt and output, each once): a positive logit is
      divided by it, a negative one multiplied (Keskar et al., 2019, arXiv:1909.05858, section 4.1).
    * ``presence_penalty`` and ``frequency_penalty``: subtracted once, and once per occurrence, for
      the tokens in ``output_ids`` (each once) with ``output_counts``, as OpenAI's API defines them.

    Then temperature 0 takes the largest logit, and the lowest id among equals. Any other
    temperature divides the logits. ``min_p`` keeps the tokens with a probability of at least
    ``min_p`` times the largest. Then ``top_k`` keeps the first k (0: all). Then ``top_p`` keeps the
    smallest set of first tokens with at least this cumulative probability. The order is by falling
    logit, then rising id. So ``top_k`` keeps at most k tokens, and ``top_k=1`` takes the token that
    temperature 0 takes. ``uniform`` in [0, 1) draws by the inverse of the cumulative distribution
    in id order. ``forced_id`` is returned regardless of the logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    bias: tuple[Ints, Floats] | None = None
    allowed_ids: Ints | None = None
    allowed: AllowedTokens | None = None
    banned_ids: Ints | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seen_ids: Ints | None = None
    output_ids: Ints | None = None
    output_counts: Ints | None = None
    forced_id: int | None = None

    @property
    def edits_logits(self) -> bool:
        """Whether the row's effective logits differ from its logits."""
        return self.allowed is not None or self.has_other_edits

    @property
    def has_other_edits(self) -> bool:
        """Whether it has an edit other than ``allowed``."""
        return not (
            self.bias is None
            and self.allowed_ids is None
            and self.banned_ids is None
            and self.seen_ids is None
            and self.output_ids is None
        )


GREEDY = RowControls()
"""Takes the largest logit. Most rows share it, so sampling calls nothing else of it."""


def sample(logits: Floats, rows: Sequence[RowControls]) -> list[int]:
    """Sample one token id for each row of ``logits`` [R, V] under its `RowControls`.

    Logits of 16 bits are widened to float32 first.
    """
    if logits.dtype.itemsize < np.dtype(np.float32).itemsize:
        logits = logits.astype(np.float32)  # the weights of tokens need its range
    vocab_size = logits.shape[-1]
    token_ids: list[int] = logits.argmax(axis=-1).tolist()
    drawn = []
    for r, row in enumerate(rows):
        if row is GREEDY:
            continue
        if row.forced_id is not None:
            token_ids[r] = row.forced_id
        elif row.temperature > 0.0:
            drawn.append(r)
        elif row.has_other_edits or not (row.allowed is None or row.allowed.allows(token_ids[r])):
            token_ids[r] = int(edit_logits(logits[r], row).argmax())
    size = max(1, LOGITS_WEIGHED // max(1, vocab_size))
    for start in range(0, len(drawn), size):
        some = drawn[start : start + size]
        x = logits[some]
        for r, edited in zip(some, x, strict=True):
            if rows[r].edits_logits:
                _edit(edited, rows[r])
        for r, token_id in zip(some, draw_rows(x, [rows[r] for r in some]), strict=True):
            token_ids[r] = token_id
    return token_ids


def edit_logits(logits: Floats, row: RowControls) -> Floats:
    """Return the effective logits [V] of a row as a new array (see `RowControls`).

    Each edit is computed in float64 and rounded to the dtype of the logits.
    """
    x: Floats = logits.copy()
    _edit(x, row)
    return x


@np.errstate(over="ignore")  # a logit that leaves the range of its dtype is infinite
def _edit(x: Floats, row: RowControls) -> None:
    if row.bias is not None:
        ids, values = row.bias
        x[ids] += values
    if row.allowed_ids is not None:
        allowed = x[row.allowed_ids]
        x.fill(-np.inf)
        x[row.allowed_ids] = allowed
    if row.allowed is not None:
        others = np.unpackbits((~row.allowed.words()).view(np.uint8), bitorder="little")
        np.copyto(x, -np.inf, where=others[: x.size].view(np.bool_))
    if row.banned_ids is not None:
        x[row.banned_ids] = -np.inf
    if row.seen_ids is not None:
        seen = x[row.seen_ids].astype(np.float64)
        penalty = row.repetition_penalty
        x[row.seen_ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if row.output_ids is not None and row.output_counts is not None:
        x[row.output_ids] -= row.presence_penalty + row.frequency_penalty * row.output_counts


def draw_rows(x: Floats, rows: Sequence[RowControls]) -> list[int]:
    """Draw a token for each row of effective logits x [R, V]."""
    vocab_size = x.shape[1]
    largest = x.max(axis=1)
    token_ids = [0] * len(rows)  # without a largest number, every weight would be NaN
    groups: dict[int, list[int]] = {}
    for r in np.flatnonzero(np.isfinite(largest)).tolist():
        top_k = rows[r].top_k
        groups.setdefault(top_k if top_k < vocab_size else 0, []).append(r)
    for top_k, group in groups.items():
        own = x if len(group) == len(rows) else x[group]
        ids = None
        if top_k:
            ids = np.stack([first_ids(row, top_k) for row in own])
            own = np.take_along_axis(own, ids, axis=1)
        columns = _draw_columns(own, largest[group], [rows[r] for r in group], vocab_size)
        for i, r in enumerate(group):
            token_ids[r] = columns[i] if ids is None else int(ids[i, columns[i]])
    return token_ids


def _draw_columns(
    x: Floats, largest: Floats, rows: Sequence[RowControls], vocab_size: int
) -> list[int]:
    """Draw a column from each row of x [R, n] under min-p and top-p.

    The rows have the tokens that top-k and masks leave, by rising id. ``largest`` is [R].
    """
    scale = np.array([[scale_of(row.temperature)] for row in rows], x.dtype)
    z = exponents(x, largest[:, None], scale)
    dropped = [
        own < x.dtype.type(lowest_kept_z(row.min_p)) if row.min_p > 0.0 else None
        for own, row in zip(z, rows, strict=True)
    ]
    weights = weights_of(z, num_weight_bits(vocab_size))
    columns = []
    for logits, own, mask, row in zip(x, weights, dropped, rows, strict=True):
        if mask is not None:
            own[mask] = 0
        if row.top_p < 1.0:
            nucleus = nucleus_ids(logits, own, row.top_p)
            columns.append(int(nucleus[draw(own[nucleus], row.uniform)]))
        else:
            columns.append(draw(own, row.uniform))
    return columns


def first_ids(x: Floats, count: int) -> Ints:
    """Return the ids of the first ``count`` logits of x [V], rising.

    The order is "logit falling, id rising". Top-k: Fan et al., 2018, arXiv:1805.04833.
    """
    return _first(x, count, np.partition(x, -count)[-count])


def _first(x: Floats, count: int, last: float) -> Ints:
    """Return the ids of the first ``count`` logits. The last one is ``last``."""
    ids = np.flatnonzero(x >= last)
    if ids.size > count:  # some of those that equal the last are too many
        ties = np.flatnonzero(x[ids] == last)
        ids = np.delete(ids, ties[count - ids.size :])
    return ids


def nucleus_ids(x: Floats, weights: NDArray[np.int64], top_p: float) -> Ints:
    """Return the ids of the nucleus of the logits x [V] with these weights [V], rising.

    The nucleus is the smallest set of first tokens, in the order of `first_ids`, with weights that
    sum to at least top_p times the total (Holtzman et al., 2019, arXiv:1904.09751). The weights of
    the last tokens may be 0, but not all.
    """
    total = int(weights.sum())
    wanted = min(max(math.ceil(top_p * float(total)), 1), total)
    # Tokens up to this weight together have at most the weight that the nucleus may lack.
    # The others reach it, and so does the smallest set of first tokens that contains them.
    heavy = x[weights > (total - wanted) // weights.size]
    ids = np.flatnonzero(x >= heavy.min())
    values = x[ids]
    order = np.argsort(values)[::-1]  # the order of equal ones does not change the sums
    count = int(np.searchsorted(np.cumsum(weights[ids[order]]), wanted)) + 1
    return ids[_first(values, count, values[order[count - 1]])]


def draw(weights: NDArray[np.int64], uniform: float) -> int:
    """Return the first id with a cumulative weight above ``uniform`` times the total.

    The weights [V] are not negative, and at least one is positive.
    """
    cumulative = weights.cumsum()
    total = int(cumulative[-1])
    target = min(int(uniform * float(total)), total - 1)
    return int(cumulative.searchsorted(target, "right"))


def log_total(logits: Floats, largest: float) -> float:
    """Return log Σ exp(logits - largest) of logits [V], in float64."""
    wide = logits.astype(np.float64)
    wide -= largest
    return float(np.log(np.exp(wide, out=wide).sum()))


def top_logprobs(
    logits: Floats,
    token_id: int,
    num_top: int,
    log_total: Callable[[Floats, float], float] = log_total,
) -> tuple[list[int], list[float], int]:
    """Return (ids, log-probabilities, rank of token_id): token_id, then the num_top likeliest.

    logits [V] are used before any edit or temperature. -1 stands for the whole vocabulary. The top
    ids come by falling logit, equal ones by rising id. The most likely token has rank 1.
    Log-probabilities are float64: logit - largest - ``log_total``.
    """
    largest = float(logits.max())
    total = log_total(logits, largest)
    count = logits.size if num_top < 0 else min(num_top, logits.size)
    top = np.empty(0, np.int64)
    if count:
        candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
        top = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
    rank = 1 + int(np.count_nonzero(logits > logits[token_id]))
    ids = [token_id, *(i for i in top.tolist() if i != token_id)]
    logprobs = logits[ids].astype(np.float64) - largest - total
    return ids, logprobs.tolist(), rank
