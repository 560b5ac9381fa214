"""Compare predictions with recorded ones, as the scoreboard's suite of published models does."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts.scoreboard.suites.real_models import Comparison

SIZE, VOCAB, EVERY, TOP = 8, 40, 2, 16


@pytest.fixture
def logits() -> np.ndarray:
    """Logits of two windows."""
    return np.random.default_rng(0).normal(size=(2, SIZE, VOCAB)) * 3


@pytest.fixture
def windows() -> list[list[int]]:
    """Tokens of two windows."""
    rng = np.random.default_rng(1)
    found: list[list[int]] = rng.integers(0, VOCAB, (2, SIZE + 1)).tolist()
    return found


def log_softmax(rows: np.ndarray) -> np.ndarray:
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def compared(recorded: np.ndarray, found: np.ndarray, windows: list[list[int]]) -> Comparison:
    """Return the comparison of two models' logits of the windows."""
    rows = log_softmax(recorded).reshape(-1, VOCAB)
    targets = np.concatenate([window[1:] for window in windows])
    order = np.sort(rows)
    top = np.argsort(-rows[::EVERY])[:, :TOP]
    arrays = {
        "target": rows[np.arange(len(rows)), targets].astype(np.float32),
        "best": rows.argmax(-1).astype(np.uint32),
        "gap": (order[:, -1] - order[:, -2]).astype(np.float32),
        "top": top.astype(np.uint32),
        "top_log": np.take_along_axis(rows[::EVERY], top, -1).astype(np.float32),
    }
    golden: Any = SimpleNamespace(facts={"window": SIZE, "every": EVERY}, arrays=arrays)
    answers = iter(found)
    return Comparison(golden, windows, lambda window: next(answers))


def test_equal_predictions_differ_in_nothing(logits, windows):
    found = compared(logits, logits, windows)
    assert (found.num_tokens, found.num_same, len(found.gaps)) == (16, 16, 0)
    assert found.largest < 1e-6
    assert found.divergence < 1e-12
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=1e-7)


def test_another_best_token_is_counted_with_the_lead_of_the_recorded_one(logits, windows):
    other = logits.copy()
    second = np.argsort(logits[1, 3])[-2]
    other[1, 3, second] = logits[1, 3].max() + 1
    found = compared(logits, other, windows)
    assert found.best_tokens == "15 of 16"
    [gap] = found.gaps
    assert gap == pytest.approx(logits[1, 3].max() - logits[1, 3, second])


def test_the_divergence_is_at_most_the_one_over_all_tokens(logits, windows):
    other = logits + np.random.default_rng(2).normal(size=logits.shape) * 0.1
    found = compared(logits, other, windows)
    p, q = (log_softmax(each).reshape(-1, VOCAB)[::EVERY] for each in (logits, other))
    whole = float((np.exp(p) * (p - q)).sum(-1).mean())
    assert whole / 2 < found.divergence < whole
    assert found.largest > 1e-2
