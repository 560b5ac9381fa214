"""Test many callers of one `LLM`: streams, calls, step loops and threads, mixed."""

import gc
import signal
import threading

import pytest
from audit import check_scheduler
from deadlines import PATIENCE, join
from forks import exit_code_of_child

from mie import LLM, SamplingParams
from mie.config.params.sampling import RequestOutputKind
from mie.errors import EngineDeadError, RequestError, RequestFailedError
from mie.frontend.outputs import RequestOutput

PROMPTS = ("Once upon a time", "Tell me a story about Mia", "The old mill", "A silver bell")


@pytest.fixture(scope="module")
def llm():
    return LLM("bundled", max_num_seqs=4)


@pytest.fixture(autouse=True)
def nothing_leaks(llm):
    yield
    gc.collect()
    llm.step()
    assert not llm.has_work
    assert llm.engine.scheduler.manager.num_used == 0
    assert not llm.loop.processor.has_requests
    assert not llm.loop.inbox
    check_scheduler(llm.engine.scheduler)


def params(max_tokens=12, **more):
    return SamplingParams(temperature=1, seed=3, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def alone(llm):
    """The text of each prompt when no other request runs."""
    return [llm.generate([p], params(), use_tqdm=False)[0].outputs[0].text for p in PROMPTS]


def streamed(llm, index):
    return "".join(output.outputs[0].new_text for output in llm.stream(PROMPTS[index], params()))


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stream_that_is_closed_or_forgotten_ends_its_request(llm, is_closed):
    stream = llm.stream(PROMPTS[0], params())
    next(stream)
    assert llm.has_work
    if is_closed:
        stream.close()
    else:
        del stream
        gc.collect()
    assert not llm.has_work
    assert llm.engine.scheduler.manager.num_used == 0


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_output_kinds_of_a_stream(llm, alone, kind):
    outputs = list(llm.stream(PROMPTS[0], params(output_kind=kind, logprobs=1)))
    tokens = [output.outputs[0].token_ids for output in outputs]
    rows = [output.outputs[0].logprobs for output in outputs]
    texts = [output.outputs[0].text for output in outputs]
    final = outputs[-1].outputs[0]
    assert final.cumulative_logprob == pytest.approx(
        sum(
            row[token].logprob
            for choices, each in zip(
                tokens if kind is RequestOutputKind.DELTA else tokens[-1:],
                rows if kind is RequestOutputKind.DELTA else rows[-1:],
                strict=True,
            )
            for token, row in zip(choices, each, strict=True)
        )
    )
    if kind is RequestOutputKind.DELTA:
        assert "".join(texts) == alone[0]
        assert [len(each) for each in tokens] == [len(each) for each in rows] == [1] * 12
    elif kind is RequestOutputKind.FINAL_ONLY:
        assert texts == [alone[0]]
    else:
        assert [len(each) for each in tokens] == list(range(1, 13))
        assert all(alone[0].startswith(text) for text in texts)


def test_only_the_request_that_makes_a_step_raise_fails(llm, alone, monkeypatch):
    from mie.engine.rows import Row

    original = Row.controls

    def controls(row, choice, num_pending=0):
        if row.params.top_k == 7 and len(row.token_ids) > row.num_prompt + 2:
            raise ZeroDivisionError("its sampling")
        return original(row, choice, num_pending)

    monkeypatch.setattr(Row, "controls", controls)
    bad = params(top_k=7, repetition_penalty=1.1)
    with pytest.raises(RequestFailedError, match="ZeroDivisionError: its sampling") as caught:
        llm.generate([PROMPTS[0], PROMPTS[1]], [params(), bad], use_tqdm=False)
    good, failed = caught.value.outputs
    assert good.outputs[0].text == alone[0]
    assert failed.finished
    assert failed.outputs[0].finish_reason == "error"
    assert len(failed.outputs[0].token_ids) == 3
    with pytest.raises(RequestFailedError):
        list(llm.stream(PROMPTS[0], bad))
    request_id = llm.add_request(PROMPTS[0], bad)
    outputs = []
    while llm.has_work:
        outputs += llm.step()
    assert [o.error for o in outputs if o.finished] == ["ZeroDivisionError: its sampling"]
    assert outputs[-1].request_id == request_id


@pytest.mark.parametrize("name", ["advance", "_output"])
def test_an_error_after_the_last_token_fails_only_its_request(llm, alone, monkeypatch, name):
    from mie.frontend.answer import Answer

    original = getattr(Answer, name)

    def method(answer):
        request = answer.request
        is_bad = request.params.top_k == 7 and request.is_finished
        if is_bad and request.error is None and answer._tokenizer is not None:
            raise ZeroDivisionError("its text")
        return original(answer)

    monkeypatch.setattr(Answer, name, method)
    bad = params(top_k=7, max_tokens=3)
    with pytest.raises(RequestFailedError, match="ZeroDivisionError: its text") as caught:
        llm.generate([PROMPTS[0], PROMPTS[1]], [params(), bad], use_tqdm=False)
    good, failed = caught.value.outputs
    assert good.outputs[0].text == alone[0]
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, "error")
    with pytest.raises(RequestFailedError, match="its text"):
        list(llm.stream(PROMPTS[0], bad))
    assert not llm.loop.processor.has_requests


def test_an_observer_that_raises_costs_no_output(llm, alone, caplog):
    def observer(stats):
        raise ValueError("it does not like them")

    llm.engine.observers.append(observer)
    output = llm.generate([PROMPTS[0]], params(), use_tqdm=False)[0]
    assert output.outputs[0].text == alone[0]
    assert observer not in llm.engine.observers
    assert "an observer of the engine raised" in caplog.text


def test_a_step_that_fails_once_is_retried(llm, alone, monkeypatch, caplog):
    runner, failed = llm.engine.runner, []
    original = runner.launch

    def launch(plan):
        if len(failed) < 3 and plan.decodes and len(failed) * 3 < runner._num_stored.max():
            failed.append(plan.step)
            if len(failed) % 2:
                raise MemoryError("for a moment")
        return original(plan)

    monkeypatch.setattr(runner, "launch", launch)
    assert streamed(llm, 0) == alone[0]
    assert "a step failed and will be retried: MemoryError" in caplog.text


def test_a_fault_of_the_engine_itself_reaches_every_caller():
    own = LLM("bundled", max_num_seqs=4)
    stream = own.stream(PROMPTS[0], params())
    next(stream)
    own.add_request(PROMPTS[1], params())
    barrier, errors = threading.Barrier(4), []

    def call():
        barrier.wait(PATIENCE)
        try:
            own.generate([PROMPTS[0]], params(max_tokens=1000), use_tqdm=False)
        except EngineDeadError as error:
            errors.append(str(error))

    def broken(plan):
        raise OSError("the device is gone")

    own.engine.runner.launch = broken
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait(PATIENCE)
    with pytest.raises(EngineDeadError, match="OSError: the device is gone") as caught:
        list(stream)
    join(*threads)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(errors) == 3
    for call_again in (own.step, lambda: own.generate("x"), lambda: own.add_request("x", params())):
        with pytest.raises(EngineDeadError, match="load the model again"):
            call_again()
    own.abort("anything")


def test_request_ids(llm):
    for wrong, message in (
        (7, "request_id must be a non-empty string; got 7"),
        ("", "request_id must be a non-empty string"),
        ("auto-3", "has the form of an automatic id"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.add_request(PROMPTS[0], params(), wrong)
    given = [str(i) for i in range(20)]
    for request_id in given:
        llm.add_request(PROMPTS[0], params(max_tokens=1), request_id)
    with pytest.raises(RequestError, match="'5' is in use"):
        llm.add_request(PROMPTS[0], params(), "5")
    outputs = llm.generate(PROMPTS, params(max_tokens=1), use_tqdm=False)
    assert [output.prompt for output in outputs] == list(PROMPTS)
    finished = []
    while llm.has_work:
        finished += [output.request_id for output in llm.step()]
    assert sorted(finished) == sorted(given)


def test_a_forked_child_serves_its_own_requests(llm, alone):
    stream = llm.stream(PROMPTS[0], params())
    begun = next(stream).outputs[0].new_text
    llm.add_request(PROMPTS[2], params(max_tokens=40), "the parent's")  # the child leaves it alone

    def child():
        text = llm.generate([PROMPTS[1]], params(), use_tqdm=False)[0].outputs[0].text
        assert (text, llm.has_work) == (alone[1], False)
        with pytest.raises(RequestError, match="the parent process"):
            next(stream)

    assert exit_code_of_child(child) == 0
    assert begun + "".join(output.outputs[0].new_text for output in stream) == alone[0]
    outputs: list[RequestOutput] = []
    while llm.has_work:
        outputs += llm.step()
    assert outputs[-1].outputs[0].text.startswith(alone[2])


def test_a_forked_child_is_refused_the_gpu_at_once(llm, monkeypatch):
    monkeypatch.setattr(llm.loop, "_survives_fork", False)

    def child():
        with pytest.raises(EngineDeadError, match="which do not survive a fork"):
            llm.generate(PROMPTS[0], params(), use_tqdm=False)

    assert exit_code_of_child(child) == 0


def test_a_signal_in_another_callers_command_is_not_that_callers_error(llm):
    class Alarm(Exception):
        pass

    def handle(number, frame):
        raise Alarm

    calls = []

    def function():
        calls.append("called")
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return "done"

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        command = llm.loop.post(function)  # as another thread would
        with pytest.raises(Alarm):
            llm.loop.settle()
    finally:
        signal.signal(signal.SIGUSR1, before)
    llm.loop.settle()
    assert command.value() == "done"
    assert len(calls) == 2
