"""Fuzz the compiler of structured outputs with random schemas, expressions and grammars.

Each is refused by name or followed, within limits of CPU time and memory for the process that
serves and for the worker. The seeds are fixed.
"""

import json

import pytest
from measured import Zygote

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

MOST_BYTES = 500_000_000
"""Peak memory of the process that serves, for 20 descriptions and their outputs."""


def fuzz(zygote: Zygote, first: int, end: int) -> dict[str, float]:
    result = zygote.run("call", "fuzzed_grammars:run", first, end)
    assert result.error is None, f"{result.message}\n{result.traceback}"
    assert result.peak_bytes < MOST_BYTES, f"{first}: {result.peak_bytes / 1e6:.0f} MB"
    found: dict[str, float] = json.loads(result.stdout)
    return found


def test_one_hundred_descriptions(zygote: Zygote) -> None:
    batches = [fuzz(zygote, first, first + 20) for first in range(0, 100, 20)]
    for verdict in ("followed", "refused"):  # else it would test nothing
        assert sum(batch[verdict] for batch in batches) >= 15, batches
    # What cannot be followed to its end is refused before its prompt is computed.
    assert sum(batch["ended"] for batch in batches) <= 1, batches


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(1, 22))
def test_two_thousand_descriptions(zygote: Zygote, hundred: int) -> None:
    for first in range(100 * hundred, 100 * hundred + 100, 20):
        fuzz(zygote, first, first + 20)
