"""Count the functions between a caller and the engine, and between a step and the model."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from mie import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=1, logprobs=1)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", num_blocks=16, backend="numpy")


def hops(first: str, last: str, call: Callable[[], Any]) -> list[str]:
    """Return the functions of mie from ``first`` to ``last``, both included, in a call."""
    found: list[str] = []

    def name_of(frame: FrameType) -> str:
        module = str(frame.f_globals.get("__name__", "")).removeprefix("mie.")
        return f"{module}.{frame.f_code.co_name}"

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or found or name_of(frame) != last:
            return
        names, at = [name_of(frame)], frame.f_back
        while at is not None and names[-1] != first:
            names.append(name_of(at))
            at = at.f_back
        found.extend(reversed(names))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert found[0] == first
    return found


def test_a_request_reaches_the_engine_in_six_functions(llm: LLM) -> None:
    def generate() -> None:
        llm.generate([[5, 6]], PARAMS, use_tqdm=False)

    assert len(hops("frontend.llm.generate", "engine.engine.add", generate)) <= 6


def test_an_abort_reaches_the_engine_in_seven_functions(llm: LLM) -> None:
    llm.add_request([5, 6], PARAMS, "mine")
    assert len(hops("frontend.llm.abort", "engine.engine.abort", lambda: llm.abort("mine"))) <= 7
    llm.step()


def test_a_step_reaches_the_model_in_six_functions(llm: LLM) -> None:
    llm.add_request([5, 6], PARAMS)
    assert len(hops("engine.engine.step", "model.decoder.forward", llm.step)) <= 6
