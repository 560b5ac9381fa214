"""Test the conversion of outputs to JSON and back, and the repr of objects."""

import json
import math

import pytest

from mie import LLM, CompletionOutput, RequestOutput, SamplingParams
from mie.base.stats.request import RequestMetrics
from mie.errors import ConfigError


def through_json(output: RequestOutput) -> RequestOutput:
    text = json.dumps(output.as_dict(), allow_nan=False)
    return RequestOutput.from_dict(json.loads(text))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", num_blocks=200)


def test_a_real_output_comes_back_equal(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, n=2, seed=1, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(["Once upon a time"], params, use_tqdm=False)
    again = through_json(output)
    assert again == output
    assert type(again.metrics) is RequestMetrics
    assert list(again.outputs[0].logprobs[0]) == list(output.outputs[0].logprobs[0])
    assert again.prompt_logprobs[0] is None


def test_numbers_that_json_lacks_come_back() -> None:
    choice = CompletionOutput(index=0, cumulative_logprob=math.nan)
    output = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[], outputs=[choice])
    assert math.isnan(through_json(output).outputs[0].cumulative_logprob)
    choice.cumulative_logprob = -math.inf
    assert through_json(output) == output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finnished": True}, "RequestOutput has no field 'finnished'; known are: request_id"),
        ({"prompt_token_ids": "1 2"}, "RequestOutput.prompt_token_ids must be list; got '1 2'"),
        ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\[1\] must be int; got True"),
        ({"prompt": 5}, "RequestOutput.prompt must be str; got 5"),
        ({"outputs": [{"index": 0, "finish_reason": "bored"}]}, "finish_reason must be"),
        ({"outputs": [{}]}, r"RequestOutput.outputs\[0\] lacks 'index'"),
        ({"prompt_logprobs": [{"x": {}}]}, "must have integer keys; got 'x'"),
        ({"metrics": 3}, "RequestOutput.metrics must be a JSON object; got 3"),
    ],
)
def test_an_object_that_is_not_an_output_is_refused(change: dict, message: str) -> None:
    values = {"request_id": "0", "prompt": None, "prompt_token_ids": [1], "outputs": []}
    assert RequestOutput.from_dict(values).prompt_token_ids == [1]
    with pytest.raises(ConfigError, match=message):
        RequestOutput.from_dict({**values, **change})
