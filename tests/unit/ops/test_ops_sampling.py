"""Compare the edits of a row of logits, and the draw, with plain Python and the oracle."""

import math
from collections import Counter
from fractions import Fraction
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mie.ops.sampling import (
    RowControls,
    TokenMask,
    edit_logits,
    first_ids,
    nucleus_ids,
    sample,
    top_logprobs,
)
from mie.ops.token_weights import exponents, lowest_kept_z, num_weight_bits, scale_of, weights_of

DTYPES = ("float32", "float64")
INF = math.inf


def frozen(values: Any, dtype: Any = float) -> np.ndarray:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


def normal(size: int, seed: int = 0, dtype: str = "float64") -> np.ndarray:
    return frozen(np.random.default_rng([seed, size]).normal(0, 3, size), dtype)


# Greedy.


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_largest_and_the_lowest_id_among_equals(dtype: str):
    logits = frozen([[0, 3, 3, 1], [5, 5, 5, 5], [-2, -4, -1, -1], [-INF, -INF, -9, -INF]], dtype)
    assert sample(logits, [RowControls()] * 4) == [1, 0, 2, 2]
    # The same with edits, which use another code path.
    edited = RowControls(bias=(np.array([0]), np.array([0.0])))
    assert sample(logits, [edited] * 4) == [1, 0, 2, 2]


# The edits, each alone.


def test_edits_are_computed_in_float64_and_rounded_once():
    logits = frozen([2**24, 2**24 + 2], np.float32)
    bias = (np.array([0, 1]), np.array([3.0, 1 + 2.0**-40]))  # float32 rounds 1 + 2**-40 to 1
    assert edit_logits(logits, RowControls(bias=bias)).tolist() == [2**24 + 4, 2**24 + 4]
    half = RowControls(seen_ids=np.array([0]), repetition_penalty=1 / (1 + 2.0**-24 + 2.0**-40))
    assert edit_logits(frozen([1.0], np.float32), half).tolist() == [1 + 2.0**-23]


def test_the_edits_follow_their_definitions():
    row = RowControls(
        bias=(np.array([1]), np.array([0.5])),
        repetition_penalty=2.0,
        seen_ids=np.array([0, 2, 3]),
        presence_penalty=0.25,
        frequency_penalty=0.125,
        output_ids=np.array([2, 3]),
        output_counts=np.array([1, 3]),
    )
    edited = edit_logits(np.array([-1.0, 1.0, 2.0, 4.0]), row)
    assert edited.tolist() == [-2.0, 1.5, 1.0 - 0.375, 2.0 - 0.625]
    row = RowControls(allowed_ids=np.array([1, 3]), banned_ids=np.array([3]))
    assert edit_logits(np.array([1.0, 2.0, 3.0, 4.0]), row).tolist() == [-INF, 2.0, -INF, -INF]


def test_an_edit_may_leave_the_range_of_float32():
    logits = frozen([-2.0, 1.0, 3.0], np.float32)
    row = RowControls(seen_ids=np.array([0]), repetition_penalty=1e300, temperature=1.0)
    assert edit_logits(logits, row).tolist() == [-INF, 1.0, 3.0]
    assert sample(logits[None], [row]) == [1]


# Kept tokens.


def weigh(x: np.ndarray) -> np.ndarray:
    """Return the weights [V] at temperature 1."""
    scale = np.array([scale_of(1.0)], x.dtype)
    return weights_of(exponents(x, x.max(keepdims=True), scale), num_weight_bits(x.size))


def kept(logits: Any, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Return the tokens with a weight that min-p, top-k and top-p keep."""
    x = np.array(logits, float)
    ids = first_ids(x, top_k) if 0 < top_k < x.size else np.arange(x.size)
    weights = weigh(x)[ids]
    z = exponents(x[ids], x.max(keepdims=True), np.array([scale_of(1.0)]))
    weights[z < lowest_kept_z(min_p)] = 0
    if top_p < 1:
        ids = ids[nucleus_ids(x[ids], weights, top_p)]
        return ids.tolist()
    return ids[weights > 0].tolist()


def sixteen_bit_logits(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a row rounded to few bits as in a 16-bit model, so that many logits are equal."""
    row = rng.normal(0, rng.choice([0.01, 1.0, 8.0]), size) + rng.choice([0.0, 100.0])
    dtype = rng.choice(["float16", "bfloat16", "rounded", "constant"])
    if dtype == "constant":
        return np.full(size, row[0])
    if dtype == "rounded":
        return np.round(row)
    rounded = row.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    return rounded.astype(np.float64)


def kept_by_a_full_sort(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the kept tokens by one stable sort of the whole row."""
    order = np.argsort(-x, kind="stable").tolist()
    weights = {i: math.exp(x[i] - x.max()) for i in order if x[i] > -INF}
    least = max(min_p, 2.0 ** (x.size.bit_length() - 62))
    ids = [i for i in order if weights.get(i, 0) >= least]
    ids = ids[: top_k or None]
    if top_p == 1.0:
        return sorted(ids)
    wanted = top_p * math.fsum(weights[i] for i in ids)
    sums = list(accumulate(weights[i] for i in ids))
    return sorted(ids[: 1 + sum(reached < wanted for reached in sums[:-1])])


@pytest.mark.parametrize("seed", range(100))
def test_rows_full_of_ties_are_cut_as_a_full_sort_cuts_them(seed: int):
    rng = np.random.default_rng([17, seed])
    size = int(rng.choice([2, 5, 40, 100, 700]))
    row = RowControls(
        bias=(np.arange(3) % size, np.full(3, 0.5)) if rng.random() < 0.3 else None,
        allowed_ids=rng.permutation(size)[: size // 2 + 1] if rng.random() < 0.3 else None,
        banned_ids=rng.permutation(size)[: size // 3] if rng.random() < 0.2 else None,
        repetition_penalty=1.25,
        seen_ids=rng.permutation(size)[: size // 2] if rng.random() < 0.3 else None,
        presence_penalty=0.5,
        output_ids=np.arange(0, size, 3) if rng.random() < 0.3 else None,
        output_counts=np.ones(len(range(0, size, 3)), int),
    )
    x = edit_logits(sixteen_bit_logits(rng, size), row)
    if x.max() == -INF:
        x[:] = 0.0
    x = (x - x.max()) / rng.choice([0.25, 1.0, 2.0])
    top_k = int(rng.choice([0, 1, 2, size // 2, size - 1, size, size + 5]))
    top_p = float(rng.choice([1.0, 0.05, 0.3, 0.5, 0.9, 0.99]))
    min_p = float(rng.choice([0.0, 0.0, 0.3]))
    ids = kept(x, top_k=top_k, top_p=top_p, min_p=min_p)
    assert ids == kept_by_a_full_sort(x, top_k, top_p, min_p)
    assert not top_k or len(ids) <= top_k


# The draw.


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_evenly_spread_numbers_give_every_token_its_share(temperature: float):
    """The inverse of a distribution maps n equidistant numbers to n p ± 1 of each token."""
    logits, n = normal(12, seed=3), 4000
    row = [math.exp(value / temperature) for value in logits.tolist()]
    counts = Counter(
        sample(logits[None], [RowControls(temperature=temperature, uniform=(i + 0.5) / n)])[0]
        for i in range(n)
    )
    for token, weight in enumerate(row):
        assert abs(counts[token] - n * weight / math.fsum(row)) <= 1


# Log-probabilities.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_top", [0, 1, 3, 6, 7, 100, -1])
def test_top_logprobs(num_top: int, dtype: str):
    """The log-probabilities are those of a softmax in Python's floats."""
    logits = frozen([1.0, 3.0, 2.0, 3.0, -1.0, 3.0], dtype)
    order = [1, 3, 5, 2, 0, 4]  # falling, equal ones by rising id
    total = math.log(math.fsum(math.exp(value) for value in logits.tolist()))
    for token_id, rank in zip(order, [1, 1, 1, 4, 5, 6], strict=True):
        ids, logprobs, got_rank = top_logprobs(logits, token_id, num_top)
        top = order if num_top < 0 else order[:num_top]
        assert ids == [token_id, *(i for i in top if i != token_id)]
        assert logprobs == pytest.approx([float(logits[i]) - total for i in ids], rel=1e-14)
        assert got_rank == rank
        assert all(type(i) is int for i in ids)
        assert all(type(value) is float for value in logprobs)


def test_top_logprobs_of_forbidden_tokens_and_of_one_token():
    ids, logprobs, rank = top_logprobs(frozen([-INF, 1e4, -1e4]), 0, 1)
    assert (ids, logprobs, rank) == ([0, 1], [-INF, 0.0], 3)
    assert top_logprobs(frozen([3.0]), 0, 5) == ([0], [0.0], 1)


def test_a_nucleus_is_the_smallest_set_that_reaches_top_p_exactly():
    rng = np.random.default_rng(1)
    for _ in range(400):
        size = int(rng.integers(1, 9))
        weights = -np.sort(-rng.integers(0, 8, size))
        weights[0] += 1
        x = -np.sort(-rng.normal(size=size))
        share = Fraction(int(rng.integers(1, 64)), 64)
        sums = np.cumsum(weights).tolist()
        count = next(n for n, each in enumerate(sums, 1) if each >= share * sums[-1])
        order = rng.permutation(size)
        found = nucleus_ids(x[order], weights[order], float(share))
        assert sorted(order[found].tolist()) == [*range(count)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_logits_of_16_bits_are_sampled_as_their_float32_values(dtype: type):
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(200, 300)) * 4).astype(dtype)
    rows = [
        RowControls(
            temperature=float(rng.choice([0.3, 1.0, 2.0])),
            top_p=float(rng.choice([0.5, 0.9, 1.0])),
            uniform=float(rng.random()),
        )
        for _ in logits
    ]
    wanted = sample(logits.astype(np.float32), rows)
    assert sample(logits, rows) == wanted


class _OneToken:
    """Allow one token, and compute no mask."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def words(self) -> np.ndarray:
        raise AssertionError("a mask is computed")

    def allows(self, token_id: int) -> bool:
        return token_id == self._token_id


def test_a_greedy_row_whose_largest_logit_is_allowed_needs_no_mask():
    logits = np.random.default_rng(5).normal(size=(4, 50)).astype("float32")
    largest = logits.argmax(axis=1).tolist()
    rows = [RowControls(allowed=_OneToken(token_id)) for token_id in largest]
    assert sample(logits, rows) == largest
    rows[1] = RowControls(forced_id=7, temperature=1.0)
    rows[2] = RowControls(allowed=TokenMask(np.array([1 << 9, 0], np.int32)))
    assert sample(logits, rows) == [largest[0], 7, 9, largest[3]]
