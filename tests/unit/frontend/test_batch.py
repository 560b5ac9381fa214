"""Test `mie.frontend.batch`: each request has one result that depends on the request alone."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from mie import LLM, RequestOutput
from mie.frontend.batch import answers, seed_of

SEATS = 3
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("text", {"prompt": "Once upon a time", "max_tokens": 5}),
    ("the same text", {"prompt": "Once upon a time", "max_tokens": 5}),
    ("seed", {"prompt": "Once upon a time", "max_tokens": 5, "seed": 7}),
    ("ids", {"prompt_token_ids": [5, 6, 7], "max_tokens": 3, "n": 2}),
    ("chat", {"messages": [{"role": "user", "content": "Who is Mia?"}], "max_tokens": 4}),
    ("greedy", {"prompt": "One day", "max_tokens": 4, "temperature": 0, "cache_salt": "s"}),
    ("none", {"max_tokens": 4}),
    ("two", {"prompt": "a", "prompt_token_ids": [5]}),
    ("range", {"prompt": "a", "temperature": -1}),
    ("long", {"prompt": "word " * 4000}),
    ("first", {"prompt": "a", "priority": 1}),
]
REFUSED = {"none", "two", "range", "long", "first"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", max_num_seqs=SEATS, num_blocks=128, batch_invariant=True)


def texts(output: RequestOutput) -> list[str]:
    return [choice.text for choice in output.outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, list[str]]:
    """The texts of each request, alone."""
    return {key: texts(dict(answers(llm, [(key, request)]))[key]) for key, request in REQUESTS}


def test_each_request_has_one_result_in_any_order(llm, expected) -> None:
    for requests in (REQUESTS, REQUESTS[::-1], REQUESTS[5:] + REQUESTS[:5]):
        found = list(answers(llm, requests))
        assert len(found) == len(REQUESTS)
        assert {key: texts(output) for key, output in found} == expected
        assert {key for key, output in found if output.error} == REFUSED
        assert all(output.finished for _, output in found)
    assert not llm.engine.has_work


def test_an_id_stands_in_for_a_seed_and_a_seed_comes_first(llm, expected) -> None:
    assert expected["text"] != expected["the same text"]
    request = {"prompt": "Once upon a time", "max_tokens": 5, "seed": seed_of("text")}
    [(_, output)] = answers(llm, [("another id", request)])
    assert texts(output) == expected["text"]


def test_a_refusal_says_what_is_wrong_with_the_request(llm: LLM) -> None:
    found = dict(answers(llm, [each for each in REQUESTS if each[0] in REFUSED]))
    needed = "a request needs one of prompt, messages, prompt_token_ids; got "
    assert found["none"].error == f"{needed}none of them"
    assert found["two"].error == f"{needed}prompt and prompt_token_ids"
    assert "temperature" in str(found["range"].error)
    assert "tokens" in str(found["long"].error)
    assert "scheduling_policy='priority'" in str(found["first"].error)
    assert all(output.outputs == [] for output in found.values())


def test_an_endless_input_is_read_only_as_requests_end(llm: LLM) -> None:
    num_read = 0

    def requests() -> Iterator[tuple[str, dict[str, Any]]]:
        nonlocal num_read
        for number in count():
            num_read += 1
            yield str(number), {"prompt": "a", "max_tokens": 1 + number % 3}

    results = answers(llm, requests())
    for num_ended in range(1, 20):
        next(results)
        assert num_read <= 2 * SEATS + num_ended
    assert llm.engine.has_work
    results.close()
    assert not llm.engine.has_work
    assert llm.reset_prefix_cache()  # it would refuse if a request held blocks


def test_an_input_that_raises_ends_the_running_requests(llm: LLM) -> None:
    def requests() -> Iterator[tuple[str, dict[str, Any]]]:
        yield "short", {"prompt": "a", "max_tokens": 1}
        for number in range(2 * SEATS - 1):
            yield str(number), {"prompt": "a", "max_tokens": 50}
        raise ZeroDivisionError

    results = answers(llm, requests())
    assert next(results)[0] == "short"
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not llm.engine.has_work
