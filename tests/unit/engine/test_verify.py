"""Test how the runner verifies drafts of rows that read their tokens, on random weights."""

import numpy as np
import pytest
from drafters import Oracle

from mie import EngineConfig, SamplingParams, StructuredOutputsParams
from mie.errors import RequestError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

VOCAB, PROMPT = 40, [5, 6, 7, 8]


class Failing:
    """Allows every token, and fails after some."""

    def __init__(self, most):
        self._num_left = most

    def determined(self):
        return None

    def mask(self):
        self._check()
        return np.full(8, 255, np.uint8).tobytes()

    def allows(self, token_id):
        self._check()
        return True

    def _check(self):
        if not self._num_left:
            raise RequestError("no token can follow")

    def accept(self, token_id):
        self._num_left -= 1

    def validate(self, token_ids):
        return len(token_ids)


class FailingConstraints:
    vocab_size, eos_token_ids = VOCAB, (3,)

    def start(self, structure):
        return Failing(5)


FAILS = {"structured_outputs": StructuredOutputsParams(regex="x")}


def outputs(directory, all_params, drafter=None):
    """Return the outputs of requests with these parameters, their errors, and the steps."""
    engine = load_engine(
        directory,
        LoadSettings(
            engine=EngineConfig(num_blocks=32, block_size=4), backend="numpy", dtype="float64"
        ),
        constraints=FailingConstraints(),
        drafter=drafter,
    )
    requests = [
        engine.add_request(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True, **params))
        for params in all_params
    ]
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    found = [request.sequences[0].output_ids for request in requests]
    return found, [type(request.error) for request in requests], num_steps


def check_right_drafts(directory, all_params):
    """Assert that right drafts change nothing but the number of steps."""
    expected, errors, num_steps = outputs(directory, all_params)
    known = {(number, 0): tokens for number, tokens in enumerate(expected)}
    for kind in ("right", "half"):
        drafter = Oracle(known, kind, vocab_size=VOCAB)
        found, found_errors, num_fewer = outputs(directory, all_params, drafter)
        assert (found, found_errors) == (expected, errors)
        assert drafter.num_accepted > 0
        assert num_fewer < num_steps
    return expected, errors


def test_a_request_that_fails_behind_a_draft_has_the_same_tokens(tiny):
    params = [{"temperature": 0.0, **FAILS}, {"temperature": 0.7, "seed": 1}]
    expected, errors = check_right_drafts(tiny["llama"].directory, params)
    assert [*map(len, expected)] == [5, 9]
    assert errors == [RequestError, type(None)]


@pytest.mark.parametrize(
    "params",
    [
        *({"repetition_penalty": 3.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}),
        *({"min_tokens": 5, "stop_token_ids": [11, 4, 17]}, {"logit_bias": {9: 3.0, 4: 2.0}}),
        {"allowed_token_ids": [5, 6, 9, 11]},
    ],
)
def test_each_row_has_the_history_of_its_own_position(tiny, params):
    sampled = {"temperature": 1.5, "seed": 3, **params}
    check_right_drafts(tiny["llama"].directory, [{"temperature": 0.0, **params}, sampled])


def test_a_bad_word_is_not_completed_behind_a_draft(tiny):
    directory = tiny["llama"].directory
    [plain], _, _ = outputs(directory, [{"temperature": 0.0}])
    words = [plain[1:3], plain[4:6]]
    [expected], _ = check_right_drafts(
        directory, [{"temperature": 0.0, "bad_words_token_ids": words}]
    )
    assert expected != plain
