"""Check that costly structured outputs are refused or followed cheaply, beside other requests."""

import pytest
from hostile_grammars import CASES
from measured import Zygote

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, name in enumerate(CASES)
    ],
)
def test_a_costly_description_is_refused_or_followed_cheaply(zygote: Zygote, name: str) -> None:
    result = zygote.run("call", "hostile_grammars:run", name)
    result.check_cost()
    assert len(result.message) < 1000
    assert result.message.isprintable()
    if result.error is not None:
        assert "structured_outputs" in result.message


@pytest.mark.slow
def test_descriptions_that_stay_compiled_take_bounded_memory(zygote: Zygote) -> None:
    """Each is as long as a description may be, and together they would take 500 MB."""
    result = zygote.run("call", "hostile_grammars:kept_bytes")
    assert result.error is None, result
    assert 100_000_000 < int(result.stdout) < 400_000_000
