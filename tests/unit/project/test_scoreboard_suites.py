"""Check how suites of the scoreboard read their inputs and count."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mie import LLM, StructuredOutputsParams
from mie.structured.grammars import Grammars
from scripts.scoreboard.case import Run
from scripts.scoreboard.suites import answers, maskbench, seeds, traces


def test_all_blocks_of_earlier_requests_are_found_with_memory_for_all(tmp_path: Path) -> None:
    prompts = [[0, 1, 2], [0, 1, 3], [4], [4], [0, 1, 2, 5]]
    path = tmp_path / "mooncake_conversation.jsonl"
    lines = [json.dumps({"hash_ids": each}) for each in prompts]
    path.write_text("\n".join(lines), encoding="utf-8")
    run = Run(is_quick=True, paths={path.name: path}, folder=tmp_path)
    [row] = traces.measure_hits("conversation", run)
    assert row.verdict == "reached"
    assert row.ours == "6 of 12 (50.0 %)"


def test_every_published_figure_of_the_book_has_its_source(tmp_path: Path) -> None:
    rows = [*seeds.measure(Run(is_quick=True, paths={}, folder=tmp_path))]
    assert {row.source for row in rows} == {*seeds.SOURCES.values()}


@pytest.mark.parametrize(
    ("text", "number"),
    [("It is 5.\n#### 1,200", 1200.0), ("first 3 and then -4.5 left.", -4.5), ("none", None)],
)
def test_the_number_of_an_answer_is_after_the_marks_or_the_last(text, number) -> None:
    assert answers.number_in(text) == number


def test_percentiles_of_counted_times() -> None:
    times = Counter({10: 98, 20: 1, 500: 1})
    assert [maskbench.percentile(times, share) for share in (0.5, 0.99, 1)] == [10, 20, 500]
    assert maskbench.percentile(Counter(), 0.5) == 0


def test_reasons_of_refusals_are_classes() -> None:
    begin = "structured_outputs has a json schema that "
    found = [
        maskbench.reason_of(f"{begin}cannot be followed: required property 'a' is unsatisfiable"),
        maskbench.reason_of(f"{begin}has maximum 12345, which llguidance would change (write 0)"),
        maskbench.reason_of(f"{begin}has no type; see #/properties/a/items"),
    ]
    assert found[0].endswith("a property is unsatisfiable")
    assert found[1:] == ["has maximum , which llguidance would change", "has no type"]


def test_a_value_is_accepted_with_its_properties_in_the_order_of_the_schema() -> None:
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    tokenizer = LLM("bundled", backend="numpy", num_threads=1).tokenizer
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    names = {"a": {"type": "integer"}, "b": {"items": {"properties": {"c": {}, "d": {}}}}}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=False)
    for value, is_found in (
        ({"b": [{"d": 1, "c": 2}], "a": 1}, True),
        ({"b": [], "a": "x"}, False),
        ({"e": 1}, False),
    ):
        orders = maskbench.Orders(grammars.start(params), tokenizer, schema)
        assert orders.accepts(value) == is_found
