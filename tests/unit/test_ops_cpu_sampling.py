"""Test that sampling with threads and masks gives the tokens of the plain operator."""

from collections import Counter

import numpy as np
import pytest

from mie.ops import sampling
from mie.ops.sampling import RowControls, TokenMask
from mie.ops_cpu.cpu_backend import CpuBackend

CPU = CpuBackend(num_threads=2)
rng = np.random.default_rng(5)


def mask_of(vocab_size: int, density: float) -> TokenMask:
    """Return random bits. Those after the last token are set, and must not matter."""
    bits = rng.random(-(-vocab_size // 32) * 32) < density
    bits[vocab_size:] = True
    return TokenMask(np.packbits(bits, bitorder="little").view(np.int32))


def random_row(vocab_size: int) -> RowControls:
    """Return random controls, most of which have a mask and no other edit."""
    top_k = int(rng.choice([0, 0, 1, 3, 40, vocab_size]))
    controls = RowControls(
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1000.0, 1e-308])),
        top_k=top_k,
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.3])),
        min_p=float(rng.choice([0.0, 0.0, 0.05])),
        uniform=float(rng.choice([0.0, rng.random(), 1.0 - 2.0**-53])),
    )
    if rng.random() < 0.8:
        density = rng.choice([0.0, 1.5 / vocab_size, 0.1, 0.9, 1.0])
        controls.allowed = mask_of(vocab_size, density)
    if rng.random() < 0.1:
        controls.bias = rng.choice(vocab_size, 2), np.array([9.0, -9.0])
    if rng.random() < 0.1:
        controls.forced_id = int(rng.integers(vocab_size))
    return controls


def random_logits(num_rows: int, vocab_size: int, dtype: str) -> np.ndarray:
    """Return logits, of which many are equal and a few are not finite."""
    logits = np.round(rng.normal(0, 3, (num_rows, vocab_size)), int(rng.integers(0, 8)))
    for i in range(num_rows):
        if rng.random() < 0.2:
            some = rng.random(vocab_size) < rng.choice([2 / vocab_size, 1.0])
            logits[i, some] = rng.choice([-np.inf, np.inf, np.nan])
    return logits.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("vocab_size", [1, 31, 40, 2048, 20_000])
def test_each_token_is_that_of_the_plain_operator(vocab_size: int, dtype: str):
    seen: Counter[bool] = Counter()
    for num_rows in (0, 1, 3, 9, 30) * (4 if vocab_size < 10_000 else 1):
        logits = random_logits(num_rows, vocab_size, dtype)
        rows = [random_row(vocab_size) for _ in range(num_rows)]
        with np.errstate(invalid="ignore"):
            expected = sampling.sample(logits, rows)
            assert CPU.sample(logits, rows) == expected
        logits.flags.writeable = False
        greedy = [RowControls(allowed=row.allowed) for row in rows]
        assert CPU.sample(logits, greedy) == sampling.sample(logits, greedy)
        seen.update(row.allowed is not None for row in rows)
    assert min(seen[True], seen[False]) >= 3


class OneToken:
    """Allows one token, and computes no mask."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def words(self) -> np.ndarray:
        raise AssertionError("a mask is computed")

    def allows(self, token_id: int) -> bool:
        return token_id == self._token_id


def test_a_greedy_row_whose_largest_logit_is_allowed_needs_no_mask():
    logits = rng.normal(size=(4, 50)).astype("float32")
    largest = logits.argmax(axis=1).tolist()
    rows = [RowControls(allowed=OneToken(token_id)) for token_id in largest]
    assert CPU.sample(logits, rows) == largest
    rows[1] = RowControls(forced_id=7, temperature=1.0)
    rows[2] = RowControls(allowed=TokenMask(np.array([1 << 9, 0], np.int32)))
    assert CPU.sample(logits, rows) == [largest[0], 7, 9, largest[3]]
