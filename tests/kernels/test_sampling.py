"""Compare sampling on the device with `ops.sampling`, on the emulator.

Thousands of rows have random controls. Each gives the token that the NumPy operator gives for the
same logits in float32, in any order of threads and blocks: both compute the same integers.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import MODES, PoisoningLauncher, mode

from mie.ops import sampling
from mie.ops.sampling import RowControls, TokenMask
from mie.ops.token_weights import exponents, num_weight_bits, scale_of, weights_of
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.queue import EmulatedQueue
from mie.ops_gpu.sampling import MAX_ROWS, MAX_TOP, PART, Sampler, top_logprobs

__all__ = ["mode"]
pytestmark = needs_compiler

JUST_BELOW_1 = float(np.nextafter(1, 0))
INF = float("inf")


def sample(launcher: Any, logits: np.ndarray, rows: list[RowControls]) -> list[int]:
    sampler = Sampler(launcher, EmulatedQueue())
    return sampler.finish(sampler.start(logits, rows))


def choose(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def random_ids(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Return distinct ids in random order, sometimes none or all."""
    count = choose(rng, 0, 1, min(20, vocab_size), vocab_size)
    return rng.permutation(vocab_size)[: rng.integers(count + 1)]


def random_controls(rng: np.random.Generator, vocab_size: int) -> RowControls:
    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.3 else None

    bias_ids, output_ids = random_ids(rng, vocab_size), random_ids(rng, vocab_size)
    has_output = rng.random() < 0.3
    words = rng.integers(-(2**31), 2**31, -(-vocab_size // 32)).astype(np.int32)
    words &= rng.integers(-(2**31), 2**31, words.size).astype(np.int32)
    allowed = maybe(TokenMask(words))
    return RowControls(
        temperature=choose(rng, 0.0, 1e-300, 1e-3, 0.5, 1.0, 1.0, 1.7, 50.0, 1e300),
        top_k=choose(rng, 0, 0, 1, 2, 3, 17, vocab_size // 2, vocab_size, vocab_size + 1),
        top_p=choose(rng, 1.0, 1.0, 0.0, 1e-9, rng.random(), 0.9, JUST_BELOW_1),
        min_p=choose(rng, 0.0, 0.0, 1e-4, 0.1, rng.random(), 1.0),
        uniform=choose(rng, 0.0, JUST_BELOW_1, *rng.random(6)),
        bias=maybe((bias_ids, rng.normal(scale=5, size=bias_ids.size))),
        allowed_ids=maybe(random_ids(rng, vocab_size)) if allowed is None else None,
        allowed=allowed,
        banned_ids=maybe(random_ids(rng, vocab_size)),
        repetition_penalty=choose(rng, 1.0, 0.7, 1.3),
        presence_penalty=choose(rng, 0.0, -0.3, 1.1),
        frequency_penalty=choose(rng, 0.0, 0.1, -0.7),
        seen_ids=maybe(random_ids(rng, vocab_size)),
        output_ids=output_ids if has_output else None,
        output_counts=rng.integers(1, 9, output_ids.size) if has_output else None,
        forced_id=int(rng.integers(vocab_size)) if rng.random() < 0.05 else None,
    )


def random_logits(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Return a row that is smooth, full of ties, constant, or has impossible tokens."""
    row = choose(rng, 1.0, 4.0, 30.0) * rng.normal(size=vocab_size)
    if rng.random() < 0.3:
        row = np.round(row)
    if rng.random() < 0.3:
        row[rng.random(vocab_size) < choose(rng, 0.1, 0.9, 1.0)] = -np.inf
    if rng.random() < 0.1:
        row[:] = 2.5
    return row


def numpy_tokens(logits: np.ndarray, rows: list[RowControls]) -> list[int]:
    """Return the tokens that the operator samples from the same numbers in float32."""
    with np.errstate(all="ignore"):
        return sampling.sample(logits.astype(np.float32), rows)


def check_rows(mode: str, logits: np.ndarray, rows: list[RowControls]) -> None:
    got = sample(PoisoningLauncher(mode), logits, rows)
    assert all(type(token_id) is int for token_id in got)
    wanted = numpy_tokens(logits, rows)
    parted = [(r, got[r], wanted[r], rows[r]) for r in range(len(rows)) if got[r] != wanted[r]]
    assert not parted


SIZES = {1: 20, 7: 100, 40: 150, 1000: 60, 5000: 24, PART + 1: 16, 3 * PART - 500: 12}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_random_controls_give_the_tokens_of_numpy(mode: str, dtype: str, vocab_size: int):
    num_rows = SIZES[vocab_size] if mode == "forward" else SIZES[vocab_size] // 4
    rng = np.random.default_rng([vocab_size, len(dtype)])
    logits = np.stack([random_logits(rng, vocab_size) for _ in range(num_rows)])
    rows = [random_controls(rng, vocab_size) for _ in range(num_rows)]
    check_rows(mode, logits.astype(DTYPES[dtype]), rows)


def hostile_logits(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Return a float32 row of numbers that no model gives."""
    kind = rng.integers(8)
    row = rng.normal(size=vocab_size)
    if kind == 0:
        row *= 1e38  # differences overflow
    elif kind == 1:
        row *= 10.0 ** rng.integers(-45, 38, size=vocab_size)  # subnormal numbers among others
    elif kind == 2:
        row = np.where(row > 0, 0.0, -0.0)
    elif kind == 3:
        row = 12.0 + rng.integers(-3, 4, size=vocab_size) * 2.0**-20  # neighbouring floats
    elif kind == 4:
        row = np.full(vocab_size, -INF)
        row[rng.integers(vocab_size, size=3)] = rng.normal()  # three equal candidates, or fewer
    elif kind == 5:
        row[rng.integers(vocab_size)] = choose(rng, INF, np.nan, -np.nan)
    elif kind == 6:
        row = -np.arange(vocab_size) * choose(rng, 1e-4, 0.3, 17.0)  # a long, even tail
    else:
        row = rng.permutation(np.repeat(rng.normal(size=2), -(-vocab_size // 2))[:vocab_size])
    with np.errstate(over="ignore"):
        return row.astype(np.float32)


@pytest.mark.parametrize("num_rows", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocab_size", [1, 2, 33, 1025, PART + 77])
def test_hostile_rows_give_the_tokens_of_numpy(vocab_size: int, num_rows: int):
    """Rows with edits have no subnormal logits, which a chip flushes."""
    rng = np.random.default_rng([31, vocab_size])
    rows = []
    for _ in range(num_rows):
        row = random_controls(rng, vocab_size)
        edge = {
            "top_p": choose(rng, row.top_p, 5e-324, 1.0, JUST_BELOW_1, 0.5),
            "top_k": choose(rng, row.top_k, 1, vocab_size, 2**40),
            "temperature": choose(rng, row.temperature, 5e-324, 1e-30, 1e30, 1e308, 1.0),
        }
        rows.append(replace(row, **edge))
    logits = np.stack([hostile_logits(rng, vocab_size) for _ in rows])
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            check_rows(choose(rng, *MODES[:4]), logits.astype(DTYPES[dtype]), rows)


@pytest.mark.parametrize("vocab_size", [50, 700, PART + 300])
def test_rows_at_the_border_of_two_tokens_give_the_tokens_of_numpy(vocab_size: int):
    """A last bit of a weight or of a sum decides these rows, by the uniform number or by top-p."""
    rng = np.random.default_rng([41, vocab_size])
    num_rows = 20
    x = rng.normal(scale=2, size=vocab_size).astype(np.float32)
    x[rng.integers(vocab_size, size=5)] += 14  # the others have weights below 2**-24 of these
    scale = np.array([scale_of(0.7)], np.float32)
    weights = weights_of(exponents(x, x.max(keepdims=True), scale), num_weight_bits(vocab_size))
    total = float(weights.sum())
    in_id_order, falling = np.cumsum(weights), np.cumsum(np.sort(weights)[::-1])
    rows = []
    for i in rng.integers(vocab_size - 1, size=num_rows):
        # Few borders are numbers of 53 bits, so one is just below a border and one just above.
        for shift in (-1e-15, 1e-15):
            uniform = min(in_id_order[i] / total * (1 + shift), JUST_BELOW_1)
            top_p = falling[i] / total * (1 + shift)
            rows.append(RowControls(temperature=0.7, uniform=uniform))
            rows.append(RowControls(temperature=0.7, uniform=JUST_BELOW_1, top_p=top_p))
            rows.append(RowControls(temperature=0.7, uniform=rng.random(), top_p=top_p))
    check_rows("forward", np.broadcast_to(x, (len(rows), vocab_size)).copy(), rows)


def test_greedy_and_drawn_rows_share_launches(mode: str):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(5, 70)).astype(np.float32)
    rows = [RowControls(), RowControls(temperature=1.0, uniform=0.7), RowControls(forced_id=9)]
    rows += [RowControls(bias=(np.array([5]), np.array([90.0]))), RowControls()]
    gpu = PoisoningLauncher(mode)
    assert sample(gpu, logits, rows) == numpy_tokens(logits, rows)
    assert sample(gpu, logits[:0], []) == []
    # Edits, largest logits, weights, tokens.
    assert [grid for _, grid in gpu.launches] == [(1, 5), (1, 5), (1, 5), (5,)]


def test_more_rows_than_a_launch_takes():
    rng = np.random.default_rng(4)
    num_rows = 2 * MAX_ROWS + 1
    logits = np.stack([random_logits(rng, 40) for _ in range(num_rows)]).astype(np.float32)
    check_rows("random", logits, [random_controls(rng, 40) for _ in range(num_rows)])


def test_edits_at_the_borders_of_parts(mode: str):
    """The five tokens around a border have equal chances only if each is edited once."""
    vocab_size = 2 * PART + 3
    ids = np.array([PART - 2, PART - 1, PART, PART + 1, 2 * PART])
    rows = [
        RowControls(
            temperature=1.0,
            uniform=uniform,
            bias=(ids, np.array([1.0, 2.0, 3.0, 4.0, 5.0])),
            seen_ids=ids,
            repetition_penalty=2.0,
            output_ids=ids,
            output_counts=np.array([1, 2, 3, 4, 5]),
            presence_penalty=0.25,
            frequency_penalty=0.5,
        )
        for uniform in [0.2 * i + shift for i in range(5) for shift in (0.001, 0.199)]
    ]
    logits = np.full((10, vocab_size), -INF, np.float32)
    logits[:, ids] = 0
    assert sample(PoisoningLauncher(mode), logits, rows) == numpy_tokens(logits, rows)
    assert sample(PoisoningLauncher(mode), logits, rows) == ids.repeat(2).tolist()


def test_a_large_vocabulary():
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=3, size=(4, 151_936)).astype(np.float32)
    rows = [
        RowControls(temperature=0.8, uniform=0.123, top_k=50, top_p=0.95),
        RowControls(temperature=2.0, uniform=0.987, top_p=0.99),
        RowControls(temperature=1.0, uniform=0.5),
        RowControls(temperature=1.0, uniform=0.0, allowed_ids=np.array([151_935])),
    ]
    check_rows("forward", logits, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "vocab_size", [7, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (1000, 5000))]
)
def test_top_k_1_is_greedy_and_constant_rows_are_cut_alike(mode: str, dtype: str, vocab_size: int):
    """Rows have few different 16-bit values or are constant, and their nucleus ends at a multiple
    of 1 / vocab_size.

    Every token equals NumPy's.
    """
    rng = np.random.default_rng([9, vocab_size])
    coarse = rng.integers(0, 5, size=vocab_size) / 4
    greedy = [RowControls(temperature=0.6, top_k=1, uniform=u) for u in (0.0, 0.5, JUST_BELOW_1)]
    cut = [
        RowControls(temperature=1.0, top_p=top_p, top_k=top_k, uniform=JUST_BELOW_1)
        for top_p in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1)
        for top_k in (0, 1, 2, vocab_size // 2, vocab_size - 1)
    ]
    logits = np.stack([coarse] * 3 + [coarse, np.full(vocab_size, 3.5)] * len(cut))
    rows = [*greedy, *(row for row in cut for _ in range(2))]
    logits = logits.astype(DTYPES[dtype])
    got = sample(PoisoningLauncher(mode), logits, rows)
    assert got[:3] == [int(coarse.argmax())] * 3
    assert got == numpy_tokens(logits, rows)


# Log-probabilities.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 40, 1000])
def test_log_probabilities(mode: str, dtype: str, vocab_size: int):
    rng = np.random.default_rng([7, vocab_size])
    for num_top in (0, 1, 5, MAX_TOP, MAX_TOP + 1, -1):
        row = random_logits(rng, vocab_size)
        row[rng.integers(vocab_size)] = 1.0  # at least one token is possible
        logits, token_id = row.astype(DTYPES[dtype]), int(rng.integers(vocab_size))
        got = top_logprobs(PoisoningLauncher(mode), logits, token_id, num_top)
        wanted = sampling.top_logprobs(logits.astype(np.float64), token_id, num_top)
        assert (got[0], got[2]) == (wanted[0], wanted[2])
        np.testing.assert_allclose(got[1], wanted[1], rtol=1e-13, atol=1e-13)
