"""Check that a lack of memory costs the largest requests, and never the engine."""

import importlib
import itertools
import os
import random

import pytest
from audit import check_scheduler

from mie import LLM, SamplingParams
from mie.errors import EngineDeadError, RequestFailedError

PLACES = [
    ("mie.engine.engine.Engine", "step"),
    ("mie.engine.engine.Engine", "_finish_step"),
    ("mie.sched.scheduler.Scheduler", "schedule"),
    ("mie.sched.scheduler.Scheduler", "update"),
    ("mie.engine.runner.ModelRunner", "launch"),
    ("mie.engine.runner.ModelRunner", "collect"),
    ("mie.frontend.processor.OutputProcessor", "process"),
    ("mie.frontend.processor.OutputProcessor", "catch_up"),
    ("mie.frontend.processor.OutputProcessor", "fail_largest"),
    ("mie.frontend.answer.Answer", "advance"),
    ("mie.frontend.answer.Answer", "fail"),
    ("mie.text.stream.TextStream", "add"),
]
CASES = [*itertools.product(PLACES, (1, 2, 3, 5), (0, 2, 5))]
FAR = os.environ.get("MIE_HYPOTHESIS") == "far"
SHORT, LONG = "Once upon a time", "Once upon a time " * 12
ASKED = [
    (SHORT, SamplingParams(max_tokens=6, temperature=0)),
    (SHORT, SamplingParams(max_tokens=4, temperature=1, seed=1, n=3)),
    (LONG, SamplingParams(max_tokens=3, temperature=0)),
    (LONG, SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=5)),
]
"""Requests, the smallest first."""


def generate(llm):
    """Return the outputs of all requests, also if some have failed."""
    prompts, params = zip(*ASKED, strict=True)
    try:
        return llm.generate(list(prompts), list(params), use_tqdm=False)
    except RequestFailedError as failed:
        return failed.outputs


def texts(output):
    return [choice.text for choice in output.outputs]


@pytest.fixture(scope="module")
def llm():
    return LLM("bundled", max_num_seqs=8, num_blocks=64, num_threads=1)


@pytest.fixture(scope="module")
def alone(llm):
    return [texts(output) for output in generate(llm)]


def fail(monkeypatch, place, count, after):
    """Let a method raise ``count`` times in a row, after some calls that succeed."""
    owner, name = place
    module, _, cls = owner.rpartition(".")
    target = getattr(importlib.import_module(module), cls)
    original, num_calls = getattr(target, name), itertools.count()

    def method(self, *args, **options):
        if after <= next(num_calls) < after + count:
            raise MemoryError("injected")
        return original(self, *args, **options)

    monkeypatch.setattr(target, name, method)


@pytest.mark.parametrize(
    ("place", "count", "after"), CASES if FAR else random.Random(3).sample(CASES, 24)
)
def test_the_largest_requests_make_way(llm, alone, monkeypatch, place, count, after):
    is_early = after < 5
    if place[1] in ("catch_up", "fail_largest", "fail"):  # these run after a failed turn only
        fail(monkeypatch, ("mie.engine.runner.ModelRunner", "launch"), 2, after)
        after = 0
    fail(monkeypatch, place, count, after)
    outputs = generate(llm)
    monkeypatch.undo()
    failed = [each.error is not None for each in outputs]
    assert sum(failed) <= count + 1
    if is_early:  # no request had ended before
        assert failed == sorted(failed), "a smaller request made way for a larger one"
    for output, expected in zip(outputs, alone, strict=True):
        if output.error is None:
            assert texts(output) == expected
        else:
            assert output.error.startswith("MemoryError: the memory did not suffice")
            assert "prompt tokens was the largest" in output.error
    assert not llm.loop.processor.has_requests
    assert llm.engine.scheduler.manager.num_used == 0
    check_scheduler(llm.engine.scheduler)
    assert [texts(output) for output in generate(llm)] == alone


def test_each_failure_after_the_first_costs_one_request(llm, alone, monkeypatch):
    for count in range(1, 6):
        fail(monkeypatch, ("mie.engine.runner.ModelRunner", "launch"), count, 1)
        assert sum(output.error is not None for output in generate(llm)) == min(count - 1, 4)
        monkeypatch.undo()


def test_an_engine_that_cannot_even_end_a_request_is_dead(monkeypatch):
    own = LLM("bundled", max_num_seqs=2, num_blocks=16, num_threads=1)
    for place in (("Engine", "step"), ("Engine", "fail")):
        fail(monkeypatch, (f"mie.engine.engine.{place[0]}", place[1]), 100, 0)
    with pytest.raises(EngineDeadError, match="MemoryError"):
        own.generate(SHORT, use_tqdm=False)
