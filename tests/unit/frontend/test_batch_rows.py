"""Rows of a batch on one engine, as in an actor of Ray Data."""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import table

from mie import LLM
from mie.frontend.batch import requests as rows
from mie.frontend.batch.requests import RowEngine, answers
from mie.frontend.outputs import RequestOutput

SETTINGS: dict[str, Any] = {
    "model": "bundled",
    "num_blocks": 64,
    "max_num_seqs": 2,
    "batch_invariant": True,
    "generation_config": "vllm",
}
PARAMS = {"max_tokens": 4}
ROWS = [
    {"id": "a", "prompt": "The", "sampling_params": PARAMS},
    {"id": "b", "prompt": "The", "sampling_params": json.dumps(PARAMS)},
    {"id": "c", "messages": [{"role": "user", "content": "Hi", "name": None}], "prompt": None},
    {"id": "d", "prompt_token_ids": [5, 6], "sampling_params": {**PARAMS, "n": 2, "seed": None}},
]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return RowEngine(SETTINGS).answers(ROWS)


def test_rows_are_answered_alike_in_any_order_and_batch(expected):
    actor = RowEngine(SETTINGS)
    assert actor.answers(ROWS[::-1]) == expected[::-1]
    assert [actor.answers([row])[0] for row in ROWS] == expected


def test_an_answer_has_the_text_and_the_whole_output(expected):
    assert {each["error"] for each in expected} == {None}
    assert expected[0]["generated_text"] != expected[1]["generated_text"]  # other ids, other seeds
    outputs = [RequestOutput.from_dict(json.loads(each["output"])) for each in expected]
    assert [output.outputs[0].text for output in outputs] == [
        each["generated_text"] for each in expected
    ]
    assert len(outputs[3].outputs) == 2


@pytest.mark.parametrize(("row", "message"), table("batch_rows", "failing rows"))
def test_a_row_that_fails_stops_no_other(expected, row, message):
    found = RowEngine(SETTINGS).answers([ROWS[0], row, ROWS[1]])
    assert found[0]["generated_text"] == expected[0]["generated_text"]
    assert found[2]["generated_text"] == expected[1]["generated_text"]
    assert message in str(found[1]["error"])
    assert found[1]["generated_text"] is None


def test_a_restart_takes_what_is_kept(expected, tmp_path: Path, monkeypatch):
    checkpoint = tmp_path / "done"
    first = RowEngine(SETTINGS, checkpoint)
    assert first.answers(ROWS[:2])[0] == expected[0]
    assert list(rows._kept(checkpoint)) == ["a", "b"]
    (checkpoint / "torn.part").write_text('["c", {"gener')  # as if it had been killed
    asked: list[str] = []

    def watched(llm: LLM, requests: Any) -> Any:
        requests = list(requests)
        asked.extend(key for key, _ in requests)
        return answers(llm, requests)

    monkeypatch.setattr(rows, "answers", watched)
    found = RowEngine(SETTINGS, checkpoint).answers(ROWS)
    assert asked == ["c", "d"]
    assert found == expected
