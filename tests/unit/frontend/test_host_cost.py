"""Count the Python calls of a step, because the time of a step depends on the machine."""

import sys
from collections.abc import Callable

import pytest
from bench import host

from mie import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams

NUM_REQUESTS = 64
NUM_STEPS = 16  # each sequence gets one block in them
MOST_CALLS = {"engine": 7.5, "final only": 12, "delta": 24, "cumulative": 23}
"""Python functions that a step may call for each request."""


def calls(step: Callable[[], object]) -> float:
    """Return the number of calls of Python functions for each step and request."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(NUM_STEPS):
            step()
    finally:
        sys.setprofile(before)
    return count / NUM_STEPS / NUM_REQUESTS


@pytest.mark.parametrize("path", MOST_CALLS)
def test_a_step_makes_few_calls_for_a_request_however_long_its_output_is(path: str) -> None:
    step, _ = host.steps_of(path, NUM_REQUESTS)
    first = calls(step)
    assert first < MOST_CALLS[path]
    for _ in range(8 * NUM_STEPS):
        step()
    assert calls(step) == pytest.approx(first, rel=0.02)


def test_the_text_of_a_request_that_fails_is_kept() -> None:
    llm = LLM("bundled", num_blocks=200)
    params = SamplingParams(
        temperature=0, max_tokens=60, output_kind=RequestOutputKind.FINAL_ONLY, n=2
    )
    [whole] = llm.generate("Once upon a time", params, use_tqdm=False)
    llm.add_request("Once upon a time", params, "short of memory")
    for _ in range(20):
        assert not llm.step()
    llm.loop.processor.fail_largest()
    [output] = llm.step()
    assert "the largest" in (output.error or "")
    for choice, known in zip(output.outputs, whole.outputs, strict=True):
        assert choice.finish_reason == "error"
        assert choice.token_ids == known.token_ids[: len(choice.token_ids)]
        assert len(choice.text) > 20
        assert known.text.startswith(choice.text)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_kind_of_output_has_the_same_tokens_and_log_probabilities(
    kind: RequestOutputKind,
) -> None:
    llm = LLM("bundled", num_blocks=200)
    options = {"temperature": 0.8, "seed": 3, "n": 2, "max_tokens": 40, "logprobs": 2}
    for stop in (None, " the"):
        params = SamplingParams(**options, stop=stop, min_tokens=6)
        [whole] = llm.generate("Once upon a time", params, use_tqdm=False)
        params = SamplingParams(**options, stop=stop, min_tokens=6, output_kind=kind)
        llm.add_request("Once upon a time", params)
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.step()
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        is_delta = kind is RequestOutputKind.DELTA
        for index, known in enumerate(whole.outputs):
            parts = [part for each in outputs for part in each.outputs if part.index == index]
            parts = parts if is_delta else parts[-1:]
            assert "".join(part.text for part in parts) == known.text
            assert [x for part in parts for x in part.token_ids] == known.token_ids
            assert [x for part in parts for x in part.logprobs or ()] == known.logprobs
            assert parts[-1].cumulative_logprob == known.cumulative_logprob
            assert parts[-1].finish_reason == known.finish_reason
            assert parts[-1].stop_reason == known.stop_reason


def test_tokens_after_a_stop_string_have_no_log_probabilities() -> None:
    llm = LLM("bundled", num_blocks=200)
    params = SamplingParams(
        temperature=0,
        max_tokens=60,
        logprobs=0,
        stop="fox",
        structured_outputs=StructuredOutputsParams(regex="The quick brown fox jumps over the dog"),
    )
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    [choice] = output.outputs
    assert choice.text == "The quick brown "
    assert output.metrics.num_forced_tokens > len(choice.token_ids) // 2
    assert [*map(len, choice.logprobs)] == [1] * len(choice.token_ids)
    assert choice.cumulative_logprob == pytest.approx(
        sum(each.logprob for row in choice.logprobs for each in row.values())
    )
