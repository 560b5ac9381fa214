"""Check that reading a body of the largest size takes bounded CPU time, with any content."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_bodies import CASES, MAX_BYTES
from measured import MAX_CPU_SECONDS

from mie.serve.routes import OPERATIONS

AT_ONCE = 3
"""Bodies that a child reads, so that it ends soon on a busy machine too."""
QUICK = (("/detokenize", 0), ("/apply-template", 0))
"""The children of `make test`; the others run with the slow tests."""
REFUSED = {
    '"logit_bias"': r"logit_bias may have at most 1024 entries; got \d{6,7}\b",
    '"stop_token_ids": [5': r"stop_token_ids may have at most 4096 entries; got \d{7}\b",
    '"allowed_token_ids"': r"allowed_token_ids may have at most 2048 entries; got \d{7}\b",
    '"tokens"': r"tokens may have at most 65536 entries; got \d{7}\b",
    '"content": [{"type":"text"': r"content\.\d+\S* is one of more than 65536 objects",
    '"choice"': r"structured_outputs\.choice may have at most 65536 entries; got \d{6,7}\b",
}
"""The refusals of some fields: they name the field, its limit and the given size."""


def children() -> Iterator[Any]:
    """The routes, each with the first body of a child, and a mark."""
    for path, cases in CASES.items():
        for first in range(0, len(cases), AT_ONCE):
            marks = () if (path, first) in QUICK else (pytest.mark.slow,)
            yield pytest.param(path, first, marks=marks, id=f"{path}-{first}")


@pytest.mark.parametrize(("path", "first"), [*children()])
def test_a_body_of_the_largest_size_takes_bounded_work(zygote, path, first) -> None:
    result = zygote.run("call", "hostile_bodies:run", path, first, first + AT_ONCE)
    assert result.error is None, f"{result.message}\n{result.traceback}"
    for case in json.loads(result.stdout):
        assert 0.8 * MAX_BYTES < case["bytes"] <= MAX_BYTES, case
        assert case["seconds"] < MAX_CPU_SECONDS, case
        unknown = 404 if path == "/v1/unload_lora_adapter" else 400  # no adapter has the name
        assert case["status"] in (200, unknown), case
        for field, message in REFUSED.items():
            if field in case["case"]:
                assert re.search(message, case["text"]), case


def test_every_route_that_takes_a_body_is_measured() -> None:
    assert CASES.keys() == {each.path for each in OPERATIONS if each.body is not None}
