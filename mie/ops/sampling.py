"""Turn logits into tokens: softmax, logit edits, and the draw.

The edits are applied in vLLM's order: logit bias and masks, penalties, temperature, min-p, top-k,
top-p.
The random number is an input, so the same logits, controls and number give the same token on every
backend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats, Ints


def softmax(x: Floats) -> Floats:
    """Return exp(x) / sum(exp(x)) over the last axis as a new array, stable at ±1e4 and beyond."""
    y: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    return y


def log_softmax(x: Floats) -> Floats:
    """Return log(softmax(x)) over the last axis as a new array, stable at ±1e4 and beyond."""
    y: Floats = x - x.max(axis=-1, keepdims=True)
    y -= np.log(np.exp(y).sum(axis=-1, keepdims=True))
    return y


@dataclass(kw_only=True, eq=False, slots=True)
class RowControls:
    """How one row of logits becomes a token. Every id is in 0 … V - 1.

    Rows may share one, so it must not be changed. It is not frozen, because each step makes one for
    each row, and this would take four times as long.

    The edits (None: no such edit) make the row's effective logits:

    * ``bias`` (ids, values): added to the logits.
    * ``allowed_ids``: every other token gets -inf. ``banned_ids``: these get -inf.
    * ``allowed_words``: in place of ``allowed_ids``, a bit for each token [ceil(V / 32)] int32.
      Token i is allowed if bit i % 32 of word i // 32 is set.
    * ``repetition_penalty`` over ``seen_ids`` (prompt and output, each once): a positive logit is
      divided by it, a negative one multiplied (Keskar et al., 2019, arXiv:1909.05858, section 4.1).
    * ``presence_penalty`` and ``frequency_penalty``: subtracted once, and once per occurrence, for
      the tokens in ``output_ids`` (each once) with ``output_counts``, as OpenAI's API defines them.

    Then temperature 0 takes the largest logit, and the lowest id among equals. Any other
    temperature divides the logits. ``min_p`` keeps the tokens whose probability is at least
    ``min_p`` times the largest. Then ``top_k`` keeps the first k (0: all). Then
    ``top_p`` keeps the smallest set of first tokens with at least this cumulative probability. The
    order is by falling probability, then rising id. So ``top_k`` keeps at most k tokens, and
    ``top_k=1`` takes the token that temperature 0 takes. ``uniform`` in [0, 1) draws by the inverse
    of the cumulative distribution in id order. ``forced_id`` is returned regardless of the logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    bias: tuple[Ints, Floats] | None = None
    allowed_ids: Ints | None = None
    allowed_words: NDArray[np.int32] | None = None
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
        return self.allowed_words is not None or self.has_other_edits

    @property
    def has_other_edits(self) -> bool:
        """Whether it has an edit other than ``allowed_words``."""
        return not (
            self.bias is None
            and self.allowed_ids is None
            and self.banned_ids is None
            and self.seen_ids is None
            and self.output_ids is None
        )


def sample(logits: Floats, rows: Sequence[RowControls]) -> list[int]:
    """Sample one token id for each row of ``logits`` [R, V] under its `RowControls`."""
    greedy = logits.argmax(axis=-1).tolist()
    return [
        sample_row(logits[r], row) if _needs_own_pass(row) else greedy[r]
        for r, row in enumerate(rows)
    ]


def _needs_own_pass(row: RowControls) -> bool:
    return row.temperature > 0.0 or row.edits_logits or row.forced_id is not None


def sample_row(logits: Floats, row: RowControls) -> int:
    """Sample one token id for one row of logits [V]."""
    if row.forced_id is not None:
        return row.forced_id
    x = edit_logits(logits, row)
    if row.temperature == 0.0:
        return int(x.argmax())
    return draw_row(x, row, x.size) or 0


def draw_row(x: Floats, row: RowControls, vocab_size: int) -> int | None:
    """Draw from effective logits x, float64, and return the index in x. x is edited.

    x has the logits of all tokens [V], or of any that include all whose logits are not -inf, by
    rising id. The token is the same. Return None if the largest logit is not finite.
    """
    largest = x.max()
    if not np.isfinite(largest):
        return None  # Every weight would be NaN.
    x -= largest
    with np.errstate(over="ignore"):  # A tiny temperature gives -inf.
        x /= row.temperature
    return draw(keep_likely(x, row.top_k, row.top_p, row.min_p, vocab_size), row.uniform)


def edit_logits(logits: Floats, row: RowControls) -> Floats:
    """Return the effective logits [V] of a row, float64, as a new array (see `RowControls`)."""
    x = logits.astype(np.float64)
    if row.bias is not None:
        ids, values = row.bias
        x[ids] += values
    if row.allowed_ids is not None:
        allowed = x[row.allowed_ids]
        x.fill(-np.inf)
        x[row.allowed_ids] = allowed
    if row.allowed_words is not None:
        others = np.unpackbits((~row.allowed_words).view(np.uint8), bitorder="little")
        np.copyto(x, -np.inf, where=others[: x.size].view(np.bool_))
    if row.banned_ids is not None:
        x[row.banned_ids] = -np.inf
    if row.seen_ids is not None:
        seen = x[row.seen_ids]
        penalty = row.repetition_penalty
        x[row.seen_ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if row.output_ids is not None and row.output_counts is not None:
        x[row.output_ids] -= row.presence_penalty + row.frequency_penalty * row.output_counts
    return x


def keep_likely(
    x: Floats, top_k: int, top_p: float, min_p: float, vocab_size: int | None = None
) -> Floats:
    """Set to -inf the logits of every token that min-p, top-k or top-p drops. x is edited.

    x has the logits of all tokens [V]. If logits of -inf are left out, ``vocab_size`` tells V.

    min-p: Nguyen et al., 2024, arXiv:2407.01082; top-k: Fan et al., 2018, arXiv:1805.04833; top-p:
    Holtzman et al., 2019, arXiv:1904.09751.
    """
    if min_p > 0.0:
        x[x < x.max() + np.log(min_p)] = -np.inf
    if 0 < top_k < x.size:
        _keep_first(x, top_k, np.partition(x, -top_k)[-top_k])
    if top_p < 1.0:
        _keep_first(x, *_nucleus(x, top_p, vocab_size or x.size))
    return x


def _keep_first(x: Floats, count: int, last: float) -> None:
    """Keep the first ``count`` tokens of x [V], in the order "logit falling, id rising".

    ``last`` is the logit of the last of them.
    """
    num_above = int(np.count_nonzero(x > last))
    ties = np.flatnonzero(x == last)
    x[x < last] = -np.inf
    x[ties[count - num_above :]] = -np.inf


def _nucleus(x: Floats, top_p: float, vocab_size: int) -> tuple[int, float]:
    """Return the size of the nucleus and the logit of its last token.

    The nucleus is the smallest set of first tokens, in the order of `_keep_first`, whose weights
    exp(x - max) sum to at least top_p times the total.

    The weights are rounded down to integers whose sum stays below 2**62. Integer sums are exact in
    any order, so every backend ends the nucleus at the same token.
    """
    largest, size = x.max(), x.size
    scale = 2.0 ** (62 - vocab_size.bit_length())
    total = int((np.exp(x - largest) * scale).astype(np.int64).sum())
    wanted = min(max(math.ceil(top_p * float(total)), 1), total)
    count = min(64, size)
    while True:  # the head is nearly always enough, without a sort of the vocabulary
        head = np.sort(np.partition(x, size - count)[size - count :])[::-1]
        weights = (np.exp(head - largest) * scale).astype(np.int64)
        inside = int(np.searchsorted(np.cumsum(weights), wanted))
        if inside < count or count == size:
            inside = min(inside, count - 1)
            return inside + 1, float(head[inside])
        count = min(count * 8, size)


def draw(x: Floats, uniform: float) -> int:
    """Return the first id whose cumulative probability exceeds ``uniform``. x [V] holds logits."""
    cumulative = np.cumsum(np.exp(x - x.max()))
    token_id = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding can carry the product up to the total itself. Then take the last possible token.
    return min(token_id, int(np.searchsorted(cumulative, cumulative[-1])))


def top_logprobs(logits: Floats, token_id: int, num_top: int) -> tuple[list[int], list[float], int]:
    """Return (ids, log-probabilities, rank of token_id): token_id, then the num_top likeliest.

    logits [V] are used before any edit or temperature. -1 asks for the whole vocabulary. The top
    ids come by falling logit, equal ones by rising id. The most likely token has rank 1.
    """
    logprobs = log_softmax(logits.astype(np.float64))
    count = logprobs.size if num_top < 0 else min(num_top, logprobs.size)
    top = np.empty(0, np.int64)
    if count:
        threshold = np.partition(logprobs, -count)[-count]
        candidates = np.flatnonzero(logprobs >= threshold)
        top = candidates[np.argsort(-logprobs[candidates], kind="stable")][:count]
    rank = 1 + int(np.count_nonzero(logprobs > logprobs[token_id]))
    ids = [token_id, *(i for i in top.tolist() if i != token_id)]
    return ids, logprobs[ids].tolist(), rank
