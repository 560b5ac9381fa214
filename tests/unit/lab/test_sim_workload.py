"""Check that a seed always gives the same workload, and test JSON and refusals."""

import json
from pathlib import Path

import pytest

from mie.errors import ConfigError
from mie.lab.loads import PRESETS
from mie.lab.workload import Answer, Text, Tokens, Workload, WorkloadRequest

DIGESTS = {
    "burst": "63c78e657461dac70b5304a50f13b21c",
    "poisson": "0ffe28654f6b9a9579517779f857ae0c",
    "bursty": "f6e639dcf64c28fc1d328366bbe522da",
    "shared-prefix": "bc95d20a840b8ee192c7275bd1b8cba2",
    "chats": "bdb0710231013f03c76416a86cf77a6c",
    "interference": "52961c861390819fd42273549b2967bf",
    "agents": "54dfa9d90e070e9733785deaa084d97a",
}
"""First half of the SHA-256 of each preset from seed 0."""


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_not_changed(name: str):
    assert PRESETS[name](seed=0).digest[:32] == DIGESTS[name]


@pytest.mark.parametrize("name", ["poisson", "chats", "agents"])
def test_a_workload_survives_a_round_trip_through_json(name: str, tmp_path: Path):
    workload = PRESETS[name](seed=3)
    path = tmp_path / "workload.json"
    path.write_text(workload.to_json(), encoding="utf-8")
    assert Workload.load(path) == workload
    assert Workload.load(path).digest == workload.digest != PRESETS[name](seed=4).digest


def test_equal_texts_have_equal_tokens_and_others_differ():
    request = WorkloadRequest(
        request_id="x", prompt=(Text(1, 64), Tokens((3,)), Answer("w"), Text(2, 64)), max_tokens=1
    )
    tokens = request.token_ids(1000, {("w", 0): [8, 9]})
    again = WorkloadRequest(request_id="y", prompt=(Text(1, 40),), max_tokens=1)
    assert tokens[:40] == again.token_ids(1000, {})
    assert tokens[64:67] == [3, 8, 9]
    assert sum(a == b for a, b in zip(tokens[:64], tokens[67:], strict=True)) < 3
    assert {*map(type, tokens)} == {int}
    assert max(tokens) < 1000


# Refusals.


def request(**values: object) -> dict:
    return {"request_id": "a", "prompt": [{"text": 1, "length": 2}], "max_tokens": 3, **values}


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request(), request()], "twice"),
        ([request(prompt=[{"answer_of": "b"}])], "has not ended"),
        ([request(), request(request_id="b", prompt=[{"answer_of": "a"}])], "has not ended"),
        (
            [
                request(),
                request(request_id="b", after="a", prompt=[{"answer_of": "a", "choice": 1}]),
            ],
            "choice 1",
        ),
        ([request(max_tokens=0)], "request 0: max_tokens"),
        ([request(), request(request_id="b", arrival_ns=-1)], "request 1: arrival_ns"),
        ([request(colour="red")], "colour"),
        ([request(prompt=[{"text": 1, "length": 0}])], "length"),
        ([request(request_id=7)], "request_id"),
        ([{"request_id": "a"}], "prompt"),
        ("none", "list of requests"),
    ],
)
def test_an_absurd_workload_is_refused(requests: object, message: str, tmp_path: Path):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"format": 1, "name": "x", "requests": requests}))
    with pytest.raises(ConfigError, match=message) as caught:
        Workload.load(path)
    assert str(caught.value).startswith(str(path))


def test_short_texts_with_different_numbers_differ() -> None:
    requests = (
        WorkloadRequest(request_id=str(number), prompt=(Text(number, 4),), max_tokens=1)
        for number in range(8000)
    )
    assert len({tuple(each.token_ids(2**18, {})) for each in requests}) == 8000
