"""Check that the published conditions are the same on every machine, and match their sources."""

import hashlib
import json

import pytest

from mie.sim.book import published


def digest(values):
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def test_lengths_of_a_and_b_have_the_published_numbers():
    lengths = sorted(published.lognormal_lengths())
    assert len(lengths) == 4000
    assert lengths[0] >= 8
    assert lengths[-1] <= 2048
    assert lengths[2000] in (239, 240)
    assert round(sum(lengths) / 4000) == 287
    chat = published.chat_lengths()
    assert sum(8 <= length <= 80 for length in chat) == 200
    assert sum(150 <= length <= 512 for length in chat) == 100


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (published.lognormal_lengths, "bd04efd589fde781"),
        (published.chat_lengths, "8877c6d381adbeab"),
        (lambda: published.mixed_lengths(256, 0), "4e97e746d2a3aecf"),
        (lambda: published.poisson(300, 5).digest, "c670dd5b100b0f07"),
    ],
)
def test_draws_are_the_same_on_every_machine(values, expected):
    """Check digests of the draws.

    If this fails on a new platform, its logarithm rounds a length or an arrival differently, or
    Python draws differently. The simulated figures of the book are then not comparable.
    """
    assert digest(values()) == expected


def test_mixed_requests_are_like_the_published_ones():
    lengths = [pair for seed in range(20) for pair in published.mixed_lengths(256, seed)]
    answers = [answer for _, answer in lengths]
    assert sum(answers) / len(answers) == pytest.approx(31_637 / 256, rel=0.03)
    assert sum(prompt for prompt, _ in lengths) / len(lengths) == pytest.approx(103.4, rel=0.06)
    assert {answer > 128 for answer in answers} == {True, False}
    assert not [answer for answer in answers if not (32 <= answer <= 128 or 256 <= answer <= 512)]
